"""Faults on purpose, a few of every kind, and a verdict that can tell what they did."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from processes import run_benchmark

from benchmarks.robustness import fault_network as wires
from benchmarks.robustness import fault_plan as plans
from benchmarks.robustness import fault_verdict as verdict

ROUNDS = 20


def sound() -> Any:
    """Two nodes that took part in every round, of ten seconds each; one was killed in round 9 and came back."""
    run = verdict.Run(ROUNDS, clock=[(10.0 * number, number) for number in range(ROUNDS)])
    everybody = {"one": "peer-1", "two": "peer-2"}
    for name, peer_id in everybody.items():
        run.nodes[name] = verdict.History(
            peer_id=peer_id,
            well=[(0.0, 200.0)],
            finished=[(10.0 * number + 5, number) for number in range(ROUNDS)],
            starts=[verdict.Start(-8.0, -1, 0.0)],
            members=[(0.0, everybody), (199.0, everybody)],
            left_well=True,
        )
    two = run.nodes["two"]
    two.well = [(0.0, 92.0), (110.0, 200.0)]
    del two.finished[9:11]
    two.starts.append(verdict.Start(100.0, 8, 110.0))
    two.accepted = [("one", 3, "abc"), ("one", 4, "def")]
    return run


def test_a_sound_run_has_no_violations() -> None:
    assert verdict.violations(sound()) == []
    assert sound().node_rounds() == 2 * ROUNDS - 2


def test_where_nobody_conducts_peers_go_by_their_ids() -> None:
    run = sound()
    for node in run.nodes.values():
        node.members = [(at, {peer: peer for peer in members.values()}) for at, members in node.members]
    assert verdict.violations(run) == []
    run.nodes["one"].members[-1] = (199.0, {"peer-1": "peer-1", "peer-3": "peer-3"})
    assert verdict.violations(run) == [
        "one took peer-3 for peer-3, which is unknown",
        "one did not know at the end that two took part",
    ]


def spoil_the_last_round(run: Any) -> None:
    for node in run.nodes.values():
        node.finished.pop()


def spoil_the_swarm(run: Any) -> None:
    del run.clock[15:]


def spoil_the_clock(run: Any) -> None:
    run.clock.insert(12, (119.0, 5))


def spoil_progress(run: Any) -> None:
    del run.nodes["one"].finished[5:11]


def spoil_the_end(run: Any) -> None:
    run.nodes["one"].left_well = False


def spoil_a_node(run: Any) -> None:
    run.nodes["one"].finished.clear()
    run.nodes["one"].well.clear()


def spoil_a_start(run: Any) -> None:
    run.nodes["two"].starts.append(verdict.Start(150.0, None, 320.0))


def spoil_a_checkpoint(run: Any) -> None:
    run.nodes["two"].starts.append(verdict.Start(150.0, 12, 158.0, lost=(13, 14)))


def spoil_an_exit(run: Any) -> None:
    run.nodes["one"].ends.append(verdict.End(20.0, 1, "", "rl-swarm: something"))


def spoil_a_message(run: Any) -> None:
    run.nodes["one"].ends.append(verdict.End(20.0, 1, "disk full", "Traceback (most recent call last):"))


def spoil_a_name(run: Any) -> None:
    run.nodes["one"].members.insert(1, (50.0, {"two": "peer-3"}))


def spoil_a_stranger(run: Any) -> None:
    run.nodes["one"].members.insert(1, (50.0, {"three": "peer-3"}))


def spoil_who_is_there(run: Any) -> None:
    run.nodes["one"].members[-1] = (199.0, {"one": "peer-1"})


def spoil_a_publication(run: Any) -> None:
    run.nodes["two"].accepted.append(("one", 3, "other"))


def spoil_the_machine(run: Any) -> None:
    run.left_behind.append("p2pd")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_the_last_round, "no node finished the last round"),
        (spoil_the_swarm, "the swarm ended at round 14 of 20"),
        (spoil_the_clock, "the swarm went back from round 11 to round 5"),
        (spoil_progress, "one was stuck: nothing finished for 70 s"),
        (spoil_the_end, "one was stuck: it did not end with the swarm"),
        (spoil_a_node, "one was stuck: it never finished a round"),
        (spoil_a_start, "two was stuck: started, and not there after 170 s"),
        (spoil_a_checkpoint, "two lost work: it came back with round 12, and had finished 13, 14"),
        (spoil_an_exit, "one ended by itself with exit code 1"),
        (spoil_a_message, "one ended by itself with exit code 1: Traceback"),
        (spoil_a_name, "one took peer-3 for two, which is peer-2"),
        (spoil_a_stranger, "one took peer-3 for three, which is unknown"),
        (spoil_who_is_there, "one did not know at the end that two took part"),
        (spoil_a_publication, "one published 2 different contents for round 3"),
        (spoil_the_machine, "a process outlived the run: p2pd"),
    ],
)
def test_whatever_goes_wrong_is_one_sentence(spoil: Any, words: str) -> None:
    run = sound()
    spoil(run)
    found = [sentence for sentence in verdict.violations(run) if words in sentence]
    assert len(found) == 1, verdict.violations(run)


def test_what_the_bench_did_itself_is_not_held_against_a_node() -> None:
    run = sound()
    two = run.nodes["two"]
    del two.finished[9:15]
    two.well = [(0.0, 92.0), (150.0, 200.0)]  # it was kept from taking part for six rounds
    two.starts[-1] = verdict.Start(145.0, 3, 150.0, lost=(4, 5, 6, 7, 8), put_back=True)
    two.ends.append(verdict.End(93.0, 1, "disk full", "rl-swarm: The disk is full."))
    assert verdict.violations(run) == []


@pytest.mark.parametrize("network", ["folder", "p2p"])
def test_a_plan_has_every_kind_of_fault_and_churn_of_a_third(network: str) -> None:
    plan = plans.draw(network, 16, 60, 8.0, seed=1)
    assert plan == plans.draw(network, 16, 60, 8.0, seed=1) != plans.draw(network, 16, 60, 8.0, seed=2)
    kinds = Counter(fault.kind for fault in plan)
    assert set(kinds) == set(plans.WORDS)
    for first in range(4, 44, 10):
        gone = [f for f in plan if first <= f.round < first + 10 and f.kind in ("leave", "crash")]
        assert sum(name.startswith("node") for fault in gone for name in fault.nodes) >= 16 / 3
    shown = json.dumps([vars(fault) for fault in plan])
    assert plans.plan_of(shown) == plan
    kept, out = plans.left_out(plan, network, namespaces=False)
    assert out["disk"] and ("loss" in out) == (network == "p2p") and len(kept) + sum(out.values()) == len(plan)


@pytest.mark.parametrize("text", ["{", "[3]", '[{"kind": "fire", "round": 1, "nodes": []}]', '[{"round": 1}]'])
def test_a_plan_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SystemExit, match="--plan"):
        plans.plan_of(text)


def test_the_switch_does_to_frames_what_a_line_says() -> None:
    fates = wires.FrameFates(seed=0)
    well, Line = wires.Line(), wires.Line
    assert fates.of(well, well) == [0.0]
    assert fates.of(Line(cut=1), well) == fates.of(well, Line(loss=1.0)) == []
    assert fates.of(Line(cut=1, delay=0.2), Line(cut=1, delay=0.1)) == pytest.approx([0.3])
    assert fates.of(Line(reorder=1.0), well)[0] > 0 and fates.of(well, Line(duplicate=1.0)) == [0.0, 0.0]
    arrived = sum(len(fates.of(Line(loss=0.3), well)) for _ in range(1000))
    assert 600 < arrived < 800


def played(folder: Path, network: str, plan: list[dict[str, Any]], *options: str) -> dict[str, Any]:
    (folder / "plan.json").write_text(json.dumps(plan))
    files = ["--plan", str(folder / "plan.json"), "--json", str(folder / "figures.json")]
    nodes = ["--network", network, "--nodes", "3"]
    done = run_benchmark("robustness.faults", *nodes, *options, *files, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    assert figures["violations"] == [] and figures["most_lost_by_one"] <= 1
    return figures


def fault(kind: str, round: int, *nodes: str, seconds: float | None = 1.0, amount: float = 0.0) -> dict[str, Any]:
    return {"kind": kind, "round": round, "nodes": nodes, "seconds": seconds, "amount": amount}


@pytest.mark.slow
def test_a_folder_swarm_lives_through_faults(tmp_path: Path) -> None:
    plan = [
        fault("clock", 1, "node-03", seconds=6.0, amount=40.0),
        fault("crash", 1, "node-01"),
        fault("duplicate", 1, "node-02", seconds=6.0, amount=0.5),
        fault("old", 4, "node-03", amount=2),
        fault("hang", 4, "node-02", seconds=2.0),
        fault("crash", 6, "lead"),
        fault("loss", 6, "node-02", seconds=4.0, amount=0.2),
        fault("reorder", 6, "node-01", seconds=4.0, amount=0.5),
    ]
    figures = played(tmp_path, "folder", plan, "--rounds", "10", "--interval", "3")
    assert {row["kind"] for row in figures["faults"]} == {entry["kind"] for entry in plan}
    assert figures["restarts"] == 2 and figures["node_rounds"] >= 10


@pytest.mark.slow
def test_a_swarm_among_peers_lives_through_faults_without_bootnodes(tmp_path: Path) -> None:
    plan = [
        fault("hang", 1, "node-02", seconds=2.0),
        fault("clock", 1, "node-03", seconds=6.0, amount=-20.0),
        fault("crash", 2, "boot-1", "boot-2", seconds=None),
        fault("crash", 2, "node-01"),
        fault("loss", 3, "node-02", seconds=4.0, amount=0.1),
        fault("old", 5, "node-03", amount=2),
        fault("partition", 7, "node-02", seconds=3.0),
    ]
    figures = played(tmp_path, "p2p", plan, "--rounds", "10", "--interval", "3", "--round-end", "deadline")
    kinds = {row["kind"] for row in figures["faults"]}
    assert kinds >= {"hang", "clock", "crash", "old"}  # the others need namespaces
    assert figures["node_rounds"] >= 10
