"""The two commands of the README hand their arguments on, and install only when something changed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the scripts whose virtual environment records what it is asked to do instead of doing it."""
    for name in ("run_rl_swarm.sh", "run_tests.sh", "scripts", "pyproject.toml", "constraints.txt"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").write_text(
        f'#!/bin/sh\ncase "$*" in *"pip install"*) echo "INSTALL $*";; *) exec {sys.executable} "$@";; esac\n'
    )
    for name in ("rl-swarm", "ruff", "lint-imports", "mypy"):
        (programs / name).write_text(f'#!/bin/sh\necho "{name.upper()} $*"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    return tmp_path


def call(checkout: Path, *command: str) -> list[str]:
    done = subprocess.run(["bash", *command], cwd=checkout, capture_output=True, text=True)
    return [line for line in (done.stdout + done.stderr).splitlines() if line.split(" ")[0].isupper()]


def test_it_installs_once_and_again_only_after_a_change(checkout: Path) -> None:
    first = call(checkout, "run_rl_swarm.sh")
    assert first[0].startswith("INSTALL") and first[0].endswith("--editable .[web]")
    assert first[1:] == ["RL-SWARM up"]
    assert call(checkout, "run_rl_swarm.sh") == ["RL-SWARM up"]
    with (checkout / "constraints.txt").open("a") as file:
        file.write("six==1.17.0\n")
    assert call(checkout, "run_rl_swarm.sh")[0].startswith("INSTALL")
    assert call(checkout, "run_rl_swarm.sh") == ["RL-SWARM up"]


def test_arguments_are_handed_on_and_never_taken_for_something_else(checkout: Path) -> None:
    call(checkout, "run_rl_swarm.sh")
    assert call(checkout, "run_rl_swarm.sh", "--nodes", "2") == ["RL-SWARM up --nodes 2"]
    assert call(checkout, "run_rl_swarm.sh", "status", "runs/x", "--json") == ["RL-SWARM status runs/x --json"]
    assert call(checkout, "run_rl_swarm.sh", "dev") == ["RL-SWARM dev"]
    assert call(checkout, "run_rl_swarm.sh", "--version") == ["RL-SWARM --version"]


def test_the_tests_install_what_tests_need(checkout: Path) -> None:
    lines = call(checkout, "run_tests.sh", "--collect-only")
    assert lines[0].startswith("INSTALL") and lines[0].endswith("--editable .[dev]")
    for checked in ("RUFF check", "RUFF format", "LINT-IMPORTS", "MYPY"):
        assert any(line.startswith(checked) for line in lines)


def test_the_short_tests_skip_the_types_and_the_options_are_listed(checkout: Path) -> None:
    lines = call(checkout, "run_tests.sh", "--fast", "--collect-only")
    assert any(line.startswith("RUFF check") for line in lines) and not any(line.startswith("MYPY") for line in lines)
    done = subprocess.run(["bash", "run_tests.sh", "--help"], cwd=checkout, capture_output=True, text=True)
    told = (ROOT / "CONTRIBUTING.md").read_text()
    for option in ("--fast", "--slow", "--gpu", "--coverage"):
        assert f"  {option} " in done.stdout and f"./run_tests.sh {option}" in told
