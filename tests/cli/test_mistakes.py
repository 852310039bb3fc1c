"""What people get wrong, and what befalls their files: said at once, in one message, and nothing is left behind."""

import os
import shlex
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from mistakes import MISTAKES, Mistake, markdown
from processes import CHECKOUT, RL_SWARM, SMALL, end, run, start, status, until

from benchmarks.lib.paths import MANIFEST
from rl_swarm.cli import models
from rl_swarm.config.settings import Settings
from rl_swarm.network.base import NetworkError
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.owner_documents import await_manifest
from rl_swarm.node.evaluation import protocol
from rl_swarm.plural import counted
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import swarm_name
from rl_swarm.protocol.rollouts import Completion
from rl_swarm.storage.files import LocalFiles

NO_HUB = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}  # nobody answers there


@pytest.fixture(scope="module")
def folder_of_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Play a run of one round, for the mistakes about runs."""
    folder = tmp_path_factory.mktemp("finished")
    code, output = run(folder, "up", "--run", "runs/mine", "--nodes", "1", "--rounds", "1", "--device", "cpu", *SMALL)
    assert code == 0, output
    return folder


def without(package: str, folder: Path) -> dict[str, str]:
    """Return the environment of a process that finds this package nowhere."""
    (folder / "sitecustomize.py").write_text(
        "import importlib.machinery, sys\n"
        "class Missing(importlib.machinery.PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        f"        return None if name.partition('.')[0] == {package!r} else super().find_spec(name, path, target)\n"
        "sys.meta_path[:] = [Missing if each is importlib.machinery.PathFinder else each for each in sys.meta_path]\n"
    )
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.typed[:60]} {mistake.said[:20]}")
def test_a_mistake_is_told_in_one_line_before_anything_is_made(
    tmp_path: Path, mistake: Mistake, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue("folder_of_run") if mistake.in_run else tmp_path / "here"
    folder.mkdir(exist_ok=True)
    for name, text in mistake.files.items():
        (folder / name).mkdir() if name.endswith("/") else (folder / name).write_text(text)
        (folder / name).chmod(mistake.modes.get(name, 0o700))
    environ = {**os.environ, **NO_HUB, **mistake.environ, "CUDA_VISIBLE_DEVICES": ""}
    environ |= without(mistake.missing, tmp_path) if mistake.missing else {}
    before = set(folder.rglob("*"))
    done = subprocess.run(
        [*RL_SWARM, *shlex.split(mistake.typed)], cwd=folder, env=environ, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=240,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if line.startswith("rl-swarm: ")]
    assert (done.returncode, len(said)) == (mistake.code, 1), done.stderr
    assert mistake.said in said[0] and "Traceback" not in done.stderr and "None" not in said[0]
    assert done.stdout == "" and set(folder.rglob("*")) == before
    if not mistake.in_run:
        assert len(done.stderr.strip().splitlines()) == 1


def test_the_page_has_these_mistakes() -> None:
    page = (CHECKOUT / "docs" / "mistakes.md").read_text()
    assert len(MISTAKES) >= 40 and page[page.index("## ") :] == markdown()


def test_a_key_that_others_can_read_is_told_and_used(tmp_path: Path) -> None:
    assert run(tmp_path, "identity", "new")[0] == 0
    (tmp_path / "swarm.pem").chmod(0o644)
    code, output = run(tmp_path, "identity", "show")
    assert code == 0 and "other users of this machine can open it (mode 0644)" in output and "chmod 600" in output


def test_a_model_that_the_nodes_cannot_load_leaves_no_run_behind(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    code, output = run(tmp_path, "up", "--model", "./model", "--nodes", "1", *SMALL)
    assert code == 1 and "MODEL_NAME=./model cannot be loaded" in output
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.slow
def test_a_run_may_have_any_name_that_a_folder_can_have(tmp_path: Path) -> None:
    name = "_mein Läufchen [1]"
    code, output = run(tmp_path, "up", "--run", f"runs/{name}", "--nodes", "1", "--rounds", "2", *SMALL)
    assert code == 0, output
    assert f"Starting 1 node in runs/{name}" in output
    assert f"validate 'runs/{name}'" in output
    assert status(tmp_path, tmp_path / "runs" / name)["name"] == "mein-Laufchen-1"
    code, output = run(tmp_path, "validate", f"runs/{name}", "--rounds", "2", "--nodes", "1")
    assert code == 0, output
    assert name in run(tmp_path, "runs", COLUMNS="120")[1]


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("my run", "my-run"),
        ("_x", "x"),
        ("été.2", "ete.2"),
        ("日本", "run"),
        ("", "run"),
        ("as-it_is.1", "as-it_is.1"),
        ("a" * 200, "a" * 64),
    ],
)
def test_a_swarm_is_called_after_its_folder(folder: str, name: str) -> None:
    assert swarm_name(folder) == name


def test_a_node_in_a_directory_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    code, output = run(Path("/proc"), "join", str(tmp_path / "drive" / "swarm"))  # not even root writes there
    assert code == 1 and "Start in a directory that can be written" in output and "Traceback" not in output
    (tmp_path / "logs").write_text("no folder")  # the log is kept in the private directory, and this stays
    process = start(tmp_path, "coordinate", str(tmp_path / "drive" / "swarm"))
    try:
        until(lambda: (tmp_path / "drive" / "swarm" / "manifest.json").exists() or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    finally:
        end(process)
    assert "coordinating" in output and "Traceback" not in output
    assert (tmp_path / "logs").read_text() == "no folder"


def broken_manifest(folder: Path) -> LocalFiles:
    files = LocalFiles(folder)
    files.write(MANIFEST, f'{{"peer_id": "{Identity.generate().peer_id}", "digest": "00", "signature": ""}}'.encode())
    return files


def test_a_node_says_that_it_waits_for_a_manifest_to_become_whole(tmp_path: Path) -> None:
    address = tmp_path / "drive" / "swarm"
    broken_manifest(address)
    node = start(tmp_path, "join", str(address), "--set", "poll_interval=0.1")
    try:
        assert node.stdout is not None
        line = next(line for line in node.stdout if "manifest.json" in line)
        assert "waiting for manifest.json" in line and "digest" in line
    finally:
        end(node)


def test_a_manifest_that_does_not_become_whole_is_given_up(tmp_path: Path) -> None:
    files = broken_manifest(tmp_path)
    with pytest.raises(NetworkError, match=r"manifest\.json has not become whole .*digest"):
        await_manifest(FolderStore(files), threading.Event(), 0.02, patience=0.2)


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    for command in (["show", "a.json"], ["runs"], ["up", "--dry-run"]):
        ours, theirs = os.pipe()
        os.close(ours)
        done = subprocess.run([*RL_SWARM, *command], cwd=tmp_path, stdout=theirs, stderr=subprocess.PIPE)
        os.close(theirs)
        assert (done.returncode, done.stderr) == (1, b"")


def test_names_of_folders_are_no_markup_to_a_terminal(tmp_path: Path) -> None:
    for name in ("[/x]", "[red]x"):
        code, output = run(tmp_path, "runs", "--root", name)
        assert code == 0 and f"No runs in {name}." in output


@pytest.mark.parametrize(("number", "shown"), [(0, "0 nodes"), (1, "1 node"), (2, "2 nodes"), (1200, "1,200 nodes")])
def test_one_is_not_many(number: int, shown: str) -> None:
    assert counted(number, "node") == shown
    assert protocol(1, 1, None) == "1 question answered 1 time"


def test_what_a_model_says_is_no_command_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Spoken:
        def sample(self, *_: object, **__: object) -> list[list[Completion]]:
            return [[Completion("\x1b]0;x\x07 5", True)]]

    monkeypatch.setattr(models.Policy, "load", lambda *_: Spoken())
    models.chat("tiny", Settings(), "?")
    assert capsys.readouterr().out == "\\x1b]0;x\\x07 5\n"
