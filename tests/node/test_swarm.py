"""Whole swarms of real processes: they learn, stop, resume, survive kills, and leave nothing behind."""

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from processes import HELD_OUT, QUICK, RL_SWARM, WHOLE, end, family, members, metrics, run, start, state, status, until

ROUNDS = 24  # so many that a run is not over before it is stopped


def test_a_swarm_runs_to_its_end_and_tells_what_it_achieved(tmp_path: Path) -> None:
    code, output = run(tmp_path, "up", "--run", "r", "--nodes", "2", "--rounds", "6", *QUICK)
    assert code == 0, output
    for expected in ("Test score", "before", "after", "Sharing", "Files", "Next"):
        assert expected in output
    seen = status(tmp_path, tmp_path / "r")
    assert (seen["phase"], seen["round"], len(seen["nodes"])) == ("finished", 5, 2)
    for node in seen["nodes"]:
        assert node["held_out_start"] is not None and node["held_out_now"] is not None and not node["alive"]
    assert seen["mean_held_out_start"] == pytest.approx(sum(n["held_out_start"] for n in seen["nodes"]) / 2)
    code, output = run(tmp_path, "validate", "r", "--rounds", "6", "--nodes", "2")
    assert code == 0, output
    line = metrics(tmp_path / "r")[seen["nodes"][0]["node"]][1]
    for name in [
        "reward_local",
        "reward_training",
        "zero_std_fraction",
        "completion_length",
        "truncated_fraction",
        "entropy",
        "clip_fraction",
        "logprob_mismatch",
        "grad_norm",
        "external_accepted",
        "external_rejected",
    ]:
        assert name in line


@pytest.mark.slow
def test_lockstep_runs_with_one_seed_are_identical_and_another_seed_differs(tmp_path: Path) -> None:
    for name, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        code, output = run(tmp_path, "up", "--run", name, "--nodes", "2", "--rounds", "4", "--seed", seed, *WHOLE)
        assert code == 0, output
    first, second, other = (metrics(tmp_path / name) for name in "abc")
    assert first == second
    assert first.keys() == other.keys() and first != other
    assert any(line["external_accepted"] for lines in first.values() for line in lines if line["kind"] == "round")


def test_ctrl_c_stops_everything_cleanly_and_resume_goes_on(tmp_path: Path) -> None:
    address = tmp_path / "r"
    process = start(tmp_path, "up", "--run", "r", "--nodes", "2", "--rounds", str(ROUNDS), *QUICK)
    until(lambda: state(address)["round"] >= 3)
    children = family(process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "--resume r" in output
    _, alive = psutil.wait_procs(children, timeout=400)  # the fork server ends when it notices that `up` has
    assert not alive
    stopped_at = state(address)["round"]
    assert stopped_at < ROUNDS - 1

    code, output = run(tmp_path, "up", "--resume", "r")
    assert code == 0, output
    assert (state(address)["phase"], state(address)["round"]) == ("finished", ROUNDS - 1)
    for lines in metrics(address).values():
        rounds = [line["round"] for line in lines if line["kind"] == "round"]
        assert set(rounds) >= set(range(ROUNDS)), "no round was lost or skipped"
        versions = [line["policy_version"] for line in lines if line["kind"] == "round"]
        assert versions == sorted(versions), "it went on with the weights it had"
    code, output = run(tmp_path, "validate", "r", "--rounds", str(ROUNDS), "--nodes", "2")
    assert code == 0, output
    code, output = run(tmp_path, "up", "--resume", "r")
    assert code == 1 and "finished" in output


def test_nothing_survives_when_up_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "up", "--run", "r", "--nodes", "2", "--rounds", "500", *QUICK)
    until(lambda: state(tmp_path / "r")["round"] >= 2)
    children = family(process)
    assert len(children) >= 6, "server, coordinator, two nodes and their scorers"
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=240)
    assert not alive


def kill_at_random(tmp_path: Path, kills: int, rounds: int, seed: int) -> None:
    """Kills coordinator and nodes at random moments of one run, which must finish and be sound all the same."""
    rng = random.Random(seed)
    process = start(tmp_path, "up", "--run", "r", "--nodes", "4", "--rounds", str(rounds), *WHOLE)
    killed = 0
    try:
        until(lambda: len(members(process)) == 5)
        while killed < kills and process.poll() is None:
            time.sleep(rng.uniform(0.2, 2.5))
            victims = members(process)
            if victims and state(tmp_path / "r")["phase"] != "finished":
                rng.choice(victims).kill()
                killed += 1
        output, _ = process.communicate(timeout=240)
    finally:
        end(process)
    assert process.returncode == 0, output
    assert killed == kills, f"the run was over after {killed} kills"
    code, output = run(tmp_path, "validate", "r", "--rounds", str(rounds), "--nodes", "4")
    assert code == 0, output


@pytest.mark.slow
def test_a_run_survives_kills_of_nodes_and_coordinator(tmp_path: Path) -> None:
    kill_at_random(tmp_path, kills=6, rounds=40, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_run_survives_twenty_kills(tmp_path: Path, seed: int) -> None:
    kill_at_random(tmp_path, kills=20, rounds=150, seed=seed)


def test_two_shells_with_environment_variables_make_a_swarm(tmp_path: Path) -> None:
    """The flags only make the evaluation shorter."""
    common = {
        "GDRIVE_PATH": str(tmp_path / "drive"),
        "EXPERIMENT_NAME": "shared",
        "TEST_MODE": "True",
        "COORDINATOR_ROUND_INTERVAL": "4",
    }
    (tmp_path / "drive").mkdir()
    folders = {role: tmp_path / role for role in ("coordinator", "worker")}
    for folder in folders.values():
        folder.mkdir()
    processes = [
        start(folder, "up", *HELD_OUT, **common, NODE_ROLE=role, NODE_ID=f"my-{role}")
        for role, folder in folders.items()
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            end(process)
    assert [process.returncode for process in processes] == [0, 0], outputs
    address = tmp_path / "drive" / "experiments" / "shared"
    assert state(address)["phase"] == "finished" and state(address)["round"] == 2
    lines = [line for line in metrics(address)["my-worker"] if line["kind"] == "round"]
    assert lines and {line["local_groups"] for line in lines} == {4}
    published = subprocess.run(
        [*RL_SWARM, "show", str(next(address.glob("rollouts/*/*/my-worker.json")))], capture_output=True, text=True
    )
    document = json.loads(published.stdout)
    assert {len(answers) for answers in document["rollouts"].values()} == {4}
    assert {"peer_id", "round", "stage", "timestamp"} <= document.keys()
    assert {"prompt", "response", "reward"} <= document["rollouts"]["0"][0].keys()
    assert (folders["worker"] / "swarm.pem").exists() and (folders["worker"] / "logs" / "swarm.log").exists()


@pytest.mark.slow
def test_one_comes_late_one_is_slow_and_nobody_waits(tmp_path: Path) -> None:
    """Rounds on an interval: a late worker joins the current round, one that was suspended skips some."""
    address = tmp_path / "experiments" / "open"
    options = ["--set", "held_out_questions=4", "--set", "held_out_samples=1", "--set", "poll_interval=0.1"]
    processes = [
        start(
            tmp_path,
            "coordinate",
            str(address),
            "--rounds",
            "14",
            "--round-interval",
            "3",
            "--set",
            "poll_interval=0.1",
        )
    ]
    worker = ["join", str(address), "--local-groups", "2", "--external-groups", "2", "--generations", "4", *options]
    try:
        processes.append(start(tmp_path, *worker, NODE_ID="early", IDENTITY_PATH="early.pem"))
        until(lambda: state(address)["round"] >= 2)
        processes.append(start(tmp_path, *worker, NODE_ID="late", IDENTITY_PATH="late.pem"))
        until(lambda: len(metrics(address).get("late", [])) >= 3)
        processes[1].send_signal(signal.SIGSTOP)
        stopped_at = state(address)["round"]
        until(lambda: state(address)["round"] >= stopped_at + 3)
        processes[1].send_signal(signal.SIGCONT)
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            end(process)
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    played = {
        node: [line["round"] for line in lines if line["kind"] == "round"] for node, lines in metrics(address).items()
    }
    assert played["late"][0] >= 2
    assert played["early"][0] < played["late"][0] and len(played["early"]) < 14
    events = (address / "logs" / "early" / "training_events.jsonl").read_text()
    assert '"skipped"' in events
    late = [line for line in metrics(address)["late"] if line["kind"] == "round"]
    assert sum(line["external_accepted"] for line in late), "it learned from the other although rounds are not in step"
    code, output = run(tmp_path, "validate", str(address), "--rounds", "14", "--nodes", "2")
    assert code == 0, output
    assert "skipped" in output and "before it joined" in output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["up", "--model", "/nowhere/model"], "/nowhere/model"),
        (["up", "--model", "nobody/nothing"], "MODEL_NAME=tiny"),
        (["up", "--nodes", "0"], "nodes"),
        (["up", "--tasks", "no_such_task"], "no_such_task"),
        (["up", "--set", "colour=red"], "colour"),
        (["up", "--resume", "runs/none"], "runs/none"),
        (["up", "--run", "/proc/nowhere"], "/proc/nowhere"),
        (["join", "/nowhere/at/all"], "/nowhere/at/all"),
        (["status", "/nowhere"], "/nowhere"),
        (["validate", "/nowhere"], "/nowhere"),
        (["join"], "GDRIVE_PATH"),
    ],
)
def test_what_cannot_work_is_said_in_one_clear_message(tmp_path: Path, arguments: list[str], expected: str) -> None:
    code, output = run(tmp_path, *arguments, HF_HUB_OFFLINE="1")
    assert code != 0
    assert expected in output
    assert "Traceback" not in output
    assert not list(tmp_path.glob("**/*.tmp"))
