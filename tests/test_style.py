"""The code keeps to its style: a class name once, docstrings that say what a part does, files of one subject."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "rl_swarm"
# Whose docstrings and sizes are held to the style.
CHECKED = ("__main__.py", "network", "plural.py", "protocol", "storage")
NO_VERB = {"What", "Whether", "How", "Of", "Those", "Whoever", "Somebody"}
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
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in nodes(module) if isinstance(node, documented)]
    assert [text for text in docstrings if text and text.split()[0] in NO_VERB] == []


@pytest.mark.parametrize("module", CHECKED_MODULES)
def test_a_file_has_one_subject(module: str) -> None:
    assert len(MODULES[module].read_text().splitlines()) <= MAX_LINES


def test_every_package_named_exists() -> None:
    assert all((PACKAGE / name).exists() for name in CHECKED)
