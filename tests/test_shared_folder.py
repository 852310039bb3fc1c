"""Whoever can write to a swarm's folder can put anything in place of its files, at any moment: real swarms, attacked.

Nothing outside of the folder is read, written or removed; nothing that a node did not sign itself is loaded; and the
swarm goes on.
"""

import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from processes import QUICK, end, run, start, state, status, until
from safetensors.torch import load_file, save_file

from rl_swarm import run_settings
from rl_swarm.config import Settings
from rl_swarm.errors import UserError
from rl_swarm.experiment.arms import Arm, Job
from rl_swarm.experiment.lockstep import Member, Swarm
from rl_swarm.identity import Identity
from rl_swarm.network.files import LocalFiles
from rl_swarm.network.folder import rollouts_path
from rl_swarm.wire import canonical, digest
from rl_swarm.worker import found

ORDINARY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
UP = ["up", "--run", "r", "--nodes", "2", *QUICK, "--set", "local=2", "--set", "generations=4"]
COMMAND = "$(touch ran)"


@pytest.fixture(params=["this user", "an ordinary user"])
def person(request, tmp_path):
    """Starts `rl-swarm` as this user and, where this is root, as an ordinary one."""
    os.chmod(tmp_path, 0o777)
    prefix: list[str] = []
    if request.param == "an ordinary user":
        if os.geteuid() != 0 or shutil.which("setpriv") is None:
            pytest.skip("needs root and setpriv to become another user")
        prefix = ORDINARY
        probe = [*prefix, "python3", "-c", "import os; os.listdir('.')"]
        if subprocess.run(probe, cwd=tmp_path, capture_output=True).returncode:
            pytest.skip("an ordinary user cannot read the folder of the tests")
    return prefix


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


def junk_rollouts(address: Path, node: str, number: int) -> bytes:
    """A publication with a right digest, a junk signature, and a command for a peer id."""
    fields = {"peer_id": COMMAND, "kind": "rollouts", "node": node, "round": number, "stage": 0}
    return json.dumps({**fields, "digest": digest(canonical(fields)), "signature": "AAAA"}).encode()


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
                path.unlink(missing_ok=True)
                path.symlink_to(profile)
        log = tmp_path / "r" / "logs" / "swarm.log"
        log.unlink()
        log.symlink_to(profile)
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


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir], ids=["a pipe", "a directory"])
def test_a_log_that_is_a_pipe_stops_nobody(tmp_path: Path, put) -> None:
    process = begin(tmp_path, *UP, "--rounds", "6")
    try:
        until_round(tmp_path / "r", 1)
        for name in ("training_events.jsonl", "metrics.jsonl"):
            for path in logs(tmp_path / "r", name):
                path.unlink(missing_ok=True)
                put(path)
        (tmp_path / "r" / "logs" / "swarm.log").unlink()
        put(tmp_path / "r" / "logs" / "swarm.log")
        (tmp_path / "r" / "state" / "history.jsonl").unlink(missing_ok=True)
        put(tmp_path / "r" / "state" / "history.jsonl")
        assert begin(tmp_path, "status", "r", "--json").wait(timeout=120) == 0
    finally:
        finish(process)
    assert all(len(path.read_text().splitlines()) >= 6 for path in logs(tmp_path / "r")), (
        "whole again at the end"
    )
    assert status(tmp_path, tmp_path / "r")["phase"] == "finished"
    assert run(tmp_path, "validate", "r")[0] == 0


def test_ctrl_c_ends_a_swarm_whose_logs_are_pipes(tmp_path: Path) -> None:
    process = begin(tmp_path, *UP, "--rounds", "2000")
    try:
        until_round(tmp_path / "r", 1)
        for path in [*logs(tmp_path / "r"), tmp_path / "r" / "logs" / "swarm.log"]:
            path.unlink(missing_ok=True)
            os.mkfifo(path)
        reached = state(tmp_path / "r")["round"]
        until_round(tmp_path / "r", reached + 2)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    finally:
        end(process)
    assert process.returncode == 130 and "up --resume" in output


@pytest.mark.parametrize("folders", [["rollouts", "rewards", "peers", "state"], ["checkpoints", "logs"]])
def test_a_link_in_place_of_a_directory_leads_nowhere(tmp_path: Path, folders: list[str]) -> None:
    """Old rollouts and checkpoints are removed, new ones written: none of it at the other end of a link."""
    outside = tmp_path / "outside"
    for name in ("round_0", "round_0/stage_0", "round_1", "round_2/a-node"):
        (outside / name).mkdir(parents=True, exist_ok=True)
        (outside / name / "precious.json").write_text("mine")
    before = tree(outside)
    process = begin(
        tmp_path, *UP, "--rounds", "8", "--set", "cleanup=true", "--set", "keep_rounds=1", "--set", "checkpoint_every=1",
        "--set", "keep_checkpoints=1",
    )  # fmt: skip
    try:
        until_round(tmp_path / "r", 2)
        for name in folders:
            folder = tmp_path / "r" / name
            for _ in range(100):  # its nodes write there all the time
                shutil.rmtree(folder, ignore_errors=True)
                try:
                    folder.symlink_to(outside, target_is_directory=True)
                    break
                except FileExistsError:
                    continue
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


@pytest.mark.parametrize("machine", ["the same machine", "another machine"])
def test_foreign_weights_in_the_folder_are_never_loaded(tmp_path: Path, machine: str) -> None:
    """A watcher renames zeroed weights over the real ones as soon as they are read; on another machine there is only the
    folder, so the swarm goes on from an older checkpoint or from the base model, and says so."""
    process = begin(tmp_path, *UP, "--rounds", "2000", "--set", "checkpoint_every=2")
    try:
        until_round(tmp_path / "r", 5)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
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
                if path.stat().st_atime_ns != accessed[path] or machine == "another machine":
                    path.with_name("poison").write_bytes(poison)
                    os.replace(path.with_name("poison"), path)
                    accessed[path] = path.stat().st_atime_ns

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
        process.communicate(timeout=120)
    finally:
        stop.set()
        end(process)
    found = list((tmp_path / "private").glob("r-*/*/checkpoints/round_*/model.safetensors"))
    assert len(found) == 2 and real
    for path in found:
        largest = max(float(value.abs().max()) for value in load_file(path).values())
        assert largest > 0.5, "a model that began with nothing would still have next to nothing"


def test_settings_that_somebody_edited_are_not_taken(tmp_path: Path) -> None:
    user = Settings(
        identity_path=str(tmp_path / "me.pem"), private_path=str(tmp_path / "private"), model="tiny"
    )
    me, address = Identity.load_or_create(tmp_path / "me.pem"), tmp_path / "r"
    manifest = found(LocalFiles(address), user, "r", me)
    run_settings.keep(replace(user, hf_token="secret", hub_repo="me/mine"), address, manifest, me)
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
        run_settings.resumed(address, replace(user, identity_path=str(tmp_path / "other.pem")))
    stranger, other = Identity.new(), found(LocalFiles(tmp_path / "other"), user, "other", Identity.new())
    run_settings.keep(replace(user, hub_repo="them/all", identity_path="x.pem"), address, manifest, stranger)
    shutil.rmtree(tmp_path / "private")
    with pytest.raises(UserError, match="cannot be used"):
        run_settings.resumed(address, user)
    run_settings.keep(user, address, other, me)  # ours, but of another swarm
    shutil.rmtree(tmp_path / "private")
    with pytest.raises(UserError, match="cannot be used"):
        run_settings.resumed(address, user)


def test_up_resume_keeps_to_its_own_settings_whatever_the_folder_says(tmp_path: Path) -> None:
    process = begin(tmp_path, *UP, "--rounds", "2000")
    try:
        until_round(tmp_path / "r", 2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
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
    members = [Member(*both) for both in zip(job.identities(), job.members(), strict=True)]
    owner, stop = Identity.derived("experiment", 1, 0), threading.Event()
    user = Settings(identity_path=str(tmp_path / "me.pem"), private_path=str(tmp_path / "private"))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    files = LocalFiles(tmp_path / "out").below("runs/one")

    def attack(swarm: Swarm) -> None:
        folder = tmp_path / "out" / "runs" / "one"
        if swarm.done == 1:
            for path in logs(folder):
                path.unlink()
                path.symlink_to(outside / "precious")
            shutil.rmtree(folder / "checkpoints")
            (folder / "checkpoints").symlink_to(outside)
        if swarm.done == 3:
            stop.set()

    swarm = Swarm(files, members, owner, user)
    assert not swarm.run(stop, attack)
    swarm.close()
    assert tree(outside) == {str(outside / "precious"): b"mine"}

    # Everybody can derive the keys of the nodes and of the owner, but not that of the user.
    stranger = Settings(identity_path=str(tmp_path / "them.pem"), private_path=str(tmp_path / "theirs"))
    forged = Swarm(files, members, owner, stranger)
    assert forged.done == -1, "they cannot use ours either"
    forged.round()
    forged.save()
    forged.close()
    shutil.rmtree(tmp_path / "private")
    again = Swarm(files, members, owner, user)
    assert again.done != 0, "and what they signed is not ours"
    again.close()


def test_a_run_of_an_experiment_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "e" / "runs").mkdir(parents=True)
    (tmp_path / "e" / "runs" / "1-0-seed42").symlink_to(outside, target_is_directory=True)
    (tmp_path / "e" / "report.md").symlink_to(outside / "report.md")
    code, output = run(
        tmp_path, "experiment", "sapo", "--out", "e", "--configs", "1/0", "--seeds", "42", "--nodes", "1", "--rounds", "2",
        "--tasks", "chain_sum", "--set", "generations=2", "--set", "held_out_questions=4",
        PRIVATE_PATH=str(tmp_path / "private"),
    )  # fmt: skip
    assert code == 0, output
    assert list(outside.iterdir()) == [] and not (tmp_path / "e" / "report.md").is_symlink()


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
        "--local",
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
        path.unlink()
        path.symlink_to(precious)
        folder = path.parents[2]
        os.mkfifo(path.with_name("pipe"))
        os.replace(path.with_name("pipe"), path.with_name("training_events.jsonl"))
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        (folder / "checkpoints").symlink_to(tmp_path / "outside")
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
