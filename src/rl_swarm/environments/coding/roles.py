"""Defines the three roles: solvers learn, proposers and evaluators have models that do not change."""

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
from rl_swarm.protocol.questions import Question, Statement
from rl_swarm.protocol.rollouts import Completion
from rl_swarm.protocol.rounds import State

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
    """Answers, publishes, collects and learns as any node does; answers proposals in the second stage."""

    settings: ClassVar[Mapping[str, object]] = {"model": "auto"}

    def __init__(self, environment: "Coding") -> None:
        super().__init__(environment)
        self.coding = environment

    def kept(self) -> dict[str, object]:
        return {"proposed": dict(list(self.coding.proposed.items())[-MAX_KEPT:])}

    def restore(self, kept: Mapping[str, object]) -> None:
        self.coding.proposed = dict(cast("Mapping[str, str]", kept.get("proposed", {})))


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

    def turn(self, node: RoleContext, state: State) -> Iterator[ModelRequest]:
        if state.stage != PROPOSING:
            yield from node.show([], state)
            return
        with node.watch("collect"):
            results = self._results(node, state)
        if results:
            self.difficulty = self.difficulty.after(fmean(results))
        self.coding.level = self.difficulty.name
        questions = node.questions(state)
        drafts = yield from node.answer(questions, state, count=CANDIDATES)
        with node.watch("score"):
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
        groups = node.scored(questions, [[Completion(text, ended=True)] for text, _ in chosen])
        yield from node.show(groups, state, **metrics)

    def _results(self, node: RoleContext, state: State) -> list[float]:
        """Run the answers to this node's proposals of the last round; return the share of right ones for each."""
        if state.round == 0:
            return []
        mine = [
            (said.question, text)
            for said in node.heard(state.round - 1, SOLVING, role="")
            if said.question.parents and said.question.parents[0].peer_id == node.peer_id
            for text in said.texts
        ]
        shares: dict[str, list[float]] = {}
        for (question, _), reward in zip(mine, self.coding.score(mine, 2 * PEER_SECONDS), strict=False):
            shares.setdefault(question.parents[0].digest, []).append(self.coding.credit(reward))
        return [fmean(share) for share in shares.values()]

    def _choose(self, question: Question, drafts: list[str]) -> tuple[str, bool]:
        """Return the first draft that counts and is new, else a generated task; and whether the model wrote it."""
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
        """Return whether this node has proposed nothing with the same solution before."""
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
            "solvers "
            f"got {metrics.get('solved', 0):.0%} of the last right, worth {metrics.get('proposer_reward', 0):.2f} to a "
            "proposer"
        )

    def kept(self) -> dict[str, object]:
        now = self.difficulty
        return {
            "level": now.level,
            "successes": list(now.successes),
            "iterations": now.iterations,
            "written": self.written,
            "known": list(self.known),
        }

    def restore(self, kept: Mapping[str, object]) -> None:
        if kept:
            successes = tuple(float(value) for value in cast("list[float]", kept["successes"]))
            level, iterations = cast(int, kept["level"]), cast(int, kept["iterations"])
            self.difficulty = Difficulty(min(max(level, 0), len(LEVELS) - 1), successes, iterations)
            self.written = list(cast("list[int]", kept["written"]))
            self.known = dict.fromkeys(cast("list[str]", kept.get("known", [])))


class Evaluator(Role):
    """Predicts whether solvers' programs are right, then runs them, and reports how good its predictions are."""

    learns: ClassVar[bool] = False
    system_prompt: ClassVar[str | None] = ""
    settings: ClassVar[Mapping[str, object]] = {"model": "auto"}

    def __init__(self, environment: "Coding") -> None:
        super().__init__(environment)
        self.coding = environment
        self.guesses: deque[tuple[float, bool]] = deque(maxlen=MAX_GUESSES)

    def turn(self, node: RoleContext, state: State) -> Iterator[ModelRequest]:
        before = (state.round, PROPOSING) if state.stage else (state.round - 1, SOLVING)
        with node.watch("collect"):
            pairs = self._programs(node.heard(*before, role="") if min(before) >= 0 else [])
            tasks = self.coding.tasks_of([question for question, _ in pairs], PEER_SECONDS)
            pairs = [pair for pair, task in zip(pairs, tasks, strict=True) if task is not None]
        with node.watch("generate"):
            stated = probabilities(node.model, [(q.prompt, code) for q, code in pairs], 2 * PEER_SECONDS)
        with node.watch("score"):
            rewards = self.coding.score([(q, answers.fenced(code)) for q, code in pairs], 2 * PEER_SECONDS)
        for p, reward in zip(stated, rewards, strict=False):  # as many as were run in time
            self.guesses.append((p, bool(self.coding.credit(reward))))
        metrics = quality(list(self.guesses)).metrics() if self.guesses else {}
        yield from node.show([], state, **metrics)

    @classmethod
    def summary(cls, metrics: Mapping[str, float]) -> str:
        told = {"balanced": 0.5, "right_share": 0.0, "calibration": 0.0, "disagreement": 0.0, **metrics}
        return (
            f"guessed {told['balanced']:.0%} right, balanced over right and wrong programs (always the same guess: "
            "50%); "
            f"disagreed with execution on {told['disagreement']:.0%}; its probabilities are off by "
            f"{told['calibration']:.2f}"
        )

    def _programs(self, heard: list[Statement]) -> list[tuple[Question, str]]:
        """Return different programs of solvers, alternating between peers, and between the questions of each."""
        by_peer: dict[str, list[list[tuple[Question, str]]]] = {}
        for said in heard:
            by_peer.setdefault(said.peer_id, []).append([(said.question, text) for text in said.texts])
        found: dict[tuple[str, str], tuple[Question, str]] = {}
        for question, text in _in_turn([_in_turn(theirs) for theirs in by_peer.values()]):
            code = answers.program(text) if answers.is_text(text) else None
            if code is not None and len(found) < MAX_ANSWERS:
                found.setdefault((question.prompt, code), (question, code.rstrip("\n")))
        return list(found.values())


def _in_turn(rows: Sequence[Sequence[T]]) -> list[T]:
    """Interleave rows: the first of each row, then the second of each, and so on."""
    return [one for column in zip_longest(*rows) for one in column if one is not None]
