"""Defines the coding environment: solvers write Python, proposers invent tasks, evaluators predict verdicts.

A round has two stages. In the first, solvers answer tasks of the swarm's own sources, and proposers publish new ones.
In the second, solvers answer the proposals. So half of what a solver learns from is local and half proposed. A proposer
reads the rollouts that solvers publish, runs their programs itself, and moves its level by the result.

An answer is right if its fenced program passes all tests, shown and hidden, in the sandbox.
"""

import hashlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, TypeAlias

from rl_swarm.environments.base import PEER_SECONDS, Environment, FollowUp, LanguageModel, ModelLoader, Role
from rl_swarm.environments.coding import answers, generator, prompts, proposals, sources
from rl_swarm.environments.coding.grammar import Draw
from rl_swarm.environments.coding.predictions import probabilities
from rl_swarm.environments.coding.roles import SOLVING, Evaluator, Proposer, Solver
from rl_swarm.environments.coding.task import DIGITS, LEVELS, CodingTask, digest_of_words
from rl_swarm.environments.settings import TaskSettings
from rl_swarm.errors import UserError
from rl_swarm.protocol.questions import PeerMessage, Question
from rl_swarm.protocol.tasks import Task, TaskError
from rl_swarm.scoring.sandbox.sandbox import Program, Sandbox, Test

log = logging.getLogger(__name__)

SECOND = 1 << 40  # sets the seeds of the second stage apart from those of the first
MAX_DRAWS = 1000  # of a task that is not held out
MAX_CHECKED = 2048  # proposals whose check is remembered
MAX_PROPOSED = 8192  # digests of what was proposed, remembered
MAX_PROPOSALS = 8  # of one peer in a round

Key: TypeAlias = tuple[str, str, str]  # text, level and subject of a proposal


class Coding(Environment):
    stages: ClassVar[int] = 2
    context_peers: ClassVar[int] = 8
    context_roles: ClassVar[tuple[str, ...]] = ("proposer",)
    ending_bonus: ClassVar[float] = answers.ENDED
    system_prompt: ClassVar[str] = prompts.SOLVER
    defaults: ClassVar[Mapping[str, object]] = {"model": "auto", "rounds": 40}
    roles: ClassVar[Mapping[str, type[Role]]] = {"solver": Solver, "proposer": Proposer, "evaluator": Evaluator}

    def __init__(self, tasks: Sequence[Task], partial_rewards: bool = False) -> None:
        super().__init__(tasks, partial_rewards)
        for task in tasks:
            if task.name not in LEVELS and task.name not in sources.FORMATS:
                known = ", ".join((*LEVELS, *sources.FORMATS))
                raise TaskError(f"the coding environment has no task {task.name!r}; it has {known}")
        self.data = Path("data")
        self.token: str | None = None
        self.level = LEVELS[1]  # of this node's proposals
        self.loaded = lru_cache(maxsize=None)(self._load)
        self.drawn = lru_cache(maxsize=8192)(self._make)
        self._checked: OrderedDict[str, proposals.CheckedProposal] = OrderedDict()
        # Digests of solutions and descriptions that were proposed, to that of the first message with them.
        self.proposed: dict[str, str] = {}
        self._measured: set[str] = set()  # digests of the held-out descriptions that measure this node
        self._sandbox: Sandbox | None = None
        self.evaluator: LanguageModel | None = None  # it predicts verdicts where no program may run

    @classmethod
    def preset(cls, model: str) -> Sequence[Task]:
        return tuple(Task(level) for level in LEVELS)

    @classmethod
    def assign_roles(cls, nodes: int) -> Sequence[str]:
        """Return a proposer and an evaluator, as soon as there are solvers for them."""
        others = ["proposer", "evaluator"][: max(0, nodes - 1)]
        return ["solver"] * (nodes - len(others)) + others

    def configure(self, settings: TaskSettings, hf_token: str | None, load_model: ModelLoader) -> None:
        self.data, self.token = Path(settings.data_path).expanduser(), hf_token
        if settings.evaluator_model is not None:
            self.evaluator = load_model(settings.evaluator_model)
            log.warning("no program is run here: %s predicts whether they are right", self.evaluator.name)
        for number, task in enumerate(self.tasks):
            if task.name in sources.FORMATS:
                self.loaded(number)

    @property
    def sandbox(self) -> Sandbox:
        if self._sandbox is None:
            try:
                self._sandbox = Sandbox()
            except UserError as error:
                raise UserError(f"{error}. Or let a model guess what is right: GUESS_WITH=coder") from error
        return self._sandbox

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()

    def questions(self, seeds: Sequence[int], seconds: float | None = None) -> list[Question]:
        until, found = _until(seconds), list[Question]()
        for seed in seeds:
            if time.monotonic() > until:
                break
            found.append(self._question(seed))
        return found

    def held_out(self, count: int) -> list[Question]:
        found: list[Question] = []
        for number in range(len(self.tasks)):
            wanted = count // len(self.tasks) + (number < count % len(self.tasks))
            seen: set[str] = set()
            for draw in range(100 * wanted):
                task = self.drawn(number, -1 - draw)  # seeds of training questions are not negative
                if task is not None and task.held_out and task.description not in seen:
                    seen.add(task.description)
                    self._measured.add(digest_of_words(task.description))
                    found.append(self._asked(task, number, -1 - draw))
                if len(seen) == wanted:
                    break
        return found

    def follow_up(self, follow_ups: Sequence[FollowUp], seconds: float | None = None) -> list[Question]:
        """Ask proposers for tasks, and solvers what was proposed.

        A solver's k-th question is the k-th proposal in an order that follows from proposer and solver. Where that
        proposal is not valid, it is a task of the sources. Nodes may disagree on what is valid, since a solution may
        throw dice. So a peer is believed which of the two it was asked, and `score` decides what answers earn.
        """
        if follow_ups and follow_ups[0].role == "proposer":
            return [self._invitation(one) for one in follow_ups]
        if not follow_ups or follow_ups[0].stage != SOLVING:
            return self.questions([one.seed for one in follow_ups], seconds)
        first = follow_ups[0]
        tasks = _readable(first.messages)
        ranked = sorted(tasks, key=lambda proposal: _rank(first.peer_id, proposal.question.seed))
        valid = set() if first.claimed else self._valid(ranked, seconds or 2 * PEER_SECONDS)
        questions = self.questions([one.seed ^ SECOND for one in follow_ups], seconds)
        for number, (one, own) in enumerate(zip(follow_ups, questions, strict=False) if ranked else ()):
            proposal = ranked[one.number % len(ranked)]
            task = tasks[proposal]
            chosen = one.claimed == task.prompt if one.claimed else proposal in valid
            if chosen and task.prompt != own.prompt:
                questions[number] = Question(
                    "proposed", len(self.tasks), one.seed, task.prompt, task.reference, parents=(proposal,)
                )
        return questions

    def score(self, answered: Sequence[tuple[Question, str]], seconds: float | None = None) -> list[float]:
        if answered and answered[0][0].role == "proposer":
            return self._score_proposals(answered, seconds)
        codes = [answers.program(text) if answers.is_text(text) else None for _, text in answered]
        asked = [(q, code) for (q, _), code in zip(answered, codes, strict=True) if code is not None]
        verdicts = iter(self._verdicts(asked, seconds))
        rewards: list[float] = []
        for (_, text), code in zip(answered, codes, strict=True):
            right = False if code is None else next(verdicts)
            if right is None:
                break
            rewards.append(answers.earned(text, right))
        return rewards

    def credit(self, reward: float) -> float:
        return 1.0 if reward >= answers.RIGHT - answers.ENDED else 0.0

    def tests(self, question: Question) -> list[tuple[str, str]]:
        if question.role:
            return []
        if question.parents:  # a proposal: it is read, and not checked
            proposal = question.parents[0]
            task = proposals.read(*_key(proposal.question, proposal.texts[0])).task
        else:
            task = self.drawn(question.number, question.seed)
        return [(test.call, test.expected) for test in task.tests] if task else []

    def well_formed(self, text: str) -> bool:
        return answers.program(text) is not None

    def solutions(self, questions: Sequence[Question]) -> list[str | None]:
        """Return a completion of every question that earns the full reward, or None where none is known."""
        tasks = self.tasks_of(questions)
        completions = [answers.fenced(task.reference) if task and task.reference else None for task in tasks]
        asked = [(q, text) for q, text in zip(questions, completions, strict=True) if text is not None]
        rewards = iter(self.score(asked))
        return [text if text is not None and self.credit(next(rewards)) else None for text in completions]

    def _verdicts(self, asked: Sequence[tuple[Question, str]], seconds: float | None) -> list[bool | None]:
        """Tell whether programs are right; None where time was up. To an invalid proposal no program is."""
        tasks = self.tasks_of([question for question, _ in asked], seconds)
        known = [(*pair, task) for pair, task in zip(asked, tasks, strict=True) if task is not None]
        found: list[bool | None]
        if self.evaluator is None:
            found = self.judge([(code, task.tests) for _, code, task in known], seconds)
        else:
            stated = probabilities(self.evaluator, [(question.prompt, code) for question, code, _ in known], seconds)
            found = [*(p > 0.5 for p in stated), *[None] * (len(known) - len(stated))]
        verdicts = iter(found)
        return [False if task is None else next(verdicts) for task in tasks]

    def judge(self, programs: Sequence[tuple[str, Sequence[Test]]], seconds: float | None = None) -> list[bool | None]:
        """Run each program and tell whether it passes its tests; None where time was up."""
        if not programs:
            return []
        verdicts = self.sandbox.judge([Program(code, tuple(tests)) for code, tests in programs], seconds)
        return [verdict.right if verdict.judged else None for verdict in verdicts]

    def tasks_of(self, questions: Sequence[Question], seconds: float | None = None) -> list[CodingTask | None]:
        """Make the tasks of questions again; None for a proposal that this node does not find valid."""
        parents = list(dict.fromkeys(question.parents[0] for question in questions if question.parents))
        checked = dict(zip(parents, self.check(parents, seconds), strict=True))
        return [checked[one.parents[0]].task if one.parents else self.drawn(one.number, one.seed) for one in questions]

    def check(self, messages: Sequence[PeerMessage], seconds: float | None = None) -> list[proposals.CheckedProposal]:
        """Judge proposals, each once.

        Proposers have equal parts of the time, and what one leaves is for the next. A proposal for which its part is
        not enough is refused.
        """
        until = _until(seconds)
        keys = [_key(one.question, one.texts[0]) for one in messages]
        fresh: dict[str, list[Key]] = {}
        for one, key in zip(messages, keys, strict=True):
            if _name(key) not in self._checked:
                fresh.setdefault(one.peer_id, []).append(key)
        for number, theirs in enumerate(fresh.values()):
            self._check(theirs, (until - time.monotonic()) / (len(fresh) - number))
        return [self._checked.get(_name(key), proposals.LATE) for key in keys]

    def _check(self, keys: Sequence[Key], seconds: float | None) -> None:
        """Judge what was not judged yet: nothing if there is no time, or where no program may run."""
        until = _until(seconds)
        fresh = [key for key in dict.fromkeys(keys) if _name(key) not in self._checked]
        if not fresh or self.evaluator is not None or time.monotonic() > until:
            return
        found = proposals.check(fresh, lambda programs: self.judge(programs, until - time.monotonic()))
        for key, result in zip(fresh, found, strict=True):
            measured = result.task is not None and digest_of_words(result.task.description) in self._measured
            self._checked[_name(key)] = proposals.HELD_OUT if measured else result
        while len(self._checked) > MAX_CHECKED:
            self._checked.popitem(last=False)

    def _valid(self, messages: Sequence[PeerMessage], seconds: float) -> set[PeerMessage]:
        """Return the messages that propose something valid and new, in this round and before."""
        valid = set()
        for one, checked in zip(messages, self.check(messages, seconds), strict=True):
            if checked.task is not None:
                texts, this = (checked.task.reference, checked.task.description), one.digest[:DIGITS]
                first = {self.proposed.setdefault(digest_of_words(text), this) for text in texts}
                if first == {this}:
                    valid.add(one)
        for oldest in list(self.proposed)[:-MAX_PROPOSED]:
            del self.proposed[oldest]
        return valid

    def _score_proposals(self, answered: Sequence[tuple[Question, str]], seconds: float | None) -> list[float]:
        """Reward a proposal that counts with 1."""
        keys = [_key(question, text) for question, text in answered]
        self._check(keys, seconds)
        return [float(self._checked.get(_name(key), proposals.LATE).task is not None) for key in keys]

    def _invitation(self, follow_up: FollowUp) -> Question:
        """Ask a proposer for a task. The subject follows from the seed; the level is the proposer's choice."""
        subject = prompts.SUBJECTS[follow_up.seed % len(prompts.SUBJECTS)]
        asked = {prompts.proposer_prompt(level, subject): level for level in LEVELS}
        level = asked.get(follow_up.claimed, self.level)
        prompt = prompts.proposer_prompt(level, subject)
        return Question(f"{level} {subject}", len(self.tasks), follow_up.seed, prompt, None, role="proposer")

    def _question(self, seed: int) -> Question:
        from rl_swarm.protocol.manifest import task_index

        number = task_index(seed, self.tasks)
        for draw in range(MAX_DRAWS):
            at = seed if draw == 0 else Draw("again", seed, draw).between(0, 2**62)
            task = self.drawn(number, at)
            if task is not None and not task.held_out:
                return self._asked(task, number, at)
        raise TaskError(f"the task {self.tasks[number].name} has too few different questions")

    def _asked(self, task: CodingTask, number: int, seed: int) -> Question:
        return Question(self.tasks[number].name, number, seed, task.prompt, task.reference or None)

    def _make(self, number: int, seed: int) -> CodingTask | None:
        name = self.tasks[number].name
        if name in LEVELS:
            return generator.make(name, seed, 0)
        found = self.loaded(number)
        return found[Draw(name, seed).below(len(found))]

    def _load(self, number: int) -> list[CodingTask]:
        return sources.load(self.tasks[number], self.data, self.token)


def _until(seconds: float | None) -> float:
    return float("inf") if seconds is None else time.monotonic() + seconds


def _rank(peer_id: str, seed: int) -> str:
    """Rank a proposal for a peer by its place in the round, so that rewording it does not help."""
    return _digest(f"{peer_id} {seed}")


def _key(question: Question, text: str) -> Key:
    level, _, subject = question.task.partition(" ")
    return text, level, subject


def _name(key: Key) -> str:
    return _digest("\0".join(key))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _readable(messages: Sequence[PeerMessage]) -> dict[PeerMessage, CodingTask]:
    """Read the first few proposals of each peer without running them, so that all nodes read the same."""
    of_peer: Counter[str] = Counter()
    found = {}
    for one in messages:
        if one.question.role == "proposer" and one.texts and of_peer[one.peer_id] < MAX_PROPOSALS:
            of_peer[one.peer_id] += 1
            task = proposals.read(*_key(one.question, one.texts[0])).task
            if task is not None:
                found[one] = task
    return found
