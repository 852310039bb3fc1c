"""The numbers of a report, against what was computed by hand."""

import json
from pathlib import Path

import pytest

from rl_swarm.errors import UserError
from rl_swarm.experiment import measures, report, text
from rl_swarm.experiment.arms import Arm, Job
from rl_swarm.experiment.measures import NodeLog, Score, compared, measured
from rl_swarm.experiment.progress import followed
from rl_swarm.storage.files import LocalFiles


def held(round: int, sampled: float, **tasks: float) -> Score:
    return Score(round, sampled, None, tasks, {})


def made(
    folder: Path,
    arm: Arm,
    seed: int,
    nodes: dict[str, list[tuple[float, float]]],
    ends: dict[str, tuple[float, float]],
    rounds: int = 2,
    count: int = 2,
) -> None:
    """A finished run: of every node fresh local and training-set reward by round, and held-out score before and
    after."""
    job = Job(arm, seed, rounds, count)
    path = folder / "runs" / job.name
    job.write(LocalFiles(path))
    for node, rewards in nodes.items():
        lines: list[dict] = []
        for number, (local, training) in enumerate(rewards):
            lines.append(
                dict(
                    kind="round", round=number, reward_local=local, reward_training=training, local_groups=4,
                    local_with_signal=number + 1, external_accepted=1, generated_tokens=100, trained_tokens=50,
                    seconds={"generate": 1.5, "train": 0.5}, entropy=1.0, tokens_per_second=1.0,
                )
            )  # fmt: skip
        for at, where, score in ((0, -1, ends[node][0]), (len(lines) + 1, rounds - 1, ends[node][1])):
            lines.insert(
                at,
                dict(kind="held_out", when="now", round=where, questions=8, sampled=score, greedy=2 * score,
                well_formed=1.0,
                     accuracy_well_formed=score, by_task={"gcd": score}, greedy_by_task={"gcd": 2 * score},
                     well_formed_by_task={}, accuracy_well_formed_by_task={}, examples=[]),
            )  # fmt: skip
        (path / "logs" / node).mkdir(parents=True)
        (path / "logs" / node / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_report_says_what_the_logs_say(tmp_path: Path) -> None:
    alone = {"ann": [(0.1, 0.1), (0.3, 0.3)], "bob": [(0.2, 0.2), (0.2, 0.2)]}
    made(tmp_path, Arm(4, 0, "alone"), 1, alone, {"ann": (0.1, 0.2), "bob": (0.1, 0.4)})
    sharing = {"ann": [(0.2, 0.4), (0.4, 0.6)], "bob": [(0.2, 0.4), (0.4, 0.6)]}
    made(tmp_path, Arm(4, 4, "sapo"), 1, sharing, {"ann": (0.1, 0.45), "bob": (0.1, 0.45)})
    text = report.write([tmp_path], tmp_path).read_text()
    found = json.loads((tmp_path / "report.json").read_text())["configurations"]
    assert list(found) == ["4/0", "4/4 sapo"]
    base, other = found["4/0"], found["4/4 sapo"]
    assert base["training_set"]["total"]["mean"] == pytest.approx(0.8)
    assert other["training_set"]["total"]["mean"] == pytest.approx(2.0)
    assert other["fresh_local"]["total"]["mean"] == pytest.approx(1.2)
    assert other["fresh_local"]["per_round"]["mean"] == pytest.approx(0.3)
    assert other["fresh_local"]["per_1000_tokens"]["mean"] == pytest.approx(0.6 / 200 * 1000)
    assert other["fresh_local"]["per_second"]["mean"] == pytest.approx(0.6 / 4)
    assert other["fresh_local"]["by_round"] == [[k, *[pytest.approx(0.2 * k)] * 3] for k in (1, 2)]
    assert base["held_out"]["by_tokens"][1] == pytest.approx([200, 0.3, 0.2, 0.4]), "nodes at 0.2 and 0.4"
    assert other["against"]["4/0"]["training_set"]["mean"] == pytest.approx(1.5)
    assert other["against"]["4/0"]["fresh_local"]["mean"] == pytest.approx(0.5)
    assert other["against"]["4/0"]["held_out"]["mean"] == pytest.approx(0.5)
    score = base["held_out"]["sampled"]
    assert (score["start"]["mean"], score["end"]["mean"]) == (pytest.approx(0.1), pytest.approx(0.3))
    assert (score["end"]["low"], score["end"]["high"]) == (pytest.approx(0.2), pytest.approx(0.4))
    assert base["held_out"]["greedy"]["end"]["mean"] == pytest.approx(0.6)
    assert base["held_out"]["by_task"]["gcd"]["sampled"]["end"]["mean"] == pytest.approx(0.3)
    assert base["held_out"]["gain_per_million_tokens"]["mean"] == pytest.approx(0.2 / 200 * 1e6)
    assert base["held_out"]["gain_per_hour"]["mean"] == pytest.approx(0.2 / 4 * 3600)
    assert base["groups_with_signal"]["mean"] == pytest.approx(3 / 8)
    # In 4/4 both rose by 0.35 in the one task; in 4/0 one of two nodes did.
    assert other["spread_of_skills"]["reach"]["mean"] == 1.0
    assert base["spread_of_skills"]["reach"]["mean"] == 0.0
    assert "+150 %" in text and "+50 %" in text and "too narrow" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| 4/4 sapo | 1 |")]
    assert "| 1.2 (1.2 to 1.2) |" in row, "nodes that earn the same have an interval too"
    equal = other["against_at_equal_tokens"]["4/0"]
    assert (equal["fresh_local"]["mean"], equal["held_out"]["mean"]) == (pytest.approx(0.5), pytest.approx(0.5))
    assert base["against_at_equal_tokens"]["4/4 sapo"]["held_out"]["mean"] == pytest.approx(0.3 / 0.45 - 1)
    assert (tmp_path / "held_out.png").stat().st_size > 5000
    assert "![Held-out score by task](by_task.png)" in text


def test_a_run_that_was_not_examined_after_its_last_round_is_unfinished(tmp_path: Path) -> None:
    for seed in (1, 2):
        made(tmp_path, Arm(4, 0, "alone"), seed, {"ann": [(0.1, 0.1)] * 2}, {"ann": (0.1, 0.2)}, count=1)
    path = tmp_path / "runs" / "4-0-seed2" / "logs" / "ann" / "metrics.jsonl"
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, json.dumps({**json.loads(last), "greedy": None}), ""]))
    assert report.find([tmp_path]).unfinished == ["4-0-seed2"]


def test_experiments_with_one_name_and_strategies_that_are_not_here_can_be_reported(tmp_path: Path) -> None:
    for where in ("a", "b"):
        arm = Arm(4, 4, "nowhere:Idea")
        made(tmp_path / where / "e", arm, 1, {"ann": [(0.1, 0.1)] * 2}, {"ann": (0.1, 0.2)}, count=1)
    found = report.as_numbers(report.find([tmp_path / "a" / "e", tmp_path / "b" / "e"]))
    assert list(found["configurations"]) == [f"{tmp_path}/{x}/e: 4/4 nowhere:Idea" for x in ("a", "b")]


def test_what_the_paper_has_too_stands_beside_its_numbers(tmp_path: Path) -> None:
    nodes = {"ann": [(0.1, 0.1), (0.3, 0.3)]}
    for arm, reward in ((Arm(8, 0, "alone"), 0.2), (Arm(4, 4), 0.3), (Arm(4, 4, "top"), 0.3), (Arm(4, 2), 0.3)):
        made(tmp_path, arm, 1, {"ann": [(0.2, reward)] * 2}, {"ann": (0.1, 0.2)}, count=1)
    text = report.write([tmp_path], tmp_path / "out").read_text()
    rows = text.partition("## Against the paper")[2].partition("##")[0]
    assert "| 8/0 | 561.79 |" in rows and "| 4/4 sapo | 1093.31 | +94 % | +50 % (+50 to +50) | +0 %" in rows
    assert "top" not in rows and "4/2" not in rows
    made(tmp_path / "other", Arm(4, 4), 1, nodes, {"ann": (0.1, 0.2)}, count=1)
    alone = report.write([tmp_path / "other"], tmp_path / "other").read_text()
    assert "## Against the paper" not in alone, "there is no 8/0"
    (tmp_path / "kept").mkdir()
    (tmp_path / "out" / "report.json").rename(tmp_path / "kept" / "report.json")
    both = report.read([tmp_path / "kept", tmp_path / "other"])
    assert list(both["configurations"])[-2:] == ["kept: 4/4 top", "other: 4/4 sapo"]
    assert both["configurations"]["kept: 4/4 sapo"]["against"]["kept: 8/0"]["training_set"]["mean"] == pytest.approx(
        0.5
    )
    with pytest.raises(UserError, match="neither runs nor"):
        report.read([tmp_path / "nothing"])


def test_a_pooled_learner_counts_as_all_nodes(tmp_path: Path) -> None:
    made(tmp_path, Arm(4, 0, "alone", pooled=True), 1, {"ann": [(0.5, 0.5), (0.7, 0.7)]}, {"ann": (0.1, 0.2)})
    report.write([tmp_path], tmp_path)
    found = json.loads((tmp_path / "report.json").read_text())["configurations"]["4/0-pooled"]
    assert found["fresh_local"]["total"]["mean"] == pytest.approx(2.4), "two nodes, two rounds, 0.6"
    assert found["generated_tokens_per_node"]["mean"] == pytest.approx(100), "half of its 200"


def test_several_experiments_stand_beside_each_other_and_unfinished_runs_are_named(tmp_path: Path) -> None:
    for name in ("one", "two"):
        made(tmp_path / name, Arm(4, 0, "alone"), 1, {"ann": [(0.1, 0.1), (0.3, 0.3)]}, {"ann": (0.1, 0.2)})
    made(tmp_path / "two", Arm(8, 0, "alone"), 1, {"ann": [(0.1, 0.1)]}, {"ann": (0.1, 0.2)})
    path = report.write([tmp_path / "one", tmp_path / "two"], tmp_path / "both")
    found = json.loads(path.with_suffix(".json").read_text())
    assert list(found["configurations"]) == ["one: 4/0", "two: 4/0"]
    assert found["unfinished"] == ["two: 8-0-seed1"] and "8-0-seed1" in path.read_text()
    with pytest.raises(UserError, match="holds no run"):
        report.write([tmp_path], tmp_path)


def test_intervals_are_over_seeds_and_the_nodes_within_them() -> None:
    assert (measured([[0.5, 0.5], [0.5, 0.5]]).low, measured([[0.5]]).high) == (0.5, 0.5)
    seeds = measured([[0.0, 0.0], [1.0, 1.0]])
    assert (seeds.mean, seeds.low, seeds.high) == (0.5, 0.0, 1.0)
    many = measured([[0.4, 0.6]] * 20)
    assert many.mean == pytest.approx(0.5) and 0.45 < many.low < 0.5 < many.high < 0.55
    assert measured([[2.0]], total=8).mean == 16


def test_a_change_is_compared_seed_by_seed() -> None:
    """Twice as good with every seed is twice as good, however much seeds differ."""
    change = compared({1: [0.2], 2: [1.0]}, {1: [0.1], 2: [0.5], 3: [9.0]})
    assert change is not None
    assert (change.mean, change.low, change.high) == (pytest.approx(1.0),) * 3
    assert compared({1: [0.2]}, {2: [0.1]}) is None and compared({1: [0.2]}, {1: [0.0]}) is None


def test_a_change_that_rounds_to_nothing_has_no_minus() -> None:
    assert text._percent({"mean": -0.004, "low": -0.016, "high": 0.943}) == "+0 % (-2 to +94)"
    assert text._percent(None) == ""


def test_oscillation_is_how_far_a_curve_is_below_its_best() -> None:
    rising = [k / 100 for k in range(100)]
    assert measures.oscillation(rising) == 0
    falling = [0.5] * 50 + [0.25] * 50  # in ten of twenty windows a quarter below
    assert measures.oscillation(falling) == pytest.approx(0.125)
    assert measures.oscillation([0.5]) == 0


def test_a_skill_spreads_from_the_first_node_to_others() -> None:
    ann = NodeLog([], [held(-1, 0, gcd=0.1, sum=0.1), held(9, 0, gcd=0.5, sum=0.1), held(19, 0, gcd=0.5, sum=0.2)])
    bob = NodeLog([], [held(-1, 0, gcd=0.1, sum=0.1), held(9, 0, gcd=0.2, sum=0.1), held(19, 0, gcd=0.4, sum=0.3)])
    eve = NodeLog([], [held(-1, 0, gcd=0.1, sum=0.1), held(9, 0, gcd=0.1, sum=0.1), held(19, 0, gcd=0.1, sum=0.1)])
    found = measures.spread([ann, bob, eve])
    assert (found.tasks, found.reach, found.rounds) == (1, 0.5, 10)
    assert measures.spread([eve]).reach is None


def test_scores_at_a_budget_lie_on_the_line_between_two_looks() -> None:
    node = NodeLog([], [held(-1, 0.2), held(1, 0.4), held(3, 0.5)])
    spent = [10.0, 20.0, 30.0, 40.0]
    assert measures.held_out_at(node, spent, 10) == pytest.approx(0.3)
    assert measures.held_out_at(node, spent, 30) == pytest.approx(0.45)
    assert measures.held_out_at(node, spent, 99) == 0.5


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    alone = {"ann": [(0.1, 0.1), (0.3, 0.3)], "bob": [(0.2, 0.2), (0.2, 0.2)]}
    ends = {"ann": (0.1, 0.2), "bob": (0.1, 0.4)}
    for arm in (Arm(4, 0, "alone"), Arm(4, 4, "sapo")):
        made(tmp_path, arm, 1, alone, ends)
    return tmp_path


HELD_OUT = {
    "kind": "held_out", "when": "now", "round": 0, "questions": 8, "sampled": 0.5, "greedy": 0.5,
    "well_formed": 1.0, "accuracy_well_formed": 1.0, "by_task": {}, "greedy_by_task": {},
    "well_formed_by_task": {}, "accuracy_well_formed_by_task": {}, "examples": [],
}  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        json.dumps(HELD_OUT).encode().replace(b"now", b"\xff"),
        b'{"kind":"round","x":' + b"[" * 100_000,
        json.dumps({**HELD_OUT, "sampled": 1e308}).encode(),
        json.dumps({**HELD_OUT, "by_task": {"gcd": -1e308}}).encode(),
        json.dumps({**HELD_OUT, "round": -2}).encode(),
    ],
)
def test_a_line_that_no_node_writes_changes_no_figure_and_is_named_by_the_report(experiment: Path, line: bytes) -> None:
    before = followed(experiment).state()
    for path in experiment.glob("runs/*/logs/ann/metrics.jsonl"):
        path.write_bytes(path.read_bytes() + line + b"\n")
    assert followed(experiment).state() == before
    with pytest.raises(UserError, match=r"metrics\.jsonl: a line cannot be read"):
        report.find([experiment])


@pytest.mark.parametrize("number", [0, -1])
def test_a_first_score_that_others_moved_or_emptied_ends_nothing(experiment: Path, number: int) -> None:
    for path in experiment.glob("runs/*/logs/ann/metrics.jsonl"):
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        for line in lines:
            if line["kind"] == "held_out":
                line |= {"by_task": {}, "round": 1000 if number else line["round"]}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert followed(experiment).state().phase
    try:
        text.whole(report.as_numbers(report.find([experiment])), {})
    except UserError as error:
        assert "unfinished" in str(error)


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": 0},
        {"rounds": 0},
        {"rate": 1e308},
        {"seed": -1},
        {"arm": {"local_groups": 1, "external_groups": 1, "strategy": "\x1b[31m\n| <b>"}},
        {"arm": {"local_groups": 1, "external_groups": 1, "epochs": 10**17}},
        b'{"settings":{"\xff":1},',
        b'{"settings":{"x":' + b"[" * 100_000,
    ],
)
def test_an_arm_that_no_experiment_has_is_refused_in_one_line(
    experiment: Path, change: dict[str, object] | bytes
) -> None:
    for path in experiment.glob("runs/*/arm.json"):
        written = path.read_bytes()
        new = json.dumps(json.loads(written) | change).encode() if isinstance(change, dict) else change + written[1:]
        path.write_bytes(new)
    for read in (lambda: followed(experiment), lambda: report.find([experiment])):
        with pytest.raises(UserError, match=r"arm\.json cannot be read: .") as caught:
            read()
        assert len(str(caught.value).splitlines()) == 1 and str(caught.value).isprintable()


def test_a_change_without_bounds_is_told() -> None:
    assert measures.percent(float("inf")) == "+100000000"
