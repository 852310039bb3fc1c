"""A model that scores little learns the form of an answer from examples, before reinforcement."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import end, family, run, start, until

from rl_swarm.cli.warmup import warmup
from rl_swarm.config.settings import Settings
from rl_swarm.environments.presets import PRESETS
from rl_swarm.environments.reasoning import Reasoning
from rl_swarm.learning.policy import Policy, bundled
from rl_swarm.learning.warmup import BATCH, WarmupError, WarmupExample, make_examples, save, step_count, train
from rl_swarm.protocol.questions import is_held_out
from rl_swarm.protocol.tasks import Task


@pytest.fixture
def environment() -> Iterator[Reasoning]:
    environment = Reasoning(PRESETS["tiny"])
    yield environment
    environment.close()


def tiny() -> Policy:
    return Policy.load(Settings.of(model="tiny", cpu_only=True), Reasoning.system_prompt)


def surprise(policy: Policy, examples: list[WarmupExample]) -> float:
    """Of the examples, without learning from them."""
    return next(train(policy, examples[:BATCH], 1, 0.0, 0))


def test_every_example_earns_its_full_reward_and_none_is_held_out(environment: Reasoning) -> None:
    examples, left_out = make_examples(environment, 200, seed=1)
    assert len(examples) == 200 and left_out == []
    assert {example.question.task for example in examples} == {task.name for task in PRESETS["tiny"]}
    assert environment.score([(example.question, example.completion) for example in examples]) == [1.0] * 200
    held_out = {question.prompt for question in environment.held_out(400)}
    assert not [e for e in examples if e.question.prompt in held_out or is_held_out(e.question.prompt)]


def test_examples_depend_on_the_seed_alone(environment: Reasoning) -> None:
    first, again, other = (make_examples(environment, 20, seed) for seed in (1, 1, 2))
    assert first == again != other


def test_tasks_with_many_right_answers_are_taught_by_their_own_examples_and_others_named() -> None:
    names = ("propositional_logic", "graph_color", "rubiks_cube", "rush_hour", "boxnet")
    environment = Reasoning([Task(name) for name in names])
    try:
        examples, left_out = make_examples(environment, 60, seed=0)
        assert {example.question.task for example in examples} == set(names[:3])
        assert left_out == ["boxnet", "rush_hour"]
        assert set(environment.score([(e.question, e.completion) for e in examples])) == {1.0}
        assert all(example.question.answer is None for example in examples)
        examples, left_out = make_examples(environment, 20, 0, lambda text: len(text) < 60)
        assert len(examples) == 20 and all(len(example.completion) < 60 for example in examples)
        assert "graph_color" in left_out
    finally:
        environment.close()


def test_a_task_that_teaches_nothing_does_not_go_on_for_ever() -> None:
    environment = Reasoning([Task("rush_hour")])
    try:
        assert make_examples(environment, 8, seed=0) == ([], ["rush_hour"])
    finally:
        environment.close()


@pytest.mark.slow
def test_only_the_answer_is_learned_and_it_becomes_likelier(environment: Reasoning) -> None:
    policy = tiny()
    examples, _ = make_examples(environment, 320, seed=1)
    unseen, _ = make_examples(environment, BATCH, seed=2)
    before = surprise(policy, unseen)
    losses = list(train(policy, examples, 2, 1e-4, seed=0))
    assert len(losses) == step_count(320, 2) == 40
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert surprise(policy, unseen) < 0.7 * before


def test_the_same_seed_gives_the_same_steps(environment: Reasoning) -> None:
    examples, _ = make_examples(environment, 40, seed=1)
    assert list(train(tiny(), examples, 1, 1e-4, 5)) == list(train(tiny(), examples, 1, 1e-4, 5))


def test_an_interrupted_save_leaves_nothing_and_an_existing_directory_stays(tmp_path: Path) -> None:
    class Interrupted(Policy):
        def save(self, path: Path) -> None:
            super().save(path)
            raise KeyboardInterrupt

    policy = tiny()
    policy.__class__ = Interrupted
    with pytest.raises(KeyboardInterrupt):
        save(policy, tmp_path / "warm")
    assert list(tmp_path.iterdir()) == []
    policy.__class__ = Policy
    (tmp_path / "warm").mkdir()
    (tmp_path / "warm" / "mine").write_text("")
    with pytest.raises(WarmupError, match="--out"):
        save(policy, tmp_path / "warm")
    assert [path.name for path in tmp_path.rglob("*")] == ["warm", "mine"]


@pytest.mark.slow
def test_the_command_tells_the_score_before_and_after_and_writes_a_model(tmp_path: Path) -> None:
    asked = ("--examples", "640", "--learning-rate", "5e-4", "--questions", "60", "--samples", "2")
    code, output = run(tmp_path, "warmup", "tiny", "--json", *asked)
    assert code == 0, output
    result = json.loads(output[output.index("{") :])
    assert result["steps"] == 40 and result["left_out"] == []
    assert result["loss_after"] < result["loss_before"]
    assert result["after"]["well_formed"] > result["before"]["well_formed"] + 0.2
    assert result["after"]["sampled"] > result["before"]["sampled"] + 0.1

    warm = tmp_path / "models" / "tiny-warm"
    assert result["out"] == "models/tiny-warm"
    assert [path.name for path in warm.parent.iterdir()] == ["tiny-warm"]
    policy = Policy.load(Settings.of(model=str(warm), cpu_only=True), Reasoning.system_prompt)
    assert policy.tokenizer_hash == tiny().tokenizer_hash and bundled(str(warm)) == "tiny"

    written = {path: path.read_bytes() for path in warm.iterdir()}
    code, output = run(tmp_path, "warmup", "tiny", *asked)
    assert code == 1 and "--out models/tiny-warm" in output and "Traceback" not in output
    assert {path: path.read_bytes() for path in warm.iterdir()} == written


def warm_up(out: Path, tasks: str) -> None:
    warmup("tiny", Settings.of(cpu_only=True, tasks=tasks), out, 16, 1, questions=10, samples=1, as_json=False)


@pytest.mark.processes
def test_the_command_says_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warm_up(tmp_path / "new" / "warm", "gcd,rush_hour")
    output = capsys.readouterr().out
    assert f"rl-swarm up --model {tmp_path}/new/warm --tasks gcd,rush_hour" in output
    assert "left out: rush_hour" in output and "→" in output and "well-formed" in output


@pytest.mark.processes
def test_tasks_that_teach_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WarmupError, match=r"rush_hour.*--tasks"):
        warm_up(tmp_path / "warm", "rush_hour")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_stops_it_and_keeps_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, "warmup", "tiny", "--out", "warm", "--examples", "1000000")
    try:
        until(lambda: len(family(process)) > 0)  # the scoring process: it is at work
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=240)
    finally:
        end(process)
    assert process.returncode == 130, output
    assert "Nothing was written" in output and "Traceback" not in output
    assert list(tmp_path.iterdir()) == []
