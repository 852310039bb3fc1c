"""Defines the coding environment: solvers write Python, proposers invent tasks, evaluators predict verdicts.

A round has two stages. In the first, solvers answer tasks of the swarm's own sources, and proposers publish new tasks.
In the second, solvers answer the proposals. So a solver trains half on local and half on proposed tasks. A proposer
reads the answers to its proposals from the published rollouts, runs them itself, and moves its level.

An answer is right if its fenced program passes all tests, shown and hidden, in the sandbox.
"""

import hashlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from rl_swarm.environments.base import PEER_SECONDS, Environment, FollowUp, LanguageModel, ModelLoader, Role
from rl_swarm.environments.coding import answers, generator, prompts, proposals, sources
from rl_swarm.environments.coding.grammar import Draw
from rl_swarm.environments.coding.predictions import probabilities
from rl_swarm.environments.coding.roles import SOLVING, Evaluator, Proposer, Solver
from rl_swarm.environments.coding.task import DIGITS, LEVELS, CodingTask, digest_of_words
from rl_swarm.errors import UserError
from rl_swarm.protocol.questions import Question, Statement
from rl_swarm.protocol.tasks import Task, TaskError
from rl_swarm.scoring.sandbox.sandbox import Program, Sandbox, Test
from rl_swarm.settings import Settings

if TYPE_CHECKING:
    from rl_swarm.settings import Settings

log = logging.getLogger(__name__)

SECOND = 1 << 40  # in seeds of the second stage, which differ from those of the first
MAX_DRAWS = 1000  # before giving up on a task that is not held out
MAX_CHECKED = 2048  # cached checks of proposals
MAX_PROPOSED = 8192  # stored digests of proposals
MAX_PROPOSALS = 8  # of one peer in a round

Key: TypeAlias = tuple[str, str, str]  # text, level and subject of a proposal


class Coding(Environment):
    stages: ClassVar[int] = 2
    hears: ClassVar[int] = 8
    hears_from: ClassVar[tuple[str, ...]] = ("proposer",)
    ending: ClassVar[float] = answers.ENDED
    system_prompt: ClassVar[str] = prompts.SOLVER
    up: ClassVar[Mapping[str, object]] = {"model": "auto", "rounds": 40}
    roles: ClassVar[Mapping[str, type[Role]]] = {
        "solver": Solver,
        "proposer": Proposer,
        "evaluator": Evaluator,
    }

    def __init__(self, tasks: Sequence[Task], partial_rewards: bool = False) -> None:
        super().__init__(tasks, partial_rewards)
        for task in tasks:
            if task.name not in LEVELS and task.name not in sources.FORMATS:
                known = ", ".join((*LEVELS, *sources.FORMATS))
                raise TaskError(f"the coding environment has no task {task.name!r}; it has {known}")
        self.data = Path("data")
        self.token: str | None = None
        self.level = LEVELS[1]  # of the tasks that this node proposes
        self.loaded = lru_cache(maxsize=None)(self._load)
        self.drawn = lru_cache(maxsize=8192)(self._make)
        self._checked: OrderedDict[str, proposals.CheckedProposal] = OrderedDict()
        # From digests of proposed solutions and descriptions to the digest of the first statement with them.
        self.proposed: dict[str, str] = {}
        self._measured: set[str] = set()  # digests of the held-out descriptions that measure this node
        self._sandbox: Sandbox | None = None
        self.evaluator: LanguageModel | None = None  # whose prediction replaces running a program

    @classmethod
    def preset(cls, model: str) -> Sequence[Task]:
        return tuple(Task(level) for level in LEVELS)

    @classmethod
    def cast(cls, nodes: int) -> Sequence[str]:
        """Return one proposer and one evaluator, if there are solvers for them."""
        others = ["proposer", "evaluator"][: max(0, nodes - 1)]
        return ["solver"] * (nodes - len(others)) + others

    def settle(self, settings: Settings, load_model: ModelLoader) -> None:
        self.data, self.token = Path(settings.data_path).expanduser(), settings.hf_token
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

    def follow_up(self, cues: Sequence[FollowUp], seconds: float | None = None) -> list[Question]:
        """Ask proposers for tasks, and solvers for answers to proposals.

        A solver's k-th question is the k-th proposal in an order that proposer and solver determine; if that proposal
        is not valid, it is a task of the sources. Nodes may disagree on validity, since a solution may be random. So
        a peer may claim either question, no question depends on the validity of another proposal, and `score` decides
        what answers earn.
        """
        if cues and cues[0].role == "proposer":
            return [self._invitation(cue) for cue in cues]
        if not cues or cues[0].stage != SOLVING:
            return self.questions([cue.seed for cue in cues], seconds)
        tasks = _readable(cues[0].heard)
        ranked = sorted(tasks, key=lambda statement: _rank(cues[0].peer_id, statement.question.seed))
        valid = set() if cues[0].claimed else self._valid(ranked, seconds or 2 * PEER_SECONDS)
        questions = self.questions([cue.seed ^ SECOND for cue in cues], seconds)
        for number, (cue, own) in enumerate(zip(cues, questions, strict=False) if ranked else ()):
            statement = ranked[cue.number % len(ranked)]
            task = tasks[statement]
            chosen = cue.claimed == task.prompt if cue.claimed else statement in valid
            if chosen and task.prompt != own.prompt:
                questions[number] = Question(
                    "proposed", len(self.tasks), cue.seed, task.prompt, task.reference, parents=(statement,)
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

    def well_formed(self, text: str) -> bool:
        return answers.program(text) is not None

    def solutions(self, questions: Sequence[Question]) -> list[str | None]:
        """Return a completion of every question that earns the full reward, None where none is known."""
        tasks = self.tasks_of(questions)
        completions = [answers.fenced(task.reference) if task and task.reference else None for task in tasks]
        asked = [(q, text) for q, text in zip(questions, completions, strict=True) if text is not None]
        rewards = iter(self.score(asked))
        return [text if text is not None and self.credit(next(rewards)) else None for text in completions]

    def _verdicts(self, asked: Sequence[tuple[Question, str]], seconds: float | None) -> list[bool | None]:
        """Return whether programs are right; None where time was up. For an invalid proposal no program is right."""
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
        """Run each program and return whether it passes its tests; None where time was up."""
        if not programs:
            return []
        verdicts = self.sandbox.judge([Program(code, tuple(tests)) for code, tests in programs], seconds)
        return [verdict.right if verdict.judged else None for verdict in verdicts]

    def tasks_of(self, questions: Sequence[Question], seconds: float | None = None) -> list[CodingTask | None]:
        """Recreate the tasks of questions; None for a proposal that this node finds invalid."""
        parents = list(dict.fromkeys(question.parents[0] for question in questions if question.parents))
        checked = dict(zip(parents, self.check(parents, seconds), strict=True))
        return [checked[one.parents[0]].task if one.parents else self.drawn(one.number, one.seed) for one in questions]

    def check(self, statements: Sequence[Statement], seconds: float | None = None) -> list[proposals.CheckedProposal]:
        """Check proposals, each of them once.

        Proposers have equal parts of the time; unused time passes to the next. A proposal that exceeds the part of
        its proposer is refused.
        """
        until = _until(seconds)
        keys = [_key(one.question, one.texts[0]) for one in statements]
        fresh: dict[str, list[Key]] = {}
        for one, key in zip(statements, keys, strict=True):
            if _name(key) not in self._checked:
                fresh.setdefault(one.peer_id, []).append(key)
        for number, theirs in enumerate(fresh.values()):
            self._check(theirs, (until - time.monotonic()) / (len(fresh) - number))
        return [self._checked.get(_name(key), proposals.LATE) for key in keys]

    def _check(self, keys: Sequence[Key], seconds: float | None) -> None:
        """Check new proposals, unless there is no time left or no program may run."""
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

    def _valid(self, statements: Sequence[Statement], seconds: float) -> set[Statement]:
        """Return the statements with a valid and new proposal, which no other one had in this round or before."""
        valid = set()
        for one, checked in zip(statements, self.check(statements, seconds), strict=True):
            if checked.task is not None:
                texts, this = (checked.task.reference, checked.task.description), one.digest[:DIGITS]
                first = {self.proposed.setdefault(digest_of_words(text), this) for text in texts}
                if first == {this}:
                    valid.add(one)
        for oldest in list(self.proposed)[:-MAX_PROPOSED]:
            del self.proposed[oldest]
        return valid

    def _score_proposals(self, answered: Sequence[tuple[Question, str]], seconds: float | None) -> list[float]:
        """Return 1 for a proposal that counts, else 0."""
        keys = [_key(question, text) for question, text in answered]
        self._check(keys, seconds)
        return [float(self._checked.get(_name(key), proposals.LATE).task is not None) for key in keys]

    def _invitation(self, cue: FollowUp) -> Question:
        """Return the question of a proposer. The subject follows from the seed; the proposer chooses the level."""
        subject = prompts.SUBJECTS[cue.seed % len(prompts.SUBJECTS)]
        asked = {prompts.proposer_prompt(level, subject): level for level in LEVELS}
        level = asked.get(cue.claimed, self.level)
        prompt = prompts.proposer_prompt(level, subject)
        return Question(f"{level} {subject}", len(self.tasks), cue.seed, prompt, None, role="proposer")

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
    """Rank a proposal for a peer by its place in the round, so that its text cannot improve its rank."""
    return _digest(f"{peer_id} {seed}")


def _key(question: Question, text: str) -> Key:
    level, _, subject = question.task.partition(" ")
    return text, level, subject


def _name(key: Key) -> str:
    return _digest("\0".join(key))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _readable(heard: Sequence[Statement]) -> dict[Statement, CodingTask]:
    """Return the readable proposals, the first few of each peer, without running any: the same for all nodes."""
    of_peer: Counter[str] = Counter()
    found = {}
    for one in heard:
        if one.question.role == "proposer" and one.texts and of_peer[one.peer_id] < MAX_PROPOSALS:
            of_peer[one.peer_id] += 1
            task = proposals.read(*_key(one.question, one.texts[0])).task
            if task is not None:
                found[one] = task
    return found
