"""Attacks on a very small swarm: what liars publish is learned from by those who believe it, and by no others."""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from benchmarks.robustness import attack_nodes, attack_outcome, attack_swarm, attack_types, attacks
from rl_swarm.environments.presets import PRESETS

SMALL = attack_outcome.Size(
    honest=2, malicious=1, identities=2, rounds=2, short_rounds=2, every=2, held_out=4, samples=1
)


@pytest.fixture(scope="module")
def environment():
    reasoning = attack_nodes.SharedScorer(PRESETS["tiny"])
    yield reasoning
    reasoning.close()


@pytest.fixture(scope="module")
def outcome(environment, tmp_path_factory):
    """What comes of an attack, with defences or without; every swarm runs once."""

    @lru_cache
    def run(name, defended):
        attack = attack_types.ATTACKS[name]() if name else None
        return attack_swarm.Swarm(attack, defended, SMALL, tmp_path_factory.mktemp("swarm"), environment).run()

    return run


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("before", {"unlikely"}),
        pytest.param("flooding", {"unlikely"}, marks=pytest.mark.slow),
        ("invented", {"question"}),
        pytest.param("copying", {"question"}, marks=pytest.mark.slow),
        ("forged", {"signature"}),
        pytest.param("replay", {"place", "question"}, marks=pytest.mark.slow),
        pytest.param("round", {"place"}, marks=pytest.mark.slow),
    ],
)
def test_a_lie_is_learned_by_those_who_believe_it_and_by_no_others(name: str, reasons: set[str], outcome) -> None:
    believed = outcome(name, False)
    assert believed.hostile > 0 and believed.learned > 0 and not believed.reasons
    checked = outcome(name, True)
    assert checked.hostile == checked.learned == 0
    assert reasons <= set(checked.reasons)
    assert believed.published == checked.published > 0


def test_rewards_are_the_own_ones_whatever_is_claimed(environment, tmp_path: Path) -> None:
    swarm = attack_swarm.Swarm(attack_types.Inflation(), True, SMALL, tmp_path, environment)
    swarm.run()
    liars = {liar.peer_id for liar in swarm.liars}
    for group in (group for node in swarm.nodes for group in node.intake.taken if group.peer_id in liars):
        answered = [(group.question, completion.text) for completion in group.completions]
        assert list(group.rewards) == environment.score(answered)


def test_an_answer_that_is_code_runs_where_answers_are_evaluated_and_nowhere_else(tmp_path: Path) -> None:
    for defended in (False, True):
        folder = tmp_path / str(defended)
        folder.mkdir()
        size = replace(SMALL, honest=1, held_out=1)
        found = attack_swarm.Swarm(attack_types.Code(), defended, size, folder).run()
        assert found.canary == (folder / "canary").exists() == (not defended)


def test_the_adaptive_attacker_keeps_below_the_gate_by_the_gates_own_figure(environment, tmp_path) -> None:
    swarm = attack_swarm.Swarm(attack_types.Adaptive(), True, SMALL, tmp_path, environment)
    found = swarm.run()
    assert found.published == 2 * 2 * attack_types.Adaptive.questions
    assert "question" not in found.reasons and "schema" not in found.reasons


def test_a_report_says_what_came_of_an_attack_with_and_without_defences(outcome, capsys) -> None:
    off, on = outcome("before", False), outcome("before", True)
    baselines = outcome(None, False), outcome(None, True)
    row = json.loads(json.dumps(attacks.row("before", off, on, baselines)))
    assert row["name"] == "before" and row["aims_at"] in attack_types.AIMS
    assert row["hostile_share_defended"] == 0 < row["hostile_share_undefended"] <= 1
    assert [point["round"] for point in row["curves"]["defended"]] == [0, 2]
    assert all(0 <= point["held_out"] <= 1 for arm in row["curves"].values() for point in arm)
    assert row["held_out_defended"] == row["curves"]["defended"][-1]["held_out"]
    assert row["success_undefended"] == pytest.approx(off.curve[-1]["phrase"] - off.curve[0]["phrase"])
    assert set(row["baseline"]) == {"undefended", "defended"}
    attacks.print_figures(
        {
            "attacks": [row],
            "baselines": {"undefended": baselines[0].curve, "defended": baselines[1].curve},
            "baseline_refused": {},
        }
    )
    table = capsys.readouterr().out.splitlines()
    assert len({line.count("|") for line in table[:4]}) == 1, "every row has all columns"
    assert table[2].startswith("| phrase before the answer | 2 | phrase |")
