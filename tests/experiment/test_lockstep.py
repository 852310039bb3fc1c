"""A swarm in one process: the same results as separate ones, and the same whether it was stopped or not."""

import json
import threading
from pathlib import Path

import msgspec
import pytest
from processes import HELD_OUT, metrics, run
from small_models import save_small

from rl_swarm.config.resolve import layered
from rl_swarm.config.settings import UP_PRESET, Settings
from rl_swarm.environments import task_list
from rl_swarm.experiment.arms import Arm, Job
from rl_swarm.experiment.batched_engine import BatchedEngine
from rl_swarm.experiment.lockstep import LockstepSwarm, RunMember, SequentialEngine, rewind
from rl_swarm.experiment.run import is_finished, play
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.owner_documents import read_manifest
from rl_swarm.protocol.identity import Identity
from rl_swarm.storage.files import LocalFiles
from rl_swarm.storage.shared_log import SharedLog

SMALL = {"held_out_questions": 10, "held_out_samples": 1, "held_out_every": 2, "generations": 4, "device": "cpu"}


def job(arm: Arm, rounds: int = 3, nodes: int = 3, each: dict | None = None, **settings: object) -> Job:
    return Job(arm, 1, rounds, nodes, None, False, {**SMALL, **settings}, each or {})


def user(folder: Path) -> Settings:
    return Settings.of(identity_path=str(folder / "user.pem"))


def played(job: Job, folder: Path) -> dict:
    assert play(
        job, job.members(layered), LocalFiles(folder), user(folder.parent), threading.Event(), keep_models=False
    )
    return metrics(folder)


def test_nodes_of_one_process_do_what_separate_processes_do(tmp_path: Path) -> None:
    code, output = run(
        tmp_path,
        "up",
        "--run",
        "r",
        "--nodes",
        "3",
        "--rounds",
        "4",
        "--seed",
        "7",
        *HELD_OUT,
        "--set",
        "generations=4",
    )
    assert code == 0, output
    keys = [tmp_path / name for name in ("swarm.pem", "swarm-2.pem", "swarm-3.pem")]
    settings = Settings.of(
        **{**UP_PRESET, "rounds": 4, "seed": 7, "nodes": 3, "nodes_per_device": 3, "threads": 1},
        held_out_questions=8,
        held_out_samples=1,
        generations=4,
        device="cpu",
    )
    members = [RunMember(Identity.load(key), settings) for key in keys]
    swarm = LockstepSwarm(LocalFiles(tmp_path / "one"), members, members[0].identity, user(tmp_path))
    try:
        assert swarm.run(threading.Event())
    finally:
        swarm.close()
    separate, together = metrics(tmp_path / "r"), metrics(tmp_path / "one")
    assert together == separate
    assert any(line.get("external_accepted") for lines in together.values() for line in lines)


def test_a_run_that_was_stopped_writes_what_it_would_have_written(tmp_path: Path) -> None:
    wanted = job(Arm(2, 2, "capped"), rounds=6, nodes=2, checkpoint_every=2, keep_checkpoints=1)
    whole = played(wanted, tmp_path / "whole")
    members = [RunMember(*both) for both in zip(wanted.identities(), wanted.members(layered), strict=True)]
    owner = Identity.derived("experiment", wanted.seed, 0)
    stop = threading.Event()
    swarm = LockstepSwarm(LocalFiles(tmp_path / "stopped"), members, owner, user(tmp_path))
    assert not swarm.run(stop, lambda swarm: stop.set() if swarm.done == 2 else None), "after round 2 of 0 to 5"
    swarm.close()
    kept = sorted(path.name for path in (tmp_path / "stopped" / "checkpoints").iterdir())
    assert kept == ["round_1", "round_2"], "the one before stays until all nodes have the next"
    swarm = LockstepSwarm(LocalFiles(tmp_path / "stopped"), members, owner, user(tmp_path))
    assert swarm.done == 2
    swarm.round()  # and killed, with no checkpoint of round 3
    swarm.close()
    assert any(line["round"] == 3 for lines in metrics(tmp_path / "stopped").values() for line in lines)
    assert played(wanted, tmp_path / "stopped") == whole
    assert is_finished(tmp_path / "stopped") and not (tmp_path / "stopped" / "checkpoints").exists()


@pytest.mark.slow
def test_a_checkpoint_that_not_all_nodes_have_whole_does_not_count(tmp_path: Path) -> None:
    wanted = job(Arm(1, 0, "alone"), rounds=5, nodes=2, checkpoint_every=1, keep_checkpoints=3)
    whole = played(wanted, tmp_path / "whole")
    members = [RunMember(*both) for both in zip(wanted.identities(), wanted.members(layered), strict=True)]
    owner = Identity.derived("experiment", wanted.seed, 0)
    stop = threading.Event()
    swarm = LockstepSwarm(LocalFiles(tmp_path / "cut"), members, owner, user(tmp_path))
    swarm.run(stop, lambda swarm: stop.set() if swarm.done == 3 else None)
    swarm.close()
    root = tmp_path / "cut" / "checkpoints"
    assert sorted(path.name for path in root.iterdir()) == ["round_1", "round_2", "round_3"]
    (swarm.private / "checkpoints" / "round_3" / "state.json").unlink()  # killed while it saved
    (root / "round_3" / "state.json").unlink()
    node = members[1].identity.node
    for folder in (swarm.private / node / "checkpoints" / "round_2", root / "round_2" / node):
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-4])
    swarm = LockstepSwarm(LocalFiles(tmp_path / "cut"), members, owner, user(tmp_path))
    assert swarm.done == 1
    swarm.close()
    assert played(wanted, tmp_path / "cut") == whole


def test_an_engine_gets_the_work_of_all_nodes_at_once(tmp_path: Path) -> None:
    wanted = job(Arm(2, 2), rounds=1)
    members = [RunMember(*both) for both in zip(wanted.identities(), wanted.members(layered), strict=True)]

    calls: list[tuple[str, int]] = []

    class Counting(SequentialEngine):
        def sample(self, work) -> None:
            calls.append(("sample", len(work)))
            super().sample(work)

        def learn(self, work) -> None:
            calls.append(("learn", len(work)))
            super().learn(work)

    swarm = LockstepSwarm(LocalFiles(tmp_path), members, members[0].identity, user(tmp_path), engine=Counting)
    try:
        swarm.round()
    finally:
        swarm.close()
    assert calls == [("sample", 3), ("learn", 3)]


def test_a_run_whose_nodes_learn_in_one_pass_can_be_stopped_and_gone_on_with(tmp_path: Path) -> None:
    wanted = job(Arm(2, 2), rounds=3, nodes=2, generations=8)
    members = [RunMember(*both) for both in zip(wanted.identities(), wanted.members(layered), strict=True)]
    owner, stop = Identity.derived("experiment", wanted.seed, 0), threading.Event()
    for name, last in (("whole", 9), ("stopped", 0), ("stopped", 9)):
        stop.clear()
        swarm = LockstepSwarm(LocalFiles(tmp_path / name), members, owner, user(tmp_path), engine=BatchedEngine)
        finished = swarm.run(stop, lambda swarm, last=last: stop.set() if swarm.done == last else None)
        swarm.close()
        assert finished == (last == 9)
    whole, stopped = (metrics(tmp_path / name) for name in ("whole", "stopped"))
    assert whole == stopped
    rounds = [line for lines in whole.values() for line in lines if line["kind"] == "round"]
    assert len(rounds) == 6 and any(line["grad_norm"] > 0 for line in rounds)


@pytest.mark.processes
def test_nodes_may_differ_in_learning_rate_groups_and_tasks(tmp_path: Path) -> None:
    each = {
        "1": {"tasks": "gcd", "learning_rate": "3e-4"},
        "2": {"local_groups": "1", "publish_frequency": "generation"},
    }
    wanted = job(Arm(2, 1), rounds=2, each=each)
    rates = [settings.step_size() for settings in wanted.members(layered)]
    assert rates == [3e-4, 1e-4, 1e-4]
    found = played(wanted, tmp_path)
    nodes = [identity.node for identity in wanted.identities()]
    groups = [[line["local_groups"] for line in found[node] if line["kind"] == "round"] for node in nodes]
    assert groups == [[2, 2], [1, 1], [2, 2]]
    names = [task.name for task in task_list(wanted.swarm().task, "tiny")]
    manifest = read_manifest(FolderStore.at(tmp_path))
    assert manifest.specialists == {wanted.identities()[0].peer_id: [names.index("gcd")]}


@pytest.mark.processes
def test_nodes_with_other_models_and_tokenizers_learn_from_each_other(tmp_path: Path) -> None:
    save_small(tmp_path / "other")
    wanted = job(
        Arm(4, 4),
        rounds=2,
        nodes=2,
        generations=8,
        each={"1": {"model": str(tmp_path / "other"), "max_new_tokens": "8"}},
    )
    found = played(wanted, tmp_path / "run")
    first, second = (found[identity.node] for identity in wanted.identities())
    names = {json.loads(path.read_bytes())["model"] for path in tmp_path.glob("run/peers/*.json")}
    assert names == {"tiny", str(tmp_path / "other")}
    taken = [line for line in first if line.get("external_accepted")]
    assert taken and taken[0]["trained_tokens"] > 0, "a model that is never right learns from one that is"
    assert set(first[0]["by_task"]) == set(second[0]["by_task"]), "both are asked the swarm's tasks"


@pytest.mark.slow
@pytest.mark.processes
def test_controls_train_twice_on_their_own_or_have_everybodys_questions(tmp_path: Path) -> None:
    once = played(job(Arm(4, 0, "alone"), rounds=1, nodes=2, generations=8), tmp_path / "once")
    twice = played(job(Arm(4, 0, "alone", epochs=2), rounds=1, nodes=2, generations=8), tmp_path / "twice")
    for node, lines in once.items():
        plain, more = (next(x for x in found if x["kind"] == "round") for found in (lines, twice[node]))
        assert plain["reward_local"] == more["reward_local"]
        assert plain["policy_version"] == min(1, plain["local_with_signal"])
        assert more["trained_tokens"] == 2 * plain["trained_tokens"]
        assert more["policy_version"] == 2 * plain["policy_version"]
    assert any(line.get("trained_tokens") for lines in once.values() for line in lines)
    shared = played(job(Arm(4, 4, "capped", epochs=3), rounds=1, nodes=2, generations=8), tmp_path / "shared")
    rounds = [line for lines in shared.values() for line in lines if line["kind"] == "round"]
    for line in rounds:
        assert line["policy_version"] == (3 if line["local_with_signal"] or line["external_accepted"] else 0)
    assert any(line["external_accepted"] for line in rounds)
    each = played(job(Arm(4, 0, "alone", groups_per_update=1), rounds=1, nodes=2, generations=8), tmp_path / "each")
    for node, lines in once.items():
        plain, small = (next(x for x in found if x["kind"] == "round") for found in (lines, each[node]))
        assert small["trained_tokens"] == plain["trained_tokens"]
        assert small["policy_version"] == plain["local_with_signal"]
    (pooled,) = played(job(Arm(2, 0, "alone", pooled=True), rounds=1, nodes=3), tmp_path / "pooled").values()
    assert next(line for line in pooled if line["kind"] == "round")["local_groups"] == 6


def test_lines_after_a_round_are_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode({"round": k}) + b"\n" for k in (-1, 0, 1, 2)) + b'{"round": 3')
    log = SharedLog(path)
    rewind(log, 1)
    assert path.read_bytes() == b'{"round":-1}\n{"round":0}\n{"round":1}\n'
    rewind(log, -1)
    assert path.read_bytes() == b""
    rewind(SharedLog(tmp_path / "none.jsonl"), 3)
