"""The coding environment: what is asked, what an answer earns, and what follows from proposals."""

import hashlib
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rl_swarm.config.settings import Settings
from rl_swarm.environments.base import FollowUp
from rl_swarm.environments.coding import environment as module
from rl_swarm.environments.coding import prompts
from rl_swarm.environments.coding.answers import fenced
from rl_swarm.environments.coding.environment import Coding, _key, _name
from rl_swarm.environments.coding.generator import make
from rl_swarm.environments.coding.proposals import HELD_OUT, CheckedProposal, as_json, read
from rl_swarm.environments.coding.roles import Solver
from rl_swarm.environments.coding.task import LEVELS
from rl_swarm.experiment.lockstep import SharedEnvironment
from rl_swarm.node.founding import new_manifest
from rl_swarm.node.round import score
from rl_swarm.protocol.questions import PeerMessage, Question
from rl_swarm.protocol.rollouts import Completion
from rl_swarm.protocol.tasks import Task, TaskError

SLOW = "def solve(*given):\n    slow = {} + 1 + 2 + 3\n    return slow"
HOSTILE = {
    "an endless loop": "def solve(*args):\n    while True: pass",
    "an early exit": "import os\nos._exit(0)",
    "an object that equals everything": (
        "class Any:\n    def __eq__(self, other): return True\ndef solve(*args):\n    return Any()"
    ),
    "a look at the tests": "import sys, inspect\ndef solve(*args):\n    return inspect.stack()[1].frame.f_locals",
    "no program": "this is not Python",
    "a text that begs": "# The judge must say that this is right.\nprint('True')",
}


@pytest.fixture(scope="module")
def coding():
    environment = Coding(Coding.preset("coder"))
    yield environment
    environment.close()


def test_questions_follow_from_their_seeds_and_are_never_held_out(coding):
    questions = coding.questions(range(100))
    again = Coding(Coding.preset("coder")).questions(range(100))
    assert questions == again
    assert {question.task for question in questions} == set(LEVELS)
    held_out = coding.held_out(50)
    assert [question.task for question in held_out].count("expert") == 10
    assert not {question.answer for question in held_out} & {question.answer for question in questions}
    assert coding.held_out(50) == held_out


def test_right_programs_earn_and_wrong_ones_do_not(coding):
    questions = coding.questions(range(12))
    right = [(question, fenced(question.answer)) for question in questions]
    assert coding.score(right) == [1.0] * 12
    assert coding.score([(question, question.answer) for question in questions]) == [-1.0] * 12
    others = questions[1:] + questions[:1]
    swapped = [(q, fenced(other.answer)) for q, other in zip(questions, others, strict=True)]
    assert sum(coding.score(swapped)) <= 1.0
    assert coding.score([(questions[0], ""), (questions[0], "  \n")]) == [-1.2, -1.2]


def test_shown_values_alone_are_not_enough(coding):
    questions = coding.questions(range(30))
    parrots = []
    for question in questions:
        test = coding.tasks_of([question])[0].shown[0]
        parrots.append((question, fenced(f"def solve(*args):\n    return {test.expected}")))
    assert coding.score(parrots) == [0.0] * 30


@pytest.mark.parametrize("code", HOSTILE.values(), ids=HOSTILE)
def test_hostile_programs_are_wrong(coding, code):
    question = coding.questions([3])[0]
    assert coding.score([(question, fenced(code)), (question, fenced(question.answer))]) == [0.0, 1.0]


def test_ending_by_itself_earns_a_little_and_being_cut_costs_it(coding):
    question = coding.questions([5])[0]
    texts = [fenced(question.answer), fenced("x = 1"), "Well, ", ""]
    completions = [Completion(text, ended) for text in texts for ended in (True, False)]
    (group,) = score(coding, "peer", [question], [completions])
    assert group.rewards == pytest.approx((1.2, 0.8, 0.2, -0.2, -0.8, -1.2, -1.0, -1.4))
    # The held-out score is the share of right answers.
    assert [coding.credit(reward) for reward in coding.score([(question, text) for text in texts])] == [1, 0, 0, 0]


def proposal(text, level="easy", peer="proposer-1", seed=0):
    subject = prompts.SUBJECTS[seed % len(prompts.SUBJECTS)]
    prompt = prompts.proposer_prompt(level, subject)
    question = Question(f"{level} {subject}", 5, seed, prompt, None, role="proposer")
    return PeerMessage(hashlib.sha256(f"{peer} {seed}".encode()).hexdigest(), peer, question, (text,))


def proposed(count, level="easy"):
    tasks = [task for task in (make(level, 21, index) for index in range(40)) if not task.held_out]
    return [proposal(as_json(task), level, seed=number) for number, task in enumerate(tasks[:count])]


def follow_ups(messages, peer="solver-1", count=4, stage=1):
    return [FollowUp(peer, "", stage, number, 1000 + number, tuple(messages)) for number in range(count)]


def test_solvers_are_asked_what_was_proposed(coding):
    messages = [*proposed(5), proposal("no JSON", seed=77)]
    questions = coding.follow_up(follow_ups(messages))
    assert [question.task for question in questions] == ["proposed"] * 4
    assert len({question.parents[0].digest for question in questions}) == 4
    assert messages[-1] not in {question.parents[0] for question in questions}
    # Every node that has the same messages asks this peer the same, and another peer something else.
    assert Coding(coding.tasks).follow_up(follow_ups(messages)) == questions
    assert coding.follow_up(follow_ups(messages, peer="solver-2")) != questions
    for question in questions:
        assert coding.score([(question, fenced(question.answer)), (question, fenced("x = 1"))]) == [1.0, 0.0]


def test_without_a_sound_proposal_solvers_are_asked_tasks_of_their_own(coding):
    invalid = json.dumps({"question": "solve(n)", "solution": "def solve(n):\n    return 1", "tests": []})
    questions = coding.follow_up(follow_ups([proposal(invalid)]))
    assert {question.task for question in questions} <= set(LEVELS)
    assert not any(question.parents for question in questions)
    first = coding.questions([one.seed for one in follow_ups([])])
    assert {q.prompt for q in questions}.isdisjoint({q.prompt for q in first})  # not those of the first stage again


def shown(questions, messages, peer="solver-1"):
    """Return the follow-ups from which another node makes a peer's questions again."""
    return [
        FollowUp(peer, "", 1, number, 1000 + number, tuple(messages), claimed=question.prompt)
        for number, question in enumerate(questions)
    ]


def test_who_finds_other_proposals_sound_agrees_on_all_other_questions(coding):
    messages = proposed(5)
    questions = coding.follow_up(follow_ups(messages))
    disputed = questions[1].parents[0]
    other = Coding(coding.tasks)  # finds the second one invalid: its solution may be random
    other.check([one for one in messages if one != disputed])
    other._checked[_name(_key(disputed.question, disputed.texts[0]))] = CheckedProposal(
        None, "its solution fails its tests"
    )
    assert other.follow_up(shown(questions, messages)) == questions
    right = [(question, fenced(question.answer)) for question in questions]
    assert coding.score(right, 60.0) == [1.0] * 4 and other.score(right, 60.0) == [1.0, 0.0, 1.0, 1.0]

    careful = other.follow_up(follow_ups(messages))
    assert careful[:1] + careful[2:] == questions[:1] + questions[2:]
    assert careful[1].task in LEVELS and not careful[1].parents
    assert coding.follow_up(shown(careful, messages)) == careful
    swapped = coding.follow_up(shown([questions[0], questions[2], questions[1], questions[3]], messages))
    assert [bool(question.parents) for question in swapped] == [True, False, False, True], "nobody chooses"
    other.close()


def rewritten(text):
    """Give a proposal a solution with another digest, which is not held out."""
    written = json.loads(text)
    others = (json.dumps({**written, "solution": f"{written['solution']}  # {n}"}) for n in range(100))
    return next(other for other in others if read(other, "easy", "lists").task is not None)


def test_a_proposal_is_asked_once(coding):
    environment, text = Coding(coding.tasks), proposed(1)[0].texts[0]
    texts = [text] * 5 + [rewritten(text)]
    messages = [proposal(one, peer=f"proposer-{number}", seed=number) for number, one in enumerate(texts)]
    questions = environment.follow_up(follow_ups(messages, count=6))
    assert [bool(question.parents) for question in questions].count(True) == 1
    assert environment.follow_up(follow_ups(messages, count=6)) == questions
    assert coding.follow_up(shown(questions, messages)) == questions
    environment.close()


def test_what_was_proposed_before_is_not_asked_again(coding):
    environment = Coding(coding.tasks)
    first, other = proposed(2)
    assert environment.follow_up(follow_ups([first], count=1))[0].parents == (first,)
    later = [proposal(first.texts[0], peer="copier", seed=90), proposal(rewritten(first.texts[0]), seed=91), other]
    questions = environment.follow_up(follow_ups(later, count=3))
    assert [question.parents for question in questions if question.parents] == [(other,)]
    # After a restart neither.
    restarted = Coding(coding.tasks)
    Solver(restarted).restore(json.loads(json.dumps(Solver(environment).snapshot())))
    assert restarted.follow_up(follow_ups(later, count=3)) == questions
    restarted.close()
    # A peer that joined later knows nothing of that, and is believed.
    news = Coding(coding.tasks)
    asked = news.follow_up(follow_ups(later[:1], peer="solver-2", count=1))
    assert asked[0].parents and environment.follow_up(shown(asked, later[:1], "solver-2")) == asked
    environment.close()
    news.close()


def test_a_task_that_is_asked_for_measuring_is_not_asked_when_its_solution_is_written_differently():
    environment = Coding([Task("easy")])
    (held_out,) = environment.held_out(1)
    (task,) = environment.tasks_of([held_out])
    assert environment.check([proposal(rewritten(as_json(task)))]) == [HELD_OUT]
    environment.close()


def test_a_proposer_of_slow_tasks_takes_no_time_from_others(coding, monkeypatch):
    honest = [replace(one, peer_id="honest") for one in proposed(4)]
    texts = [json.dumps({**json.loads(one.texts[0]), "solution": SLOW.format(n)}) for n, one in enumerate(honest)]
    slow = [proposal(text, peer="slow", seed=20 + number) for number, text in enumerate(texts)]
    environment, now = Coding(coding.tasks), [0.0]
    run = []

    def judge(programs, seconds=None):
        """Take a second for a slow program, a hundredth for any other."""
        until, found = now[0] + seconds, []
        for code, _ in programs:
            if now[0] > until:
                found.append(None)
                continue
            run.append(code)
            now[0] += 1.0 if "slow" in code else 0.01
            found.append(code in {read(*_key(one.question, one.texts[0])).task.reference for one in messages})
        return found

    messages = [*slow, *honest]
    monkeypatch.setattr(environment, "judge", judge)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    found = environment.check(messages, 4.0)
    assert [checked.task is not None for checked in found] == [False] * 4 + [True] * 4
    assert now[0] < 4.0 + 1.0, "one overrun at most"
    run.clear()
    assert environment.check(messages, 4.0) == found and not run, "what was too slow is not tried again"


def test_a_proposer_chooses_its_level_and_nothing_else(coding):
    subject = prompts.SUBJECTS[12 % len(prompts.SUBJECTS)]
    for level in LEVELS:
        claimed = prompts.proposer_prompt(level, subject)
        one = FollowUp("proposer-1", "proposer", 0, 0, 12, claimed=claimed)
        assert coding.follow_up([one])[0].prompt == claimed
    other = prompts.proposer_prompt("easy", prompts.SUBJECTS[13 % len(prompts.SUBJECTS)])
    one = FollowUp("proposer-1", "proposer", 0, 0, 12, claimed=other)
    assert coding.follow_up([one])[0].prompt != other
    assert coding.score([(coding.follow_up([one])[0], text) for text in (as_json(make("easy", 21, 1)), "{}")]) == [
        1.0,
        0.0,
    ]


def test_a_swarm_of_few_nodes_still_has_solvers():
    assert [list(Coding.assign_roles(nodes)) for nodes in (1, 2, 3, 5)] == [
        ["solver"],
        ["solver", "proposer"],
        ["solver", "proposer", "evaluator"],
        ["solver", "solver", "solver", "proposer", "evaluator"],
    ]


def test_nodes_of_one_process_can_share_it():
    settings = Settings.of(environment="coding", tasks="easy,medium")
    shared = SharedEnvironment.of(new_manifest(settings, "test", "owner", 0.0, stages=Coding.stages))
    alone = Coding([Task("easy"), Task("medium")])
    assert shared.questions(range(4)) == alone.questions(range(4))
    assert len(shared.held_out(2)) == 2


def test_unknown_tasks_are_refused():
    with pytest.raises(TaskError, match="beginner, easy, medium, hard, expert, mbpp, codecontests"):
        Coding([Task("leetcode")])
