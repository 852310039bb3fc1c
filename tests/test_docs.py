"""The pages for people fit the files: links lead somewhere, paths exist, and the list of files is up to date."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
NAMED = re.compile(r"`([\w./-]+\.py)`")
DRAWN = re.compile(r"^```(?:mermaid|text)$.*?^```", re.MULTILINE | re.DOTALL)
DRAWN_FILE = re.compile(r"\b(?:[a-z_\d]+/)+\w+\.(?:py|js)\b")
TYPED = re.compile(r"\b(?:benchmarks|recipes|scripts|tests)/[\w/]+\.py")
ROOTS = (ROOT, ROOT / "src" / "rl_swarm", ROOT / "src" / "rl_swarm" / "web")
EXAMPLES = {"school.py", "sums.py", "ideas.py"}  # which readers write themselves
CODE = ("src", "benchmarks", "recipes", "scripts", "tests")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
IN_DOCSTRING = re.compile(r"(?<![\w*.{}-])(?:[\w-]+/)*[\w-]+\.py\b")


def anchors(page: Path) -> set[str]:
    """Return what a link can name on a page, as GitHub makes it from the headings."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return found


def broken(page: Path) -> Iterator[str]:
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield target


def missing(page: Path) -> set[str]:
    """Return the files of code that a page names, or a diagram on it, and that do not exist."""
    if page.name == "files.md":  # made from files that exist; their sentences name neighbours
        return set()
    text = page.read_text(encoding="utf-8")
    drawn = [name for drawing in DRAWN.findall(text) for name in DRAWN_FILE.findall(drawing)]
    named = {*NAMED.findall(text), *TYPED.findall(text), *drawn} - EXAMPLES
    return {name for name in named if not exists(name)}


def missing_in_docstrings(file: Path) -> set[str]:
    """Return the Python files that a module's docstrings name, and that do not exist."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    texts = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, DOCUMENTED)]
    named = {name for text in texts for name in IN_DOCSTRING.findall(text)} - EXAMPLES
    nearby = (file.parent, file.parent.parent)
    return {name for name in named if not exists(name) and not any((folder / name).is_file() for folder in nearby)}


def exists(name: str) -> bool:
    """Return whether a path is one of the repository, of the package, or the name of a test."""
    if any((folder / name).is_file() for folder in ROOTS):
        return True
    return name.startswith("test_") and any((ROOT / "tests").rglob(name))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    assert list(broken(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_files_that_a_page_names_exist(page: Path) -> None:
    assert missing(page) == set()


def test_python_files_that_docstrings_name_exist() -> None:
    files = [file for folder in CODE for file in (ROOT / folder).rglob("*.py")]
    found = {file.relative_to(ROOT).as_posix(): gone for file in files if (gone := missing_in_docstrings(file))}
    assert len(files) > 300 and found == {}


def test_a_file_that_is_gone_is_found_in_a_docstring(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""Calls `gone.py` and node/round.py."""\n\ndef f() -> None:\n    "See wire/no.py."\n')
    assert missing_in_docstrings(module) == {"gone.py", "wire/no.py"}


def test_a_broken_link_and_a_missing_file_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Here it is\n\n[a](#here-it-is) [b](#there) [c](no.md) [d](page.md#here) `node/gone.py`\n"
        "\n```mermaid\nflowchart LR\n    A[web/no.js]\n```\n"
    )
    assert list(broken(page)) == ["#there", "no.md", "page.md#here"]
    assert missing(page) == {"node/gone.py", "web/no.js"}


def test_the_list_of_files_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "file_tree.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_the_tables_of_metrics_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "metrics_table.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_every_metric_says_what_it_is() -> None:
    rows = re.findall(r"^\| `(.+?)` \|.*\| (.*) \|$", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    assert len(rows) > 40 and [name for name, what in rows if not what] == []


def test_every_file_says_what_it_does() -> None:
    rows = re.findall(r"^\| \[(.+?)\].*?\| (.*) \|$", (ROOT / "docs" / "files.md").read_text(), re.MULTILINE)
    assert len(rows) > 200 and [name for name, what in rows if not what] == []


def test_an_own_rollout_passes_twelve_files_at_most() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    diagram = page.partition("### A node's own rollout")[2].partition("```text\n")[2].partition("```")[0]
    before, _, after = diagram.partition("+-->")  # publishing is a branch, up to the next step
    path = before + after[after.index("\ntrain") :]
    files = set(re.findall(r"[a-z_/]+\.py", path))
    assert "node/round.py" in files and "learning/trainer.py" in files
    assert len(files) <= 12
