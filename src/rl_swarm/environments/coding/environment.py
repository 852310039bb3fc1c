"""CodeZero: solvers write Python, proposers invent tasks for them, evaluators guess what execution will say.

A round has two stages. In the first, solvers answer tasks of the swarm's own sources, and proposers publish new ones. In the
second, solvers answer what was proposed. So half of what a solver learns from is local and half proposed. What solvers
made of a proposal is in the rollouts that they publish: its proposer reads them, runs them itself, and moves its level.

An answer is right if its fenced program passes all tests, shown and hidden, in the sandbox.
"""

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace

from rl_swarm.environments.base import PEER_SECONDS, Cue, Environment, Question, Role, Statement, TaskError
from rl_swarm.environments.coding import answers, generator, prompts, proposals, sources
from rl_swarm.environments.coding.grammar import Draw
from rl_swarm.environments.coding.predictions import probabilities
from rl_swarm.environments.coding.roles import SOLVING, Evaluator, Proposer, Solver
from rl_swarm.environments.coding.task import LEVELS, CodingTask
from rl_swarm.environments.tasks import Task
from rl_swarm.errors import UserError
from rl_swarm.scoring.sandbox import Program, Sandbox, Test

if TYPE_CHECKING:
    from rl_swarm.config import Settings
    from rl_swarm.learning.policy import Policy

log = logging.getLogger(__name__)

SECOND = 1 << 40  # what sets the seeds of the second stage apart from those of the first
MOST_DRAWS = 1000  # of a task that is not held out
MOST_CHECKED = 2048  # proposals whose check is remembered
MOST_PROPOSALS = 8  # of one peer in a round


class Coding(Environment):
    stages: ClassVar[int] = 2
    hears: ClassVar[int] = 8
    hears_from: ClassVar[tuple[str, ...]] = ("proposer",)
    ending: ClassVar[float] = answers.ENDED
    system_prompt: ClassVar[str] = prompts.SOLVER
    up: ClassVar[Mapping[str, object]] = {"model": "auto", "rounds": 60}
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
        self.level = LEVELS[1]  # at which a proposer of this node proposes
        self.loaded = lru_cache(maxsize=None)(self._load)
        self.made = lru_cache(maxsize=8192)(self._make)
        self._checked: OrderedDict[str, proposals.Checked] = OrderedDict()
        self._sandbox: Sandbox | None = None
        self.guesser: Policy | None = None  # whose guess stands in for running a program

    @classmethod
    def preset(cls, model: str) -> Sequence[Task]:
        return tuple(Task(level) for level in LEVELS)

    @classmethod
    def cast(cls, nodes: int) -> Sequence[str]:
        """One proposer and one evaluator, as soon as there are solvers for them."""
        others = ["proposer", "evaluator"][: max(0, nodes - 1)]
        return ["solver"] * (nodes - len(others)) + others

    def settle(self, settings: "Settings") -> None:
        self.data, self.token = Path(settings.data_path).expanduser(), settings.hf_token
        if settings.guess_with is not None:
            from rl_swarm.learning.policy import Policy

            self.guesser = Policy.load(replace(settings, model=settings.guess_with, lora_rank=0), "")
            log.warning("no program is run here: %s guesses whether they are right", self.guesser.name)
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
                task = self.made(number, -1 - draw)  # seeds of training questions are not negative
                if task is not None and task.held_out and task.description not in seen:
                    seen.add(task.description)
                    found.append(self._asked(task, number, -1 - draw))
                if len(seen) == wanted:
                    break
        return found

    def follow_up(self, cues: Sequence[Cue], seconds: float | None = None) -> list[Question]:
        """Proposers are asked for tasks; solvers are asked what was proposed, or one of their own where nothing was."""
        if cues and cues[0].role == "proposer":
            return [self._invitation(cue) for cue in cues]
        if not cues or cues[0].stage != SOLVING:
            return self.questions([cue.seed for cue in cues], seconds)
        tasks = self.proposed(cues[0].heard, seconds)
        questions = []
        for cue in cues:
            ranked = sorted(tasks, key=lambda said: _rank(cue.peer_id, said.question.seed))
            if not ranked:
                questions.append(self._question(cue.seed ^ SECOND))
                continue
            said = ranked[cue.number % len(ranked)]
            task = tasks[said]
            questions.append(
                Question("proposed", len(self.tasks), cue.seed, task.prompt, task.reference, parents=(said,))
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
        """A completion of every question that earns the full reward, or None where none is known."""
        references = [self.task(question).reference for question in questions]
        completions = [answers.fenced(code) if code else None for code in references]
        asked = [(q, text) for q, text in zip(questions, completions, strict=True) if text is not None]
        rewards = iter(self.score(asked))
        return [text if text is not None and self.credit(next(rewards)) else None for text in completions]

    def _verdicts(self, asked: Sequence[tuple[Question, str]], seconds: float | None) -> list[bool | None]:
        if self.guesser is None:
            return self.judge([(code, self.task(question).tests) for question, code in asked], seconds)
        stated = probabilities(self.guesser, [(question.prompt, code) for question, code in asked])
        return [p > 0.5 for p in stated]

    def judge(
        self, programs: Sequence[tuple[str, Sequence[Test]]], seconds: float | None = None
    ) -> list[bool | None]:
        """Whether each program passes its tests, by running it; None where time was up."""
        if not programs:
            return []
        verdicts = self.sandbox.judge([Program(code, tuple(tests)) for code, tests in programs], seconds)
        return [verdict.right if verdict.judged else None for verdict in verdicts]

    def task(self, question: Question) -> CodingTask:
        """The task of a question, made again."""
        if question.parents:
            parent = question.parents[0]
            task = self.check([parent])[0].task
        else:
            task = self.made(question.number, question.seed)
        if task is None:
            raise TaskError(f"the question {question.seed} has no task")  # never: it was asked
        return task

    def check(self, said: Sequence[Statement], seconds: float | None = None) -> list[proposals.Checked]:
        """What becomes of the proposals of statements; each text is judged once."""
        keys = [(one.texts[0], *_level_and_subject(one.question)) for one in said]
        self._check(keys, seconds)
        return [self._checked.get(_name(key), proposals.LATE) for key in keys]

    def _check(self, keys: Sequence[tuple[str, str, str]], seconds: float | None) -> None:
        fresh = [key for key in dict.fromkeys(keys) if _name(key) not in self._checked]
        found = proposals.check_all(fresh, lambda programs: self.judge(programs, seconds)) if fresh else []
        for key, result in zip(fresh, found, strict=True):
            if result.judged:
                self._checked[_name(key)] = result
        while len(self._checked) > MOST_CHECKED:
            self._checked.popitem(last=False)

    def proposed(
        self, heard: Sequence[Statement], seconds: float | None = None
    ) -> dict[Statement, CodingTask]:
        """The statements that propose something sound."""
        if self.guesser is not None:  # what was not run is not known to be sound
            return {}
        by_peer: dict[str, list[Statement]] = {}
        for one in heard:
            if one.question.role == "proposer" and one.texts:
                by_peer.setdefault(one.peer_id, []).append(one)
        said = [one for theirs in by_peer.values() for one in theirs[:MOST_PROPOSALS]]
        checked = self.check(said, 2 * PEER_SECONDS if seconds is None else seconds)
        return {one: c.task for one, c in zip(said, checked, strict=True) if c.task is not None}

    def _score_proposals(
        self, answered: Sequence[tuple[Question, str]], seconds: float | None
    ) -> list[float]:
        """1 for a proposal that counts."""
        keys = [(text, *_level_and_subject(question)) for question, text in answered]
        self._check(keys, seconds)
        return [float(self._checked.get(_name(key), proposals.LATE).task is not None) for key in keys]

    def _invitation(self, cue: Cue) -> Question:
        """What a proposer is asked. The subject follows from the seed; the level is its own choice."""
        subject = prompts.SUBJECTS[cue.seed % len(prompts.SUBJECTS)]
        asked = {prompts.proposer_prompt(level, subject): level for level in LEVELS}
        level = asked.get(cue.claimed, self.level)
        prompt = prompts.proposer_prompt(level, subject)
        return Question(f"{level} {subject}", len(self.tasks), cue.seed, prompt, None, role="proposer")

    def _question(self, seed: int) -> Question:
        from rl_swarm.manifest import task_of

        number = task_of(seed, self.tasks)
        for draw in range(MOST_DRAWS):
            at = seed if draw == 0 else Draw("again", seed, draw).between(0, 2**62)
            task = self.made(number, at)
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
    """Where a proposal stands for a peer: by its place in the round, so that nobody words one until it is drawn."""
    return hashlib.sha256(f"{peer_id} {seed}".encode()).hexdigest()


def _level_and_subject(question: Question) -> tuple[str, str]:
    level, _, subject = question.task.partition(" ")
    return level, subject


def _name(key: tuple[str, str, str]) -> str:
    return hashlib.sha256("\0".join(key).encode()).hexdigest()
