"""Defines the three roles: solvers learn, proposers and evaluators have frozen models."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar, TypeVar, cast

from rl_swarm.environments.base import PEER_SECONDS, ModelRequest, Role, RoleContext
from rl_swarm.environments.coding import answers, generator, proposals
from rl_swarm.environments.coding.difficulty import Difficulty
from rl_swarm.environments.coding.predictions import probabilities, quality
from rl_swarm.environments.coding.task import LEVELS, digest_of_words
from rl_swarm.protocol.questions import PeerMessage, Question
from rl_swarm.protocol.rollouts import Completion

if TYPE_CHECKING:
    from rl_swarm.environments.coding.environment import Coding

T = TypeVar("T")
CANDIDATES = 8  # proposals that a model writes for one that is published
MAX_TRIES = 64  # to draw a task of the generator that counts and is new
MAX_REMEMBERED = 2048  # digests of a proposer's own proposals, in its checkpoint
MAX_KEPT = 1024  # digests of proposals that a solver got, in its checkpoint
MAX_GUESSES = 512  # predictions in an evaluator's metrics
MAX_ANSWERS = 64  # that an evaluator judges in a stage
PROPOSING, SOLVING = 0, 1  # the stages


class Solver(Role):
    """Plays as the ordinary role does, and in the second stage answers proposals."""

    settings: ClassVar[Mapping[str, object]] = {"model": "auto"}

    def __init__(self, environment: "Coding") -> None:
        super().__init__(environment)
        self.coding = environment

    def snapshot(self) -> dict[str, object]:
        return {"proposed": dict(list(self.coding.proposed.items())[-MAX_KEPT:])}

    def restore(self, snapshot: Mapping[str, object]) -> None:
        self.coding.proposed = dict(cast("Mapping[str, str]", snapshot.get("proposed", {})))


class Proposer(Role):
    """Writes tasks, and moves their level with the solvers' success."""

    learns: ClassVar[bool] = False
    system_prompt: ClassVar[str | None] = ""
    settings: ClassVar[Mapping[str, object]] = {"model": "auto", "max_new_tokens": 256}

    def __init__(self, environment: "Coding") -> None:
        super().__init__(environment)
        self.coding = environment
        self.difficulty = Difficulty()
        self.known: dict[str, None] = {}  # digests of its proposals, the oldest first
        self.written = [0, 0]  # proposals by the model, and all

    def play_stage(self, context: RoleContext) -> Iterator[ModelRequest]:
        if context.stage != PROPOSING:
            yield from context.publish([])
            return
        with context.watch("collect"):
            results = self._results(context)
        if results:
            self.difficulty = self.difficulty.after(fmean(results))
        self.coding.level = self.difficulty.name
        questions = context.questions()
        drafts = yield from context.sample(questions, CANDIDATES)
        with context.watch("score"):
            chosen = [self._choose(group.question, [c.text for c in group.completions]) for group in drafts]
        by_model = sum(model for _, model in chosen)
        self.written = [self.written[0] + by_model, self.written[1] + len(chosen)]
        valid = [reward > 0 for group in drafts for reward in group.rewards]
        metrics = {
            "level": float(self.difficulty.level),
            "model_share": by_model / max(len(chosen), 1),
            "model_share_so_far": self.written[0] / max(self.written[1], 1),
            "valid_share": fmean(valid) if valid else 0.0,
        }
        if results:
            metrics |= {"solved": fmean(results), "proposer_reward": fmean(4 * p * (1 - p) for p in results)}
        groups = context.score(questions, [[Completion(text, ended=True)] for text, _ in chosen])
        yield from context.publish(groups, **metrics)

    def _results(self, context: RoleContext) -> list[float]:
        """Run the answers to this node's proposals of the round before; return the share of right ones for each."""
        if context.round == 0:
            return []
        mine = [
            (message.question, text)
            for message in context.peer_messages(context.round - 1, SOLVING, role="")
            if message.question.parents and message.question.parents[0].peer_id == context.peer_id
            for text in message.texts
        ]
        shares: dict[str, list[float]] = {}
        for (question, _), reward in zip(mine, self.coding.score(mine, 2 * PEER_SECONDS), strict=False):
            shares.setdefault(question.parents[0].digest, []).append(self.coding.credit(reward))
        return [fmean(share) for share in shares.values()]

    def _choose(self, question: Question, drafts: list[str]) -> tuple[str, bool]:
        """Choose the first draft that counts and is new, or a generated task; tell whether the model wrote it."""
        for text in drafts:
            if self.coding.score([(question, text)])[0] and self._is_new(text, question):
                return text, True
        level, subject = question.task.split(" ", 1)
        text = ""
        for draw in range(MAX_TRIES):
            task = generator.make(level, question.seed, draw)
            if draw < MAX_TRIES // 2 and task.subject != subject:  # not every level has every subject
                continue
            text = proposals.as_json(task)
            if self.coding.score([(question, text)])[0] and self._is_new(text, question):
                break
        return text, False

    def _is_new(self, text: str, question: Question) -> bool:
        """Tell whether this node has proposed nothing with the same solution before, and remember it."""
        task = proposals.read(text, *question.task.split(" ", 1)).task
        if task is None:
            return False
        name = digest_of_words(task.reference)
        if name in self.known:
            return False
        self.known[name] = None
        while len(self.known) > MAX_REMEMBERED:
            del self.known[next(iter(self.known))]
        return True

    @classmethod
    def summary(cls, metrics: Mapping[str, float]) -> str:
        level = LEVELS[int(metrics.get("level", 0))]
        return (
            f"proposes at the level {level}; a model wrote {metrics.get('model_share_so_far', 0):.0%} of its tasks; "
            f"solvers got {metrics.get('solved', 0):.0%} of the last right, worth "
            f"{metrics.get('proposer_reward', 0):.2f} to a proposer"
        )

    def snapshot(self) -> dict[str, object]:
        now = self.difficulty
        return {
            "level": now.level,
            "successes": list(now.successes),
            "iterations": now.iterations,
            "written": self.written,
            "known": list(self.known),
        }

    def restore(self, snapshot: Mapping[str, object]) -> None:
        if snapshot:
            successes = tuple(float(value) for value in cast("list[float]", snapshot["successes"]))
            level, iterations = cast(int, snapshot["level"]), cast(int, snapshot["iterations"])
            self.difficulty = Difficulty(min(max(level, 0), len(LEVELS) - 1), successes, iterations)
            self.written = list(cast("list[int]", snapshot["written"]))
            self.known = dict.fromkeys(cast("list[str]", snapshot.get("known", [])))


class Evaluator(Role):
    """Predicts whether solvers' programs are right before it runs them, and logs how often it was right."""

    learns: ClassVar[bool] = False
    system_prompt: ClassVar[str | None] = ""
    settings: ClassVar[Mapping[str, object]] = {"model": "auto"}

    def __init__(self, environment: "Coding") -> None:
        super().__init__(environment)
        self.coding = environment
        self.guesses: deque[tuple[float, bool]] = deque(maxlen=MAX_GUESSES)

    def play_stage(self, context: RoleContext) -> Iterator[ModelRequest]:
        before = (context.round, PROPOSING) if context.stage else (context.round - 1, SOLVING)
        with context.watch("collect"):
            pairs = self._programs(context.peer_messages(*before, role="") if min(before) >= 0 else [])
            tasks = self.coding.tasks_of([question for question, _ in pairs], PEER_SECONDS)
            pairs = [pair for pair, task in zip(pairs, tasks, strict=True) if task is not None]
        with context.watch("generate"):
            stated = probabilities(context.model, [(q.prompt, code) for q, code in pairs], 2 * PEER_SECONDS)
        with context.watch("score"):
            rewards = self.coding.score([(q, answers.fenced(code)) for q, code in pairs], 2 * PEER_SECONDS)
        for p, reward in zip(stated, rewards, strict=False):  # as many as were run in time
            self.guesses.append((p, bool(self.coding.credit(reward))))
        metrics = quality(list(self.guesses)).metrics() if self.guesses else {}
        yield from context.publish([], **metrics)

    @classmethod
    def summary(cls, metrics: Mapping[str, float]) -> str:
        told = {"balanced": 0.5, "right_share": 0.0, "calibration": 0.0, "disagreement": 0.0, **metrics}
        return (
            f"guessed {told['balanced']:.0%} right, balanced over right and wrong programs (always the same guess: "
            f"50%); disagreed with execution on {told['disagreement']:.0%}; its probabilities are off by "
            f"{told['calibration']:.2f}"
        )

    def _programs(self, messages: list[PeerMessage]) -> list[tuple[Question, str]]:
        """Return different programs of solvers, peers in turn, and of each peer its questions in turn."""
        by_peer: dict[str, list[list[tuple[Question, str]]]] = {}
        for message in messages:
            by_peer.setdefault(message.peer_id, []).append([(message.question, text) for text in message.texts])
        found: dict[tuple[str, str], tuple[Question, str]] = {}
        for question, text in _in_turn([_in_turn(theirs) for theirs in by_peer.values()]):
            code = answers.program(text) if answers.is_text(text) else None
            if code is not None and len(found) < MAX_ANSWERS:
                found.setdefault((question.prompt, code), (question, code.rstrip("\n")))
        return list(found.values())


def _in_turn(rows: Sequence[Sequence[T]]) -> list[T]:
    """Return the first of each row, then the second of each, and so on."""
    return [one for column in zip_longest(*rows) for one in column if one is not None]
