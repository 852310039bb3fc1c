"""No code reaches a shared folder but through `storage/files.py`: every other use of a file is listed here.

A new one is an error until somebody has thought about it. Whoever adds it says which private or system path it is for.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "rl_swarm"
# Methods and functions that open, read, write, list, make, move, link or remove something by its path.
METHODS = {
    "open", "read_text", "read_bytes", "write_text", "write_bytes", "mkdir", "makedirs", "glob", "rglob", "iglob",
    "iterdir",
    "rmdir", "unlink", "rename", "renames", "symlink_to", "hardlink_to", "link_to", "touch", "chmod", "lchmod",
    "chown", "rmtree",
    "copytree", "copyfile", "copy2", "listdir", "scandir", "removedirs", "truncate", "mkfifo", "mknod", "symlink",
    "link", "stat",
    "lstat", "exists", "lexists", "is_file", "is_dir", "is_symlink", "isdir", "isfile", "islink", "getsize",
    "getmtime", "walk",
    "fwalk", "utime", "readlink", "samefile", "statvfs", "load_file", "save_file", "safe_open", "savefig",
    "FileHandler",
    "RotatingFileHandler", "TimedRotatingFileHandler", "WatchedFileHandler", "memmap", "fromfile", "tofile", "savez",
    "savetxt",
    "loadtxt", "genfromtxt", "read_csv", "to_csv", "read_table", "write_table", "read_parquet", "to_parquet", "mkdtemp",
    "mkstemp", "mktemp", "TemporaryDirectory", "TemporaryFile", "NamedTemporaryFile", "SpooledTemporaryFile",
    "ZipFile", "TarFile",
    "from_pretrained", "save_pretrained", "snapshot_download", "open_code", "from_file", "LocalFileSystem",
    "DirFileSystem",
}  # fmt: skip
# Of these modules every function does, or starts something that may; of `os` those below.
MODULES = {
    "shutil",
    "tempfile",
    "zipfile",
    "tarfile",
    "sqlite3",
    "glob",
    "dbm",
    "shelve",
    "fileinput",
    "linecache",
    "subprocess",
}
OF_OS = METHODS | {
    "replace",
    "remove",
    "access",
    "posix_spawn",
    "posix_spawnp",
    "system",
    "popen",
    "execv",
    "execve",
    "execvp",
}
OF_TORCH = {"save", "load"}
HARMLESS = {"shutil.which", "shutil.get_terminal_size", "tempfile.gettempdir", "subprocess.TimeoutExpired",
            "subprocess.CalledProcessError", "subprocess.DEVNULL", "subprocess.PIPE", "subprocess.STDOUT"}  # fmt: skip
# What has such a name and is none: of `LocalFiles`, a parser, our own objects.
OURS = {
    ("RunView", "open"),
    ("ast", "walk"),
    ("members", "walk"),
    ("self", "open"),
    ("streams", "open"),
    ("store", "makedirs"),
}
OURS |= {(name, "stat") for name in ("files", "local", "here", "self")}
LOGS = {"log", "history"}  # a `SharedLog` has a `replace` of its own


# Where such calls are, and for which paths. Nothing here may be below a swarm's folder.
ALLOWED = {
    "storage/beneath.py": "the layer itself",
    "storage/files.py": "the layer itself; its other paths are private",
    "storage/shared_log.py": "the private side of a log",
    "storage/private.py": "the private directory",
    "telemetry/logs.py": "the private log file",
    "learning/checkpoints.py": "the private directory of checkpoints",
    "learning/lookup.py": "a directory that the user named",
    "learning/cpu/precision.py": "the user's cache, and /proc",
    "cli/__init__.py": "/dev/null",
    "learning/lora.py": "a private checkpoint",
    "learning/policy.py": "models: a private checkpoint, a directory that the user named, or the hub's cache",
    "learning/smollm2.py": "the user's cache of converted models",
    "learning/warmup.py": "the directory that the user named for a model",
    "learning/devices.py": "how full a disk is",
    "learning/memory.py": "/proc and /sys",
    "learning/parallel/data_parallel.py": "a directory in the temporary folder",
    "telemetry/machine.py": "/proc",
    "protocol/identity.py": "the user's key",
    "network/presence.py": "a lock in the temporary folder",
    "config/resolve.py": "the user's configuration",
    "node/run_settings.py": "the user's key",
    "node/hub.py": "private copies of a checkpoint",
    "node/swarm.py": "the private log file, and a device",
    "web/server.py": "the private log file",
    "scoring/worker.py": "/dev/null",
    "scoring/process.py": "no file: the scoring process",
    "scoring/sandbox/sandbox.py": "no file: the process of the sandbox",
    "scoring/sandbox/fork_server.py": "the sandbox",
    "scoring/sandbox/namespaces.py": "/proc",
    "scoring/lockdown.py": "the sandbox",
    "environments/coding/sources.py": "DATA_PATH, the user's data",
    "environments/coding/generator.py": "no file: programs of our own",
    "network/p2p/die_with_parent.py": "the daemon that this process becomes",
    "network/p2p/engine.py": "a directory in the temporary folder",
    "network/p2p/observer.py": "a directory in the temporary folder",
    "cli/preflight.py": "a device",
    "cli/running.py": "directories that the user named",
    "cli/identity.py": "files that the user named",
    "cli/arguments.py": "runs in the directory of the user, for the newest one and for completion",
    "cli/choice.py": "whether a directory that the user named is there",
    "cli/runs.py": "directories that the user named",
    "cli/validate.py": "whether a file that the user named is there",
    "cli/warmup.py": "files that the user named",
    "cli/experiment.py": "directories that the user named",
    "experiment/figures.py": "into memory",
    "notebook/experiments.py": "directories that the user named",
    "notebook/plots.py": "into memory",
    "cli/doctor.py": "the machine",
    "notebook/cells.py": "the kernel's machine",
    "node/worker.py": "whether the folder is there",
}


# Modules that have shared paths at hand too: there it is the functions that are listed.
MIXED = {
    "cli/runs.py": {"list_runs"},
    "cli/validate.py": {"validate"},
    "cli/experiment.py": {"_check_folder"},
    "cli/running.py": {"up", "_run", "run_process", "_new_run_directory"},
    "experiment/figures.py": {"draw"},
    "node/hub.py": {"__call__", "_work", "_upload", "_tidy", "put_aside", "_where"},
    "learning/checkpoints.py": {"save", "_aside", "fetch", "clear", "_digests", "restore_optimizer"},
    "network/p2p/observer.py": {"observed"},
    "storage/shared_log.py": {"__init__", "append", "read", "replace", "_whole_lines"},
    "notebook/cells.py": {"up", "__init__"},
    "notebook/experiments.py": {"results"},
    "storage/private.py": {"remember_swarm", "started_swarm", "_made"},
    "node/run_settings.py": {"resumed"},
    "node/swarm.py": {"uses_gpu", "visible_gpus", "_child_main"},
    "telemetry/logs.py": {"", "_repair"},
    "web/server.py": {"dashboard_process"},
    "node/worker.py": {"explained"},
}


def uses(source: str) -> Iterator[tuple[str, str]]:
    """The functions of a module that use files by their paths, each with what it does: called, aliased or handed on."""
    tree = ast.parse(source)
    real: dict[str, str] = {}  # names that were imported, and what they stand for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            real |= {
                (each.asname or each.name): each.name for each in node.names if each.asname or "." not in each.name
            }
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            real |= {(each.asname or each.name): f"{node.module}.{each.name}" for each in node.names}
    yield from _below(tree, "", real)


def _below(tree: ast.AST, function: str, real: dict[str, str]) -> Iterator[tuple[str, str]]:
    for node in ast.iter_child_nodes(tree):
        inside = function
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inside = function or node.name
        elif (what := _use(node, real)) is not None:
            yield function, what
        yield from _below(node, inside, real)


def _use(node: ast.AST, real: dict[str, str]) -> str | None:
    """What a name, an attribute or a call does with files, if anything."""
    if isinstance(node, ast.Call):
        return _call(node, real)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        if node.id in ("open", "exec", "eval", "__import__") and node.id not in real:
            return node.id
        module, _, name = real.get(node.id, "").rpartition(".")
        return f"{module}.{name}" if module and _touches(module, name) else None
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        receiver = _receiver(node.value, real)
        return f"{receiver}.{node.attr}" if _touches(receiver, node.attr) else None
    return None


def _call(node: ast.Call, real: dict[str, str]) -> str | None:
    """Calls whose arguments tell: `Path.replace` has one, `getattr` may hide the name of a function."""
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if called == "replace" and isinstance(node.func, ast.Attribute) and len(node.args) == 1 and not node.keywords:
        return None if _receiver(node.func.value, real) in LOGS else "Path.replace"
    if called == "basicConfig" and any(each.arg == "filename" for each in node.keywords):
        return "basicConfig"
    if called == "getattr" and node.args and _receiver(node.args[0], real) in ("os", "io", "builtins", *MODULES):
        name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
        return None if str(name).startswith(("O_", "sched_")) else "getattr"
    return None


def _receiver(node: ast.AST, real: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return real.get(node.id, node.id)
    return getattr(node, "attr", "")


def _touches(receiver: str, name: str) -> bool:
    last = receiver.rpartition(".")[2]
    if f"{receiver}.{name}" in HARMLESS or (last, name) in OURS:
        return False
    if receiver in MODULES:
        return True
    if receiver in ("os", "os.path", "path"):
        return name in OF_OS
    if receiver in ("torch", "numpy", "np", "pickle", "joblib"):
        return name in OF_TORCH | METHODS
    return name in METHODS


def found() -> dict[str, set[str]]:
    """Of every module the functions that use files by their paths."""
    by_module: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).as_posix()
        if functions := {function for function, _ in uses(path.read_text())}:
            by_module[module] = functions
    return by_module


def test_only_the_listed_modules_touch_files_by_their_paths() -> None:
    elsewhere = {module: functions for module, functions in found().items() if module not in ALLOWED}
    assert elsewhere == {}, "reach a shared folder through LocalFiles, or list the module with its reason"


def test_every_module_that_is_listed_still_needs_to_be() -> None:
    assert sorted(set(ALLOWED) - found().keys()) == []


def test_where_shared_paths_are_at_hand_no_other_function_touches_files_by_their_paths() -> None:
    by_module = found()
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE).as_posix()
        if "LocalFiles" in path.read_text() and module != "storage/files.py":
            assert by_module.get(module, set()) <= MIXED.get(module, set()), module
    assert {module: by_module[module] for module in MIXED} == MIXED


WAYS = (
    "open('x')",
    "reader = open",
    "os.replace('a', 'b')",
    "shutil.rmtree(folder)",
    "shutil.move(a, b)",
    "root.glob('*')",
    "Path('x').read_bytes()",
    "Path('x').replace(target)",
    "here.open('w')",
    "self.private.mkdir()",
    "map(os.unlink, names)",
    "functools.partial(os.rename, 'a')",
    "from os import remove as gone\ngone('x')",
    "import os as system\nsystem.unlink('x')",
    "from shutil import move\nmove(a, b)",
    "import io\nio.open('x')",
    "getattr(os, 'un' + 'link')('x')",
    "tempfile.mkdtemp(dir=root)",
    "import zipfile\nzipfile.ZipFile(path)",
    "import sqlite3\nsqlite3.connect(path)",
    "import torch\ntorch.save(model, path)",
    "import numpy as np\nnp.load(path)",
    "import numpy\nnumpy.fromfile(path)",
    "parquet.read_table(path)",
    "from safetensors.torch import load_file\nload_file(path)",
    "from safetensors.torch import save_file as keep\nkeep(tensors, path)",
    "logging.FileHandler(path)",
    "logging.basicConfig(filename=path)",
    "import subprocess\nsubprocess.run(['cp', a, b])",
    "os.system('cp a b')",
    "fsspec.open(path)",
    "fsspec.implementations.local.LocalFileSystem()",
    "os.path.getmtime(path)",
    "path.is_symlink()",
    "exec(text)",
    "__import__('os')",
)


@pytest.mark.parametrize("line", WAYS)
def test_the_list_would_notice_another_way_in(line: str) -> None:
    source = (PACKAGE / "network" / "folder.py").read_text()
    assert list(uses(source)) == []
    assert list(uses(f"{source}\n{line}\n"))


@pytest.mark.parametrize(
    "line",
    [
        "text.replace('a', 'b')",
        "replace(state, round=1)",
        "names.remove('x')",
        "files.stat('x')",
        "import os\nos.environ",
    ],
)
def test_what_touches_no_file_is_not_noticed(line: str) -> None:
    assert list(uses(line)) == []
