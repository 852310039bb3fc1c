"""Writes the list of all files in docs/files.md, from the first sentence of each.

    python scripts/file_tree.py            # writes the page again
    python scripts/file_tree.py --check    # says whether it is up to date

A Python file is described by its docstring, a folder by the docstring of its `__init__.py`, a page and a notebook by
their headings, shell and page scripts by their first comment. `FOLDERS` describes the folders that have none of these.
"""

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "files.md"
BEGIN, END = "<!-- begin: scripts/file_tree.py -->", "<!-- end -->"
SECTIONS = ("src/rl_swarm", "recipes", "tests", "benchmarks", "notebooks", "docs", "scripts")
FOLDERS_ALONE = {"tests"}  # whose files speak for themselves
LISTED = {"src/rl_swarm/web/static"} | {  # folders that are no packages, and whose files are listed
    f"benchmarks/{name}" for name in ("dashboard", "learner", "lib", "network", "robustness")
}
FOLDERS = {
    "benchmarks/dashboard": "Measures how fast the dashboard answers and what it costs.",
    "benchmarks/learner": "Measures a round on one machine: sampling, training, scoring, and what sharing is worth.",
    "benchmarks/lib": "Holds what the benchmarks share: options and tables, clocks and memory, a made-up run.",
    "benchmarks/network": "Measures what a swarm costs by its size, in a folder and among peers.",
    "benchmarks/robustness": "Plays swarms through attacks, faults and random input.",
    "docs": "Explains the system, and reports what was measured.",
    "docs/images": "Holds the pictures of the pages.",
    "docs/results": "Holds the experiments that docs/sapo.md reports, packed in one file each.",
    "notebooks": "Runs and shows swarms in Jupyter and Colab.",
    "recipes": "Makes the bundled models; not part of the installed package.",
    "scripts": "Sets up the environment and writes what the docs contain.",
    "src/rl_swarm/learning/models/coder": "Holds the bundled model that programs.",
    "src/rl_swarm/learning/models/tiny": "Holds the bundled model that the first run trains.",
    "src/rl_swarm/web/static": "Holds the page: plain ES modules, no build step.",
    "src/rl_swarm/web/static/vendor": "Holds uPlot, as its npm package has it.",
    "tests": "Says in sentences how the system behaves, and tries it on the real thing.",
    "tests/helpers": "Holds what several tests share: swarms, stores, models, attackers.",
}
SENTENCE = re.compile(r"(.+?[.?!])(?=\s+[A-Z`'\"(]|$)")
IGNORED = {"__pycache__"}


def first_sentence(text: str) -> str:
    """Return the first sentence of the first paragraph, on one line."""
    line = " ".join(text.strip().split("\n\n")[0].split())
    found = SENTENCE.match(line)
    return found.group(1) if found else line


def of_module(text: str) -> str:
    return first_sentence(ast.get_docstring(ast.parse(text)) or "")


def of_page(text: str) -> str:
    return next((line[2:].strip() for line in text.splitlines() if line.startswith("# ")), "")


def of_notebook(text: str) -> str:
    return of_page("".join(json.loads(text)["cells"][0]["source"]))


def of_script(text: str) -> str:
    comments = re.findall(r"^(?:#(?!!)|//)(.*)", text, re.MULTILINE)
    return first_sentence("\n".join(comments))


READERS: dict[str, Callable[[str], str]] = {
    ".ipynb": of_notebook,
    ".js": of_script,
    ".md": of_page,
    ".py": of_module,
    ".sh": of_script,
}


def described(path: Path) -> str:
    """Return what a file or a folder is for; empty where nothing says so."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        init = path / "__init__.py"
        if name in FOLDERS or not init.is_file():
            area = name.removeprefix("tests/")
            return FOLDERS.get(name) or (f"Tests `{area}`." if name.startswith("tests/") else "")
        path = init
    return READERS[path.suffix](path.read_text(encoding="utf-8"))


def entries(folder: Path) -> Iterator[Path]:
    """Yield what the table of a folder lists: files first, then folders that have no table of their own."""
    inside = [path for path in sorted(folder.iterdir()) if path.name not in IGNORED]
    if folder.relative_to(ROOT).as_posix() not in FOLDERS_ALONE:
        yield from (p for p in inside if p.is_file() and p.suffix in READERS and p.name != "__init__.py")
    yield from (p for p in inside if p.is_dir() and not has_table(p) and described(p))


def has_table(folder: Path) -> bool:
    """Return whether the files of a folder are listed one by one."""
    name = folder.relative_to(ROOT).as_posix()
    return name in LISTED or ("tests" not in folder.relative_to(ROOT).parts and (folder / "__init__.py").is_file())


def tables(folder: Path, level: int = 2) -> Iterator[str]:
    """Yield the table of a folder, then those of the packages in it."""
    name = folder.relative_to(ROOT).as_posix()
    listed = list(entries(folder))
    if listed:
        yield f"{'#' * level} {name}\n\n{described(folder)}\n\n" + "\n".join(
            ["| file | what it does |", "| --- | --- |", *map(row, listed)]
        )
    packages = (p for p in sorted(folder.iterdir()) if p.is_dir() and p.name not in IGNORED and has_table(p))
    for package in packages:
        yield from tables(package, 3)


def row(path: Path) -> str:
    name = path.name + "/" * path.is_dir()
    what = described(path).replace("|", "\\|")
    return f"| [{name}](../{path.relative_to(ROOT).as_posix()}) | {what} |"


def page(before: str) -> str:
    """Return the page with its list made anew; what stands around the markers stays."""
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    made = "\n\n".join(table for section in SECTIONS for table in tables(ROOT / section))
    return f"{head}{BEGIN}\n\n{made}\n\n{END}{tail}"


def main() -> None:
    before = PAGE.read_text(encoding="utf-8")
    after = page(before)
    if "--check" in sys.argv:
        sys.exit(0 if before == after else f"{PAGE.name} is out of date: run python scripts/file_tree.py")
    PAGE.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
