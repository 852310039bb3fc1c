"""A siege says what it saw: its verdict can fail, and its hostile processes really attack a swarm of real nodes."""

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.robustness import siege, siege_folder, siege_swarms
from benchmarks.robustness.siege_hostile import Pace, Processes
from benchmarks.robustness.siege_verdict import Side, Siege, doubts, empty, lowest_score, violations

QUIET = Side(
    rounds=100, minutes=10.0, late_rounds=0, memory=(5000.0, 5100.0), largest=700.0, score=0.8, beside_seconds=200.0,
    restarts=1, dashboard=(100, 0),
)  # fmt: skip
GOOD = Siege(replace(QUIET, rounds=95, score=0.79), QUIET, 79, plain=[0.78, 0.81])
BAD = {
    "rounds per minute": replace(GOOD, attack=replace(GOOD.attack, rounds=89)),
    "memory grew": replace(GOOD, attack=replace(GOOD.attack, memory=(5000.0, 6000.0))),
    "a process has": replace(GOOD, attack=replace(GOOD.attack, largest=800.0)),
    "the held-out score was": replace(GOOD, attack=replace(GOOD.attack, score=0.6)),
    "there is no held-out score": replace(GOOD, attack=replace(GOOD.attack, score=None)),
    "the dashboard left": replace(GOOD, attack=replace(GOOD.attack, dashboard=(100, 20))),
    "2 nodes were started again": replace(GOOD, attack=replace(GOOD.attack, restarts=2)),
    "a command ran": replace(GOOD, harm=["a command ran"]),
}


def test_a_swarm_that_holds_meets_every_bar() -> None:
    assert [*violations(GOOD), *empty(GOOD), *doubts(GOOD)] == []


@pytest.mark.parametrize("sentence", BAD)
def test_every_bar_can_be_missed(sentence: str) -> None:
    missed = list(violations(BAD[sentence]))
    assert len(missed) == 1 and missed[0].startswith(sentence)


def test_a_siege_that_did_not_take_place_shows_nothing() -> None:
    assert list(empty(replace(GOOD, ended=["the hostile process “links” failed"])))
    assert list(empty(replace(GOOD, control=replace(QUIET, late_rounds=50))))
    assert list(doubts(replace(GOOD, control=replace(QUIET, beside_seconds=100.0))))
    assert list(doubts(replace(GOOD, plain=[])))


def test_what_seeds_scatter_decides_what_score_is_expected() -> None:
    assert lowest_score([0.8]) is None
    narrow, wide = lowest_score([0.79, 0.80, 0.81]), lowest_score([0.7, 0.8, 0.9])
    assert narrow is not None and wide is not None and wide < narrow < 0.79


def test_harmless_processes_burn_what_they_are_told_and_no_more() -> None:
    beside, wanted = siege_swarms.burn_beside(["a", "b"], siege_swarms.usable_cores())
    try:
        beside.begin()
        wanted[0] = 0.5
        siege_swarms.wait_until(lambda: beside.used()["a"] >= 0.4, 400)
        assert beside.used()["b"] < 0.4
    finally:
        beside.end()
    assert not any(child.is_alive() for child in beside.children.values())


def test_hands_that_attack_a_folder_reach_nothing_outside(tmp_path: Path) -> None:
    """Else what an honest node did could not be told from what they did."""
    folder, outside = tmp_path / "swarm", siege_swarms.make_outside(tmp_path / "outside")
    folder.mkdir()
    (folder / "logs").symlink_to(outside / "precious")
    before, hands = siege_swarms.tree(outside), siege_folder.FolderWriter(folder)
    for act in (hands.pipe, hands.directory, hands.clear, hands.deny, lambda path: hands.put(path, b"x")):
        act("logs/round_0/precious.json")
        act("logs/new")
    hands.symlink(outside / "profile", "logs/new")
    assert siege_swarms.tree(outside) == before
    hands.put("state/x.json", b"x")
    assert hands.get("state/x.json") == b"x" and hands.names("state") == ["x.json"]


def test_a_pace_counts_children_and_says_when_an_attack_is_ready() -> None:
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    pace = Pace(1.0, ready, stop, 0)
    assert not ready.is_set()
    assert pace.go(0) and ready.is_set()
    stop.set()
    assert not pace.go(0)
    assert Processes.now().used(1) >= 0.0


@pytest.mark.slow
@pytest.mark.parametrize("network", ["folder", "p2p"])
def test_a_short_siege(network: str, tmp_path: Path) -> None:
    """Half a minute says nothing of the pace; but all attacks take place, and nothing outside changes."""
    told = tmp_path / "figures.json"
    siege.main(
        ["--network", network, "--minutes", "0.5", "--nodes", "2", "--scatter", "0", "--every", "2", "--questions", "8",
         "--deadline", "60", "--folder", str(tmp_path / "siege"), "--json", str(told)]
    )  # fmt: skip
    figures = json.loads(told.read_text())
    assert figures["harm"] == figures["ended"] == []
    assert figures["attack"]["rounds"] > 0 and figures["control"]["rounds"] > 0
    assert set(figures["hostile_seconds"]) == set(siege_swarms.kinds_of(network))
