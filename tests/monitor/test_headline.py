"""The run in one sentence, and the answer that shows it: from the logs of nodes, which may say anything."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from small_runs import SmallRun

from rl_swarm.monitor import snapshot
from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.headline import LONGEST_ANSWER, LONGEST_QUESTION, Headline, clean, headline
from rl_swarm.monitor.run_reader import NodeView, RunView
from rl_swarm.telemetry.schema import AnsweredQuestion, HeldOutRecord, line_of


def line(when: str, played: int, sampled: float, *examples: tuple[str, str, float]) -> dict[str, Any]:
    """Return a line of a log; examples are a question, an answer and its reward, and the key is always 5."""
    asked = [AnsweredQuestion("gcd", question, "5", text, reward) for question, text, reward in examples]
    return line_of(HeldOutRecord(
        when=when, round=played - 1, questions=20, sampled=sampled, greedy=None, well_formed=1.0,
        accuracy_well_formed=sampled, by_task={}, greedy_by_task={}, well_formed_by_task={},
        accuracy_well_formed_by_task={}, examples=asked,
    ))  # fmt: skip


def node(name: str, *lines: dict[str, Any]) -> NodeView:
    return NodeView(name, held_out=list(lines))


def sentence(*nodes: NodeView, finished: bool = True) -> str:
    return headline(nodes, finished).sentence


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0.2, 0.83, "2 models went from 20 % to 83 % on unseen questions in 60 rounds."),
        (0.2, 0.204, "2 models stayed at 20 % on unseen questions over 60 rounds."),
        (0.0, 0.0, "2 models stayed at 0 % on unseen questions over 60 rounds."),
        (0.83, 0.2, "2 models fell from 83 % to 20 % on unseen questions in 60 rounds."),
    ],
)
def test_a_gain_no_gain_and_a_loss_are_said_plainly(start: float, end: float, expected: str) -> None:
    nodes = [node(name, line("start", 0, start), line("end", 60, end)) for name in ("a", "b")]
    assert sentence(*nodes) == expected


def test_it_is_the_mean_of_the_nodes_that_were_scored_twice() -> None:
    nodes = [
        node("a", line("start", 0, 0.2), line("now", 1, 0.4)),
        node("b", line("start", 0, 0.4), line("now", 1, 0.8)),
        node("c", line("start", 0, 1.0)),
        node("d", line("now", 1, 1.0)),
        node("e"),
    ]
    assert sentence(*nodes, finished=False) == "2 models went from 30 % to 60 % on unseen questions in 1 round so far."


def test_before_the_second_score_it_says_where_the_models_begin_and_without_any_nothing() -> None:
    assert sentence(node("a", line("start", 0, 0.2)), finished=False) == "1 model begins at 20 % on unseen questions."
    two = [node(name, line("start", 0, 0.2)) for name in "ab"]
    assert sentence(*two, finished=False) == "2 models begin at 20 % on unseen questions."
    assert headline(two, finished=True) == headline([], finished=False) == Headline("", None)


@pytest.mark.parametrize("score", [1e308, -1.0, 2.0])
def test_a_score_that_is_no_share_does_not_count(score: float) -> None:
    honest = node("a", line("start", 0, 0.2), line("end", 3, 0.5))
    lied = node("b", line("start", 0, 0.2), line("end", 3, score))
    assert sentence(honest, lied) == "1 model went from 20 % to 50 % on unseen questions in 3 rounds."
    assert sentence(lied) == ""


def test_the_example_was_wrong_at_the_start_and_is_right_at_the_end() -> None:
    found = headline([node(
        "a",
        line("start", 0, 0.2, ("q1", "7", 0.0), ("q2", "5", 1.0), ("q3", "8", 0.0), ("gone", "1", 0.0)),
        line("end", 60, 0.8, ("q1", "6", 0.0), ("q2", "5", 1.0), ("q3", "5", 1.0), ("new", "5", 1.0)),
    )], finished=True).example  # fmt: skip
    assert found is not None and (found.question, found.before, found.after) == ("q3", "8", "5")
    assert (found.before_right, found.after_right, found.key, found.task, found.node) == (False, True, "5", "gcd", "a")


def test_an_answer_that_only_lacked_the_form_is_shown_last() -> None:
    first = line("start", 0, 0.2, ("short", "it is 5", 0.0), ("much longer", "it is 7", 0.0), ("silent", "", 0.0))
    last = line("end", 60, 0.8, ("short", "5", 1.0), ("much longer", "5", 1.0), ("silent", "5", 1.0))
    found = headline([node("a", first, last)], finished=True).example
    assert found is not None and found.question == "much longer"


def test_the_example_is_of_the_node_that_changed_most_and_follows_the_score_down() -> None:
    small = node("small", line("start", 0, 0.2, ("q", "1", 0.0)), line("end", 9, 0.3, ("q", "5", 1.0)))
    large = node("large", line("start", 0, 0.2, ("q", "2", 0.0)), line("end", 9, 0.9, ("q", "5", 1.0)))
    none = node("none", line("start", 0, 0.2, ("q", "2", 0.0)), line("end", 9, 1.0, ("q", "3", 0.0)))
    found = headline([small, large, none], finished=True).example
    assert found is not None and found.node == "large"
    worse = node("worse", line("start", 0, 0.9, ("q", "5", 1.0)), line("end", 9, 0.1, ("q", "9", 0.0)))
    found = headline([worse], finished=True).example
    assert found is not None and (found.before_right, found.after_right) == (True, False)
    same = node("same", line("start", 0, 0.2, ("q", "1", 0.0)), line("end", 9, 0.2, ("q", "5", 1.0)))
    assert headline([same], finished=True).example is None, "no gain, no example of one"


def test_texts_are_bounded_and_harmless() -> None:
    escapes = "\x1b]0;owned\x07\x1b[2J\x9b2J[red]markup[/] \u202ereversed\r\n" * 1000
    first, last = line("start", 0, 0.0, (escapes, escapes, 0.0)), line("end", 1, 1.0, (escapes, "5", 1.0))
    found = headline([node("a", first, last)], finished=True).example
    assert found is not None and "[red]markup[/]" in found.question
    assert len(found.question) == LONGEST_QUESTION and len(found.before) == LONGEST_ANSWER
    assert all(letter.isprintable() for letter in found.question + found.before + found.after)
    assert clean(" a\n\n b ", 10) == "a b" and clean("abcd", 3) == "ab…"


def test_the_overview_has_it_from_the_first_and_the_last_line_of_a_log(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", nodes=2, total=3)
    follower = Follower(RunView(run.root))
    follower.poll_now()
    assert snapshot.overview(follower).headline == "2 models begin at 20 % on unseen questions."
    for score in (0.3, 0.4, 0.5):
        run.play()
        for identity in run.identities:
            run.score(identity, "now", score)
        follower.poll_now()
        told = snapshot.overview(follower)
        assert f"from 20 % to {score * 100:.0f} %" in told.headline and told.example is None
    assert msgspec.json.decode(msgspec.json.encode(told))["example"] is None
