"""The packages import each other one way; a contract in pyproject.toml says which, and fails when that changes."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "rl_swarm"
# Where a module is imported by a name that is computed: classes of users and of other installed packages, modules of
# reasoning-gym and of Python.
OTHERS_MODULES = {
    "environments/__init__.py",
    "node/strategies.py",
    "scoring/safe_scorers.py",
    "scoring/sandbox/fork_server.py",
}
UPWARD = {
    "at the top": "from rl_swarm.node import intake\n",
    "in a function": "def later():\n    import rl_swarm.web.api\n",
    "for types alone": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from rl_swarm.cli import app\n",
    "torch": "import torch\n",
}


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command; lint_imports_command()",
        "--no-cache",
    ]
    paths = [str(root / "src"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(PACKAGE, root / "src" / "rl_swarm", ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def test_imports_go_one_way() -> None:
    found = lint(ROOT)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("how", UPWARD)
def test_an_import_upward_is_found(copied: Path, how: str) -> None:
    module = copied / "src" / "rl_swarm" / "protocol" / "words.py"
    before = module.read_text()
    module.write_text(f"{before}\n{UPWARD[how]}")
    try:
        found = lint(copied)
    finally:
        module.write_text(before)
    assert found.returncode == 1 and "rl_swarm.protocol" in found.stdout, found.stdout + found.stderr


def test_modules_of_ours_are_never_imported_by_a_computed_name() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                if name in ("import_module", "__import__") and not isinstance(node.args[0], ast.Constant):
                    found.add(path.relative_to(PACKAGE).as_posix())
    assert found == OTHERS_MODULES
