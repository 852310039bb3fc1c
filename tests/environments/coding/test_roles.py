"""Solvers, a proposer and an evaluator play as real nodes, and remember what they must."""

import json
from pathlib import Path

import pytest
from processes import QUICK, run, status

from rl_swarm.config.settings import Settings
from rl_swarm.environments.base import FollowUp
from rl_swarm.environments.coding.answers import fenced
from rl_swarm.environments.coding.difficulty import Difficulty
from rl_swarm.environments.coding.environment import Coding
from rl_swarm.environments.coding.generator import make
from rl_swarm.environments.coding.proposals import as_json
from rl_swarm.environments.coding.roles import MAX_KEPT, MAX_REMEMBERED, Evaluator, Proposer, Solver
from rl_swarm.environments.coding.task import DIGITS, LEVELS
from rl_swarm.learning.checkpoints import PLACE_BYTES
from rl_swarm.learning.policy import other_models
from rl_swarm.protocol.questions import PeerMessage, Question
from rl_swarm.protocol.wire import decode


@pytest.fixture(scope="module")
def coding():
    environment = Coding(Coding.preset("coder"))
    yield environment
    environment.close()


def lines(folder: Path, role: str) -> list[dict]:
    """Return the lines of the node in this role, round by round."""
    peers = [json.loads(path.read_text()) for path in (folder / "peers").glob("*.json")]
    (node,) = [peer["node"] for peer in peers if peer.get("role") == role]
    logged = (folder / "logs" / node / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, logged) if line["kind"] == "round"]


def test_three_roles_play_together(tmp_path):
    code, output = run(
        tmp_path, "up", "--env", "coding", "--run", "r", "--nodes", "3", "--rounds", "2", "--local-groups", "2", *QUICK
    )
    assert code == 0, output
    assert "Proposer" in output and "Evaluator" in output and "proposes at the level easy" in output
    seen = {node.get("role", ""): node for node in status(tmp_path, tmp_path / "r")["nodes"]}
    assert set(seen) == {"", "proposer", "evaluator"} and {node["model"] for node in seen.values()} == {"coder"}
    assert 0 <= seen[""]["held_out_start"] <= 1 and seen["proposer"]["held_out_start"] is None

    proposals = [line["role_metrics"] for line in lines(tmp_path / "r", "proposer") if line.get("role_metrics")]
    assert [figures["level"] for figures in proposals] == [1.0, 1.0]
    assert "solved" not in proposals[0] and 0 <= proposals[1]["solved"] <= 1
    assert 0 <= proposals[1]["proposer_reward"] <= 1 and 0 <= proposals[1]["model_share"] <= 1
    guesses = [line["role_metrics"] for line in lines(tmp_path / "r", "evaluator") if line.get("role_metrics")]
    assert guesses[-1]["guesses"] > 0
    assert guesses[-1]["disagreement"] == pytest.approx(1 - guesses[-1]["accuracy"], abs=1e-3)
    assert {"balanced", "calibration", "brier"} <= set(guesses[-1])

    # In the second stage the solver answered what was proposed.
    published = [decode(path.read_bytes()) for path in (tmp_path / "r").glob("rollouts/round_1/stage_1/*.json")]
    answered = [one for one in published if one["rollouts"]]
    assert len(answered) == 1 and sorted(answered[0]["parents"]) == ["0", "1"]
    code, output = run(tmp_path, "validate", "r", "--rounds", "2", "--nodes", "3")
    assert code == 0 and "sound" in output, output

    code, output = run(tmp_path, "join", "r", "--role", "referee")
    assert code != 0 and "solver" in output and "proposer" in output and "evaluator" in output


def test_a_proposer_goes_on_at_its_level(coding):
    proposer = Proposer(coding)
    for success in [0.3] * 10 + [0.5] * 12:
        proposer.difficulty = proposer.difficulty.after(success)
    proposer.written = [3, 88]
    (question,) = coding.follow_up([FollowUp("me", "proposer", 0, 0, 5)])
    tasks = [as_json(make("easy", 31, index)) for index in range(3)]
    assert proposer._is_new(tasks[0], question) and proposer._is_new(tasks[1], question)
    again = Proposer(coding)
    again.restore(json.loads(json.dumps(proposer.snapshot())))
    assert again.difficulty == proposer.difficulty == Difficulty(2, (0.5, 0.5), 22)
    assert again.written == [3, 88]
    assert [again._is_new(text, question) for text in tasks] == [False, False, True]
    again.restore({})
    assert again.difficulty.name == "medium"
    assert "level medium" in Proposer.summary({"level": 2.0, "model_share_so_far": 0.25})


def test_a_proposer_takes_drafts_that_count_once_and_else_makes_a_task(coding):
    proposer = Proposer(coding)
    (question,) = coding.follow_up([FollowUp("me", "proposer", 0, 0, 5)])
    good = next(
        text
        for text in (as_json(make("easy", 31, index)) for index in range(20))
        if coding.score([(question, text)])[0]
    )
    assert proposer._choose(question, ["no", good, good]) == (good, True)
    text, by_model = proposer._choose(question, ["no", good])  # it is not new any more
    assert not by_model and coding.score([(question, text)]) == [1.0] and text != good
    others = [proposer._choose(question, [])[0] for _ in range(5)]
    assert len({json.loads(other)["solution"] for other in (text, *others)}) == 6


def test_where_programs_must_not_run_a_guess_is_the_verdict():
    environment = Coding(Coding.preset("coder"))
    settings = Settings.of(evaluator_model="coder", device="cpu")
    environment.configure(settings.task, None, other_models(settings))
    questions = environment.held_out(40)
    right = environment.score([(question, fenced(question.answer)) for question in questions])
    wrong = environment.score([(question, fenced("def solve(x):\n    return x")) for question in questions])
    assert environment._sandbox is None, "nothing was run"
    assert sum(right) > 20 > sum(wrong)
    assert environment.score([(questions[0], "no code")]) == [-1.0]
    late = environment.score([(questions[0], "no code"), (questions[0], fenced("x = 1"))], seconds=-1.0)
    assert late == [-1.0], "nor is it guessed when time is up"
    # What was proposed cannot be checked, so it is not asked.
    follow_up = FollowUp("me", "", 1, 0, 7, messages=())
    assert environment.follow_up([follow_up])[0].task in LEVELS
    environment.close()


def test_what_a_proposer_remembers_fits_into_a_checkpoint(coding):
    proposer = Proposer(coding)
    (question,) = coding.follow_up([FollowUp("me", "proposer", 0, 0, 5)])
    written = {"question": "f(n) adds.", "tests": [["f(1)", "1"], ["f(2)", "2"]]}
    for number in range(2 * MAX_REMEMBERED):
        proposer._is_new(json.dumps({**written, "solution": f"def f(n):\n    return n + {number}"}), question)
    assert len(proposer.known) == MAX_REMEMBERED and len(json.dumps(proposer.snapshot())) < PLACE_BYTES // 2


def test_so_does_what_a_solver_remembers_the_newest_of_it(coding):
    solver = Solver(Coding(coding.tasks))
    solver.coding.proposed = {f"{number:0{DIGITS}x}": "f" * DIGITS for number in range(2 * MAX_KEPT)}
    kept = solver.snapshot()
    assert len(kept["proposed"]) == MAX_KEPT and len(json.dumps(kept)) < PLACE_BYTES // 2
    assert set(kept["proposed"]) == set(list(solver.coding.proposed)[MAX_KEPT:])
    solver.restore({})
    assert solver.coding.proposed == {}


def test_an_evaluator_reads_all_peers_and_questions(coding):
    def message(peer, number, count):
        question = Question("easy", 0, number, f"{peer} {number}", None)
        texts = tuple(fenced(f"x = {peer!r}, {number}, {program}") for program in range(count))
        return PeerMessage(f"{peer} {number}", peer, question, texts, number)

    messages = [message("loud", number, 16) for number in range(16)]
    messages += [message("quiet", 0, 8), message("quiet", 1, 8)]
    asked = [question.prompt for question, _ in Evaluator(coding)._programs(messages)]
    assert len(asked) == 64
    assert asked.count("quiet 0") == asked.count("quiet 1") == 8
    assert {asked.count(f"loud {number}") for number in range(16)} == {3}


def test_an_evaluator_says_how_good_it_was(coding):
    told = {"balanced": 0.81, "disagreement": 0.2, "calibration": 0.05}
    assert "81%" in Evaluator.summary(told) and "20%" in Evaluator.summary(told)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_solvers_get_better_within_a_few_rounds(tmp_path):
    code, output = run(
        tmp_path,
        "up",
        "--env",
        "coding",
        "--run",
        "r",
        "--rounds",
        "24",
        "--set",
        "held_out_questions=100",
        timeout=900,
    )
    assert code == 0, output
    for path in (tmp_path / "r" / "logs").glob("*/metrics.jsonl"):
        scores = [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == "held_out"]
        for start, end in zip(scores[:1], scores[-1:], strict=True):
            assert end["sampled"] >= 1.5 * start["sampled"] and end["greedy"] >= start["greedy"]
