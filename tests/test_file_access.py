"""No code reaches a shared folder but through `network/files.py`: every other call that touches files is listed here.

A new one is an error until somebody has thought about it. Whoever adds it says which private or system path it is for.
"""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "rl_swarm"
# Calls that open, read, write, list, make, move, link or remove something by its path.
METHODS = {
    "open", "read_text", "read_bytes", "write_text", "write_bytes", "mkdir", "makedirs", "glob", "rglob", "iterdir", "rmdir",
    "unlink", "rename", "symlink_to", "hardlink_to", "touch", "chmod", "lchmod", "rmtree", "copytree", "copyfile", "copy2",
    "listdir", "scandir", "removedirs", "truncate", "mkfifo", "symlink", "link", "stat", "lstat", "exists", "is_file",
    "is_dir", "isdir", "isfile", "walk", "utime", "load_file", "save_file", "safe_open", "savefig", "FileHandler", "memmap",
    "mkdtemp", "mkstemp", "TemporaryDirectory", "NamedTemporaryFile", "from_pretrained", "save_pretrained",
}  # fmt: skip
OS_ONLY = {"replace", "remove"}  # strings and lists have these too
FILES = {
    "RunView",
    "ast",
    "files",
    "here",
    "local",
    "store",
    "drive",
    "private",
    "inner",
    "self",
}  # receivers that are `Files`

# Where such calls are, and for which paths. Nothing here may be below a swarm's folder.
ALLOWED = {
    "network/beneath.py": "the layer itself",
    "network/files.py": "the layer itself; its other paths are private",
    "network/shared_log.py": "the private side of a log",
    "private.py": "the private directory",
    "telemetry/logs.py": "the private log file",
    "learning/checkpoints.py": "the private directory of checkpoints",
    "learning/lookup.py": "a directory that the user named",
    "learning/precision.py": "the user's cache, and /proc",
    "cli/__init__.py": "/dev/null",
    "learning/lora.py": "a private checkpoint",
    "learning/policy.py": "models: a private checkpoint, a directory that the user named, or the hub's cache",
    "learning/smollm2.py": "the user's cache of converted models",
    "learning/warmup.py": "the directory that the user named for a model",
    "learning/memory.py": "/proc and /sys",
    "learning/team.py": "a directory in the temporary folder",
    "learning/models/make_tiny.py": "a recipe, run by hand",
    "learning/models/make_coder.py": "a recipe, run by hand",
    "learning/models/pretraining.py": "a recipe, run by hand",
    "telemetry/machine.py": "/proc",
    "identity.py": "the user's key",
    "presence.py": "a lock in the temporary folder",
    "config.py": "the user's configuration",
    "run_settings.py": "the user's key",
    "hub.py": "private copies of a checkpoint",
    "report.py": "/proc",
    "swarm.py": "the private log file, and a device",
    "web/server.py": "the private log file",
    "scoring/worker.py": "/dev/null",
    "scoring/keeper.py": "the sandbox",
    "scoring/namespaces.py": "/proc",
    "scoring/lockdown.py": "the sandbox",
    "environments/coding/sources.py": "DATA_PATH, the user's data",
    "network/p2p/engine.py": "a directory in the temporary folder",
    "network/p2p/onlooking.py": "a directory in the temporary folder",
    "cli/running.py": "directories that the user named",
    "cli/identity.py": "files that the user named",
    "cli/app.py": "whether a file that the user named is there",
    "cli/warmup.py": "files that the user named",
    "cli/experiment.py": "directories that the user named",
    "experiment/figures.py": "into memory",
    "experiment/measures.py": "LocalFiles",
    "notebook/experiments.py": "directories that the user named",
    "notebook/plots.py": "into memory",
    "cli/doctor.py": "the machine",
    "notebook/cells.py": "the kernel's machine",
    "worker.py": "whether the folder is there",
}


def calls(path: Path, package: Path = PACKAGE) -> list[str]:
    """The calls of a module that may touch files by their paths."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name, receiver = "", ""
        if isinstance(node.func, ast.Name):
            name = node.func.id
        elif isinstance(node.func, ast.Attribute):
            name = node.func.attr
            inner = node.func.value
            receiver = inner.id if isinstance(inner, ast.Name) else getattr(inner, "attr", "")
        touches = name in METHODS and receiver not in FILES
        if touches or (name in OS_ONLY and receiver == "os"):
            found.append(f"{path.relative_to(package)}:{node.lineno} {receiver}.{name}")
    return found


def test_only_the_listed_modules_touch_files_by_their_paths() -> None:
    found = [call for path in sorted(PACKAGE.rglob("*.py")) for call in calls(path)]
    elsewhere = [call for call in found if call.partition(":")[0] not in ALLOWED]
    assert elsewhere == [], "reach a shared folder through LocalFiles, or list the module with its reason"


def test_every_module_that_is_listed_still_needs_to_be() -> None:
    used = {call.partition(":")[0] for path in PACKAGE.rglob("*.py") for call in calls(path)}
    assert sorted(set(ALLOWED) - used) == []


def test_the_list_would_notice_another_way_in(tmp_path: Path) -> None:
    module = PACKAGE / "network" / "folder.py"
    assert calls(module) == []
    for line in (
        "open('x')",
        "Path('x').read_bytes()",
        "os.replace('a', 'b')",
        "shutil.rmtree(folder)",
        "root.glob('*')",
    ):
        probe = tmp_path / "probe.py"
        probe.write_text(module.read_text() + f"\n{line}\n")
        assert len(calls(probe, tmp_path)) == 1, line
