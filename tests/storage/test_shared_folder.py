"""Whoever can write to a swarm's folder can put anything in place of its files, at any moment: real swarms, attacked.

Nothing outside of the folder is read, written or removed; nothing that a node did not sign itself is loaded; and the
swarm goes on.
"""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from processes import QUICK, RL_SWARM, end, run, start, state, status, until
from safetensors.torch import load_file, save_file

import rl_swarm
from benchmarks.lib.paths import rollouts_path
from rl_swarm.cli.running import _has_worked
from rl_swarm.config.resolve import layered
from rl_swarm.config.settings import Settings
from rl_swarm.errors import UserError
from rl_swarm.experiment.arms import Arm, Job
from rl_swarm.experiment.lockstep import LockstepSwarm, RunMember
from rl_swarm.network.address import open_address
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.owner_documents import read_manifest
from rl_swarm.network.remote import RemoteFiles
from rl_swarm.node import run_settings
from rl_swarm.node.worker import found, opened
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.wire import canonical, digest, seal
from rl_swarm.storage.files import LocalFiles
from rl_swarm.telemetry import logs as logs_module
from rl_swarm.telemetry.logs import SwarmLog

ORDINARY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
UP = ["up", "--run", "r", "--nodes", "2", *QUICK]
COMMAND = "$(touch ran)"


@pytest.fixture(params=["this user", pytest.param("an ordinary user", marks=pytest.mark.slow)])
def person(request):
    """Says how to start `rl-swarm` as this user and, where this is root, as an ordinary one; and a folder of theirs."""
    with tempfile.TemporaryDirectory() as folder:  # the one that pytest makes is closed to others
        os.chmod(folder, 0o777)
        command = RL_SWARM
        if request.param == "an ordinary user":
            if os.geteuid() != 0 or shutil.which("setpriv") is None:
                pytest.skip("needs root and setpriv to become another user")
            command = [*ORDINARY, str(reachable(Path(folder) / "venv")), "-m", "rl_swarm"]
            again = "import subprocess, sys, rl_swarm.cli.app; subprocess.run([sys.executable, '-c', ''], check=True)"
            if subprocess.run([*command[:-2], "-c", again], cwd=folder, capture_output=True).returncode:
                pytest.skip("an ordinary user cannot run this Python")
        yield command, Path(folder)


def reachable(folder: Path) -> Path:
    """Makes an environment of the system's Python with the packages of this one, which may be in a closed home."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    system = shutil.which(name, path="/usr/local/bin:/usr/bin") or sys.executable
    subprocess.run([system, "-m", "venv", "--without-pip", folder], check=True, capture_output=True)
    packages = [path for path in sys.path if path.endswith("site-packages")]
    packages.append(str(Path(rl_swarm.__file__).parents[1]))
    (folder / "lib" / name / "site-packages" / "these.pth").write_text("\n".join(packages))
    return folder / "bin" / "python"


def begin(cwd: Path, *arguments: str, **environ: str) -> "subprocess.Popen[str]":
    return start(cwd, *arguments, PRIVATE_PATH=str(cwd / "private"), **environ)


def logs(folder: Path, name: str = "metrics.jsonl") -> list[Path]:
    return [path / name for path in sorted((folder / "logs").iterdir()) if path.is_dir()]


def until_round(folder: Path, number: int) -> None:
    until(lambda: state(folder)["round"] >= number or state(folder)["phase"] == "finished")


def finish(process: "subprocess.Popen[str]") -> str:
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        end(process)
    assert process.returncode == 0, output
    return output


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def replaced(path: Path, put: Callable[[Path], object]) -> None:
    """Puts something else in place of what a swarm goes on writing to."""
    with tempfile.TemporaryDirectory(dir=path.parent.parent, ignore_cleanup_errors=True) as room:
        other = Path(room) / "new"
        put(other)
        for attempt in range(1000):  # the swarm may write there again at once
            with suppress(FileNotFoundError):
                path.rename(Path(room) / f"old-{attempt}")
            try:
                other.rename(path)
                return
            except OSError:
                continue
    raise AssertionError(f"{path} could not be replaced")


def junk_rollouts(address: Path, node: str, number: int) -> bytes:
    """A publication with a right digest, a junk signature, and a command for a peer id."""
    fields = {"peer_id": COMMAND, "kind": "rollouts", "node": node, "round": number, "stage": 0}
    return json.dumps({**fields, "digest": digest(canonical(fields)), "signature": "AAAA"}).encode()


@pytest.mark.slow
def test_a_log_that_is_a_link_to_a_start_file_of_a_shell_writes_no_command_there(tmp_path: Path) -> None:
    """The node says in its log what it has refused, and from whom; the log leads to a file that a shell runs."""
    profile = tmp_path / "profile"
    profile.write_text("# mine\n")
    process = begin(tmp_path, *UP, "--rounds", "8")
    try:
        until_round(tmp_path / "r", 1)
        nodes = [path.parent.name for path in logs(tmp_path / "r")]
        for name in ("training_events.jsonl", "metrics.jsonl"):
            for path in logs(tmp_path / "r", name):
                replaced(path, lambda path: path.symlink_to(profile))
        log = tmp_path / "r" / "logs" / "swarm.log"
        replaced(log, lambda path: path.symlink_to(profile))
        for number in range(9):
            for node in nodes:
                path = tmp_path / "r" / rollouts_path(number, 0, node)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(junk_rollouts(tmp_path / "r", node, number))
    finally:
        finish(process)
    assert profile.read_text() == "# mine\n"
    subprocess.run(["sh", "-c", ". ./profile"], cwd=tmp_path, check=True)
    assert not (tmp_path / "ran").exists()
    for path in [*logs(tmp_path / "r"), *logs(tmp_path / "r", "training_events.jsonl"), log]:
        assert path.is_file() and not path.is_symlink(), "the copies are there again"
        assert COMMAND not in path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir], ids=["a pipe", "a directory"])
def test_a_log_that_is_a_pipe_stops_nobody(tmp_path: Path, put) -> None:
    process = begin(tmp_path, *UP, "--rounds", "6")
    try:
        until_round(tmp_path / "r", 1)
        for name in ("training_events.jsonl", "metrics.jsonl"):
            for path in logs(tmp_path / "r", name):
                replaced(path, put)
        replaced(tmp_path / "r" / "logs" / "swarm.log", put)
        replaced(tmp_path / "r" / "state" / "history.jsonl", put)
        assert begin(tmp_path, "status", "r", "--json").wait(timeout=400) == 0
    finally:
        finish(process)
    assert all(len(path.read_text().splitlines()) >= 6 for path in logs(tmp_path / "r")), "whole again at the end"
    assert status(tmp_path, tmp_path / "r")["phase"] == "finished"
    assert run(tmp_path, "validate", "r")[0] == 0


def test_the_log_of_a_swarm_is_written_again_when_it_was_cut_or_is_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of terabytes takes no room on a disk, and lines that are added to it are lost to people."""
    log = SwarmLog(tmp_path / "private.log", LocalFiles(tmp_path / "r"))
    monkeypatch.setattr(logs_module, "REPAIR_SECONDS", 0.0)
    copy = tmp_path / "r" / "logs" / "swarm.log"

    def say(text: str) -> None:
        log.emit(logging.LogRecord("rl_swarm", logging.INFO, "", 0, text, None, None))

    for number in range(10):
        say(f"line {number}")
    for size in (0, 1 << 42):
        os.truncate(copy, size)
        say(f"after {size}")
        assert copy.read_text() == (tmp_path / "private.log").read_text()
    log.close()


@pytest.mark.slow
def test_ctrl_c_ends_a_swarm_whose_logs_are_pipes(tmp_path: Path) -> None:
    process = begin(tmp_path, *UP, "--rounds", "2000")
    try:
        until_round(tmp_path / "r", 1)
        for path in [*logs(tmp_path / "r"), tmp_path / "r" / "logs" / "swarm.log"]:
            replaced(path, os.mkfifo)
        reached = state(tmp_path / "r")["round"]
        until_round(tmp_path / "r", reached + 2)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=400)
    finally:
        end(process)
    assert process.returncode == 130 and "up --resume" in output


@pytest.mark.slow
@pytest.mark.parametrize("folders", [["rollouts", "rewards", "peers", "state"], ["checkpoints", "logs"]])
def test_a_link_in_place_of_a_directory_leads_nowhere(tmp_path: Path, folders: list[str]) -> None:
    """Old rollouts and checkpoints are removed, new ones written: none of it at the other end of a link."""
    outside = tmp_path / "outside"
    for name in ("round_0", "round_0/stage_0", "round_1", "round_2/a-node"):
        (outside / name).mkdir(parents=True, exist_ok=True)
        (outside / name / "precious.json").write_text("mine")
    before = tree(outside)
    process = begin(
        tmp_path, *UP, "--rounds", "8", "--set", "cleanup_rollouts=true", "--set", "keep_rollout_rounds=1", "--set",
        "checkpoint_every=1",
        "--set", "keep_checkpoints=1",
    )  # fmt: skip
    try:
        until_round(tmp_path / "r", 2)
        for name in folders:
            replaced(tmp_path / "r" / name, lambda path: path.symlink_to(outside, target_is_directory=True))
    finally:
        finish(process)
    assert tree(outside) == before
    assert all(not (tmp_path / "r" / name).is_symlink() for name in folders if name != "peers")


def zeroed(weights: Path) -> bytes:
    """The same model with nothing in it."""
    tensors = {name: torch.zeros_like(value) for name, value in load_file(weights).items()}
    save_file(tensors, weights.with_suffix(".zero"), {"format": "pt"})
    data = weights.with_suffix(".zero").read_bytes()
    weights.with_suffix(".zero").unlink()
    return data


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["the same machine", "another machine"])
def test_foreign_weights_in_the_folder_are_never_loaded(tmp_path: Path, machine: str) -> None:
    """A watcher renames zeroed weights over the real ones as soon as they are read; on another machine there is only
    the
    folder, so the swarm goes on from an older checkpoint or from the base model, and says so."""
    process = begin(tmp_path, *UP, "--rounds", "2000", "--set", "checkpoint_every=2")
    try:
        until_round(tmp_path / "r", 5)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=400)
    finally:
        end(process)
    weights = sorted((tmp_path / "r" / "checkpoints").glob("round_*/*/model.safetensors"))
    assert weights
    poison, stop = zeroed(weights[0]), threading.Event()
    real = {path: path.read_bytes() for path in weights}

    def watch() -> None:
        accessed = {path: path.stat().st_atime_ns for path in weights}
        while not stop.is_set():
            for path in weights:
                with suppress(FileNotFoundError):  # old checkpoints go
                    if path.stat().st_atime_ns != accessed[path] or machine == "another machine":
                        path.with_name("poison").write_bytes(poison)
                        os.replace(path.with_name("poison"), path)
                        accessed[path] = path.stat().st_atime_ns
            time.sleep(0.02)

    if machine == "another machine":
        shutil.rmtree(tmp_path / "private")
    threading.Thread(target=watch, daemon=True).start()
    process = begin(tmp_path, "up", "--resume", "r")
    try:
        until(lambda: any("resumed" in path.read_text() or "joined" in path.read_text().splitlines()[-1]
                          for path in logs(tmp_path / "r", "training_events.jsonl")))  # fmt: skip
        reached = state(tmp_path / "r")["round"]
        until_round(tmp_path / "r", reached + 2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=400)
    finally:
        stop.set()
        end(process)
    found = list((tmp_path / "private").glob("r-*/*/checkpoints/round_*/model.safetensors"))
    assert len(found) == 2 and real
    for path in found:
        largest = max(float(value.abs().max()) for value in load_file(path).values())
        assert largest > 0.5, "a model that began with nothing would still have next to nothing"


@pytest.mark.parametrize(
    "when", [pytest.param(0, marks=pytest.mark.slow), 2**33], ids=["files of 1970", "files of 2242"]
)
def test_a_swarm_of_any_user_is_attacked_with_everything_at_once(person, when: int) -> None:
    """Links, pipes, lost permissions and clocks that are wrong, by somebody who owns the folder of an ordinary user."""
    command, room = person
    outside, home = room / "outside", room / "home"
    (outside / "round_0").mkdir(parents=True)
    (outside / "round_0" / "precious").write_text("mine")
    home.mkdir()
    for path in (outside, outside / "round_0", home):
        os.chmod(path, 0o777)
    before, folder = tree(outside), home / "r"
    arguments = [
        *UP,
        "--rounds",
        "8",
        "--set",
        "checkpoint_every=1",
        "--set",
        "cleanup_rollouts=true",
        "--set",
        "keep_rollout_rounds=1",
    ]
    process = subprocess.Popen(
        [*command, *arguments], cwd=home, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PRIVATE_PATH": str(home / "private"), "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache")},
    )  # fmt: skip
    try:
        until(lambda: state(folder)["round"] >= 1 or process.poll() is not None)
        assert process.poll() is None, process.communicate()[0]
        first, second = (path.parent for path in logs(folder))
        replaced(first / "metrics.jsonl", lambda path: path.symlink_to(outside / "round_0" / "precious"))
        replaced(second / "metrics.jsonl", os.mkfifo)
        replaced(first / "training_events.jsonl", lambda path: path.touch(0o000))
        for name in ("rollouts", "checkpoints"):
            replaced(folder / name, lambda path: path.symlink_to(outside))
        os.chmod(second, 0o000)
        for path in (folder / "manifest.json", folder / "state" / "current_state.json", folder / "peers"):
            with suppress(FileNotFoundError):
                os.utime(path, (when, when))
    finally:
        finish(process)
    assert tree(outside) == before
    assert state(folder)["phase"] == "finished"
    weights = list((folder / "checkpoints").glob("round_*/*/model.safetensors"))
    assert weights and not (folder / "checkpoints").is_symlink()


def test_settings_that_somebody_edited_are_not_taken(tmp_path: Path) -> None:
    user = Settings.of(identity_path=str(tmp_path / "me.pem"), private_path=str(tmp_path / "private"), model="tiny")
    me, address = Identity.load_or_create(tmp_path / "me.pem"), tmp_path / "r"
    manifest = found(FolderStore.at(address), user, "r", me)
    run_settings.keep(user.changed(hf_token="secret", hub_repo="me/mine"), address, manifest, me)
    assert run_settings.resumed(address, user)["hub_repo"] == "me/mine"
    assert "secret" not in (address / "settings.json").read_text()

    text = (address / "settings.json").read_text()
    edited = text.replace("me/mine", "them/all").replace('"model":"tiny"', '"model":"them/evil"')
    (address / "settings.json").write_text(edited)
    assert run_settings.resumed(address, user)["hub_repo"] == "me/mine", "the private ones"
    shutil.rmtree(tmp_path / "private")
    with pytest.raises(UserError, match="cannot be used"):
        run_settings.resumed(address, user)

    (address / "settings.json").write_text(text)  # on another machine, with the same key
    assert run_settings.resumed(address, user)["hub_repo"] == "me/mine"
    with pytest.raises(UserError, match="--identity-path"):
        run_settings.resumed(address, user.changed(identity_path=str(tmp_path / "other.pem")))
    stranger, other = Identity.generate(), found(FolderStore.at(tmp_path / "other"), user, "other", Identity.generate())
    run_settings.keep(user.changed(hub_repo="them/all", identity_path="x.pem"), address, manifest, stranger)
    shutil.rmtree(tmp_path / "private")
    with pytest.raises(UserError, match="cannot be used"):
        run_settings.resumed(address, user)
    run_settings.keep(user, address, other, me)  # ours, but of another swarm
    shutil.rmtree(tmp_path / "private")
    with pytest.raises(UserError, match="cannot be used"):
        run_settings.resumed(address, user)


def test_settings_of_another_run_of_the_same_user_are_not_taken(tmp_path: Path) -> None:
    user = Settings.of(identity_path=str(tmp_path / "me.pem"), private_path=str(tmp_path / "private"))
    me = Identity.load_or_create(tmp_path / "me.pem")
    for name, rate in (("old", 0.5), ("new", 1e-5)):
        manifest = found(FolderStore.at(tmp_path / name), user.changed(seed=int(rate * 2)), name, me)
        run_settings.keep(user.changed(learning_rate=rate), tmp_path / name, manifest, me)
    assert run_settings.resumed(tmp_path / "new", user)["learning_rate"] == 1e-5
    for name in ("manifest.json", "settings.json"):
        shutil.copy(tmp_path / "old" / name, tmp_path / "new" / name)
    with pytest.raises(UserError, match="not the one of the run that you started there"):
        run_settings.resumed(tmp_path / "new", user)


def test_a_node_of_a_run_that_somebody_gave_another_manifest_goes_on_with_the_private_one(tmp_path: Path) -> None:
    """It is started again, as after a crash. Once it ended the whole run, since it cannot take that manifest."""
    user = Settings.of(identity_path=str(tmp_path / "me.pem"), private_path=str(tmp_path / "private"))
    me, files = Identity.load_or_create(tmp_path / "me.pem"), LocalFiles(tmp_path / "r")
    manifest = found(FolderStore(files), user, "r", me)
    run_settings.keep(user, tmp_path / "r", manifest, me)
    whole = files.read("manifest.json", 1 << 20)
    assert run_settings.manifest_of(FolderStore(files), tmp_path / "r", user) is None, "the one in the folder is right"
    for data in (seal(manifest, Identity.generate()), whole[:-40], b"{}"):
        files.write("manifest.json", data)
        with opened(open_address(tmp_path / "r"), user, me, threading.Event()) as (_, taken):
            assert taken == manifest
    other = found(FolderStore.at(tmp_path / "other"), user, "r", me)  # of the same user, as after a new start
    files.write("manifest.json", seal(other, me))
    assert run_settings.manifest_of(FolderStore(files), tmp_path / "r", user) is None
    (tmp_path / "r" / "manifest.json").unlink()
    assert run_settings.manifest_of(FolderStore(files), tmp_path / "r", user) is None


@pytest.mark.slow
def test_a_run_goes_on_whatever_lies_in_place_of_its_state_and_is_known_to_have_begun(tmp_path: Path) -> None:
    """A directory of many levels lies there; and in the end the folder says that no round was ever begun."""
    process = begin(tmp_path, *UP, "--rounds", "2000", "--set", "checkpoint_every=1")
    try:
        until_round(tmp_path / "r", 3)
        replaced(
            tmp_path / "r" / "state" / "current_state.json",
            lambda path: (path / "/".join("d" * 20)).mkdir(parents=True),
        )
        until_round(tmp_path / "r", 6)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=400)
    finally:
        end(process)
    shutil.rmtree(tmp_path / "r" / "state")
    user = Settings.of(private_path=str(tmp_path / "private"))
    manifest = read_manifest(FolderStore.at(tmp_path / "r"))
    assert _has_worked(tmp_path / "r", manifest, user), "so it would not be removed because it failed"
    assert not _has_worked(tmp_path / "r", manifest, Settings.of(private_path=str(tmp_path / "other")))


def test_up_resume_keeps_to_its_own_settings_whatever_the_folder_says(tmp_path: Path) -> None:
    process = begin(tmp_path, *UP, "--rounds", "2000")
    try:
        until_round(tmp_path / "r", 2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=400)
    finally:
        end(process)
    path = tmp_path / "r" / "settings.json"
    told = json.loads(path.read_text())
    told["settings"] |= {"model": "them/evil", "hub_repo": "them/all"}
    path.write_text(json.dumps(told))
    code, output = run(tmp_path, "up", "--resume", "r", "--dry-run", PRIVATE_PATH=str(tmp_path / "private"))
    assert code == 0 and "them/" not in output
    code, output = run(tmp_path, "up", "--resume", "r", PRIVATE_PATH=str(tmp_path / "empty"))
    assert code == 1 and "settings.json cannot be used" in output and "Traceback" not in output


def test_an_experiment_whose_folder_others_write_to(tmp_path: Path) -> None:
    """Links for its logs, runs and reports, and a checkpoint of somebody who knows the seed, as everybody does."""
    job = Job(Arm(2, 0), 1, 6, 2, None, False, {"tasks": "chain_sum", "held_out_questions": 8, "generations": 4,
              "held_out_samples": 1, "device": "cpu", "checkpoint_every": 1}, {})  # fmt: skip
    members = [RunMember(*both) for both in zip(job.identities(), job.members(layered), strict=True)]
    owner, stop = Identity.derived("experiment", 1, 0), threading.Event()
    user = Settings.of(identity_path=str(tmp_path / "me.pem"), private_path=str(tmp_path / "private"))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    files = LocalFiles(tmp_path / "out").below("runs/one")

    def attack(swarm: LockstepSwarm) -> None:
        folder = tmp_path / "out" / "runs" / "one"
        if swarm.done == 1:
            for path in logs(folder):
                replaced(path, lambda path: path.symlink_to(outside / "precious"))
            replaced(folder / "checkpoints", lambda path: path.symlink_to(outside))
        if swarm.done == 3:
            stop.set()

    swarm = LockstepSwarm(files, members, owner, user)
    assert not swarm.run(stop, attack)
    swarm.close()
    assert tree(outside) == {str(outside / "precious"): b"mine"}

    # Everybody can derive the keys of the nodes and of the owner, but not that of the user.
    stranger = Settings.of(identity_path=str(tmp_path / "them.pem"), private_path=str(tmp_path / "theirs"))
    forged = LockstepSwarm(files, members, owner, stranger)
    assert forged.done == -1, "they cannot use ours either"
    forged.round()
    forged.save()
    forged.close()
    shutil.rmtree(tmp_path / "private")
    again = LockstepSwarm(files, members, owner, user)
    assert again.done != 0, "and what they signed is not ours"
    again.close()


@pytest.mark.slow
def test_a_run_of_an_experiment_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "e" / "runs").mkdir(parents=True)
    (tmp_path / "e" / "runs" / "1-0-seed42").symlink_to(outside, target_is_directory=True)
    (tmp_path / "e" / "report.md").symlink_to(outside / "report.md")
    code, output = run(
        tmp_path, "experiment", "sapo", "--out", "e", "--configs", "1/0", "--seeds", "42", "--nodes", "1",
        "--rounds", "2",
        "--tasks", "chain_sum", "--set", "generations=2", "--set", "held_out_questions=4",
        PRIVATE_PATH=str(tmp_path / "private"),
    )  # fmt: skip
    assert code == 0, output
    assert list(outside.iterdir()) == [] and not (tmp_path / "e" / "report.md").is_symlink()


@pytest.mark.slow
def test_what_a_url_swarm_keeps_on_this_machine_is_attacked_in_vain(tmp_path: Path, s3) -> None:
    """With a URL, the copies of logs and checkpoints lie in `runs/`, here in a folder that others can write to."""
    from stores import BUCKET

    url, precious = f"s3://{BUCKET}/attacked", tmp_path / "precious"
    precious.write_text("mine")
    rules = ["--rounds", "6", "--set", "round_end=everyone", "--set", "poll_interval=0.2", "--min-peers", "1"]
    small = [
        "--set",
        "held_out_questions=4",
        "--set",
        "held_out_samples=1",
        "--local-groups",
        "1",
        "--generations",
        "2",
    ]
    leader = begin(tmp_path, "coordinate", url, *rules, "--tasks", "chain_sum")
    worker = begin(tmp_path, "join", url, *small, "--set", "checkpoint_every=1", IDENTITY_PATH="worker.pem")
    try:
        until(lambda: any(tmp_path.glob("runs/attacked-*/logs/*/metrics.jsonl")) or worker.poll() is not None)
        assert worker.poll() is None, worker.communicate()[0]
        (path,) = tmp_path.glob("runs/attacked-*/logs/*/metrics.jsonl")
        replaced(path, lambda path: path.symlink_to(precious))
        replaced(path.with_name("training_events.jsonl"), os.mkfifo)
        replaced(path.parents[2] / "checkpoints", lambda path: path.symlink_to(tmp_path / "outside"))
        store = RemoteFiles(url)
        for number in range(20):
            store.write(f"peers/junk-{number}.json", b"{}")
            store.write(f"rewards/round_5/stage_0/junk-{number}.json", b"{}")
            store.write(rollouts_path(5, 0, f"junk-{number}"), junk_rollouts(tmp_path, f"junk-{number}", 5))
        output = finish(worker)
        finish(leader)
    finally:
        end(worker)
        end(leader)
    assert precious.read_text() == "mine" and not (tmp_path / "outside").exists(), output
    assert len(path.read_text().splitlines()) >= 6 and not path.is_symlink()


def test_a_private_directory_in_the_shared_folder_is_refused(tmp_path: Path) -> None:
    code, output = run(tmp_path, *UP, "--rounds", "1", PRIVATE_PATH=str(tmp_path / "r" / "private"))
    assert code == 1 and "PRIVATE_PATH" in output and "Traceback" not in output
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o777)
    code, output = run(tmp_path, *UP, "--rounds", "1", PRIVATE_PATH=str(tmp_path / "open"))
    assert code == 1 and "PRIVATE_PATH" in output and "chmod 700" in output
