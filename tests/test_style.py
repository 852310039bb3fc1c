"""The code keeps to its style: a class name once, docstrings that say what a part does, files of one subject."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "rl_swarm"
CHECKED = (  # whose docstrings and sizes are held to the style
    *("__main__.py", "cli", "environments", "experiment", "monitor", "node", "notebook", "plural.py", "storage"),
    *("learning", "network", "protocol", "scoring", "telemetry", "web"),
)
NO_VERB = {"What", "Whether", "How", "Of", "Those", "Whoever", "Somebody"}
NO_VERB_OF_FUNCTION = NO_VERB | {"The", "A", "An", "One", "Such", "Which", "Who", "Where"}
MAX_LINES = 500
MODULES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
CHECKED_MODULES = [name for name in MODULES if name.split("/")[0] in CHECKED]


def nodes(module: str) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(MODULES[module].read_text()))


def test_a_class_name_occurs_once() -> None:
    names = Counter(node.name for module in MODULES for node in nodes(module) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_a_bound_is_called_max() -> None:
    bounds = [node.id for module in MODULES for node in nodes(module) if isinstance(node, ast.Name)]
    assert [name for name in bounds if name.startswith(("MOST_", "_MOST_"))] == []


@pytest.mark.parametrize("module", CHECKED_MODULES)
def test_a_docstring_says_what_a_part_does(module: str) -> None:
    found = []
    for node in nodes(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split()
            no_verb = NO_VERB if isinstance(node, ast.Module | ast.ClassDef) else NO_VERB_OF_FUNCTION
            found += [" ".join(words)] if words and words[0] in no_verb else []
    assert found == []


@pytest.mark.parametrize("module", CHECKED_MODULES)
def test_a_file_has_one_subject(module: str) -> None:
    assert len(MODULES[module].read_text().splitlines()) <= MAX_LINES


def test_every_package_named_exists() -> None:
    assert all((PACKAGE / name).exists() for name in CHECKED)
