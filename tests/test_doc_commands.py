"""Commands in the docs work: their subcommands, flags and settings exist, and blocks tagged `run` are executed."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer

from rl_swarm.cli.app import app
from rl_swarm.config.settings import all_settings

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:rl-swarm|\./run_rl_swarm\.sh|\.venv/bin/rl-swarm|python -m benchmarks)\b[^`]*)`")
PROGRAMS = ("rl-swarm", "./run_rl_swarm.sh", ".venv/bin/rl-swarm")
SETTINGS = {setting.name for setting in all_settings()}
VARIABLES = {name for setting in all_settings() for name in setting.env}
FOREIGN = re.compile(r"(AWS|OTEL|HF|WANDB|TRACKIO)_|(PYTHON|G)$")  # variables of other programs, and of a block itself


def lines_of(block: str) -> list[str]:
    return block.replace("\\\n", " ").splitlines()


def commands_of(page: Path) -> Iterator[str]:
    """Yield the commands that a page shows, in blocks and in sentences."""
    text = page.read_text(encoding="utf-8")
    for language, _, block in BLOCK.findall(text):
        if language in ("sh", "bash"):
            yield from lines_of(block)
    yield from INLINE.findall(BLOCK.sub("", text).replace("\n", " "))


def words_of(command: str) -> list[str]:
    try:
        return shlex.split(command, comments=True)
    except ValueError:
        return command.split()


def mistakes(command: str) -> list[str]:
    """Return what a command names that does not exist: a subcommand, a flag, a setting, a variable."""
    words, found = words_of(command), []
    while words and (named := re.fullmatch(r"(?:([A-Z][A-Z_0-9]*)=.*|export)", words[0])):
        if named[1] and named[1] not in VARIABLES and not FOREIGN.match(named[1]):
            found.append(f"variable {named[1]}")
        words = words[1:]
    if words and words[0] in PROGRAMS:
        if words[0] == "./run_rl_swarm.sh" and (len(words) == 1 or words[1].startswith("-")):
            words = [words[0], "up", *words[1:]]
        return found + mistakes_of_program(words[1:])
    for start in range(len(words) - 1):
        if words[start] == "-m" and words[start + 1].startswith("benchmarks."):
            known = help_of_benchmark(words[start + 1])
            flags = (word.partition("=")[0] for word in words[start + 2 :] if word.startswith("--"))
            return found + [f"{words[start + 1]} {flag}" for flag in flags if flag not in known]
    return found


def mistakes_of_program(words: list[str]) -> list[str]:
    command, found = typer.main.get_command(app), []
    while (children := getattr(command, "commands", None)) and words and not words[0].startswith("-"):
        child = children.get(words[0])
        if child is None:
            return [f"subcommand {words[0]}"]
        command, words = child, words[1:]
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help", "-h"}
    for number, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag.startswith("--") and flag not in known:
            found.append(f"{command.name} {flag}")
        if flag == "--set":
            name = (value or words[number + 1] if number + 1 < len(words) else value).partition("=")[0]
            found += [f"setting {name}"] if name.isidentifier() and name not in SETTINGS else []
    return found


@cache
def help_of_benchmark(module: str) -> set[str]:
    if not (ROOT / (module.replace(".", "/") + ".py")).is_file():
        return set()
    source = (ROOT / (module.replace(".", "/") + ".py")).read_text()
    shared = "".join(path.read_text() for path in (ROOT / "benchmarks" / "lib").glob("*.py"))
    return {f"--{name}" for name in re.findall(r'"--([a-z][a-z0-9-]*)"', source + shared)} | {"--help"}


RIGHT = [page for page in PAGES if page.name != "mistakes.md"]  # whose commands are wrong on purpose


@pytest.mark.parametrize("page", RIGHT, ids=lambda page: page.name)
def test_commands_on_a_page_name_what_exists(page: Path) -> None:
    assert [(command, wrong) for command in commands_of(page) if (wrong := mistakes(command))] == []


def test_a_wrong_command_is_found() -> None:
    assert mistakes("rl-swarm upp --nodes 2") == ["subcommand upp"]
    assert mistakes("./run_rl_swarm.sh --nods 2") == ["up --nods"]
    assert mistakes("rl-swarm up --set locl_groups=2") == ["setting locl_groups"]
    assert mistakes("MODEL_NAM=tiny rl-swarm up") == ["variable MODEL_NAM"]
    assert mistakes("python -m benchmarks.learner.round --sistems ours") == ["benchmarks.learner.round --sistems"]


def tagged(tag: str) -> Iterator[tuple[Path, str, str]]:
    for page in PAGES:
        for language, tags, block in BLOCK.findall(page.read_text(encoding="utf-8")):
            if tags.split() == tag.split():
                yield page, language, block


def run_block(page: Path, language: str, block: str, folder: Path) -> None:
    """Execute a block as a reader would, in an empty directory beside the docs."""
    (folder / "docs").symlink_to(ROOT / "docs")
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    (folder / "block").write_text(block)
    (folder / "bin").mkdir()
    (folder / "bin" / "rl-swarm").write_text(f'#!/bin/sh\nexec {sys.executable} -m rl_swarm "$@"\n')
    (folder / "bin" / "rl-swarm").chmod(0o755)
    (folder / "bin" / "python").symlink_to(sys.executable)
    command = ["bash", "-eu", "block"] if language == "sh" else [sys.executable, "block"]
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": path, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{page.name}:\n{block}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize(("page", "language", "block"), list(tagged("run")))
def test_a_block_that_is_tagged_runs(page: Path, language: str, block: str, tmp_path: Path) -> None:
    run_block(page, language, block, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "language", "block"), list(tagged("run slow")))
def test_a_long_block_that_is_tagged_runs(page: Path, language: str, block: str, tmp_path: Path) -> None:
    run_block(page, language, block, tmp_path)
