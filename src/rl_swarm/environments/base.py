"""Defines what an environment is: questions from seeds, rewards for answers, stages, and the roles that play them.

Everything here can be done again by everybody: a question follows from its seed and from what was said in the
earlier stages of its round. docs/environments.md builds one.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from rl_swarm.environments.settings import TaskSettings
from rl_swarm.protocol.questions import Question, Statement
from rl_swarm.protocol.rollouts import Completion, Group
from rl_swarm.protocol.rounds import State
from rl_swarm.protocol.tasks import Task, TaskError
from rl_swarm.telemetry.journal import Stopwatch

__all__ = [
    "Environment",
    "FollowUp",
    "Question",
    "Role",
    "RoleContext",
    "Statement",
    "Task",
    "TaskError",
    "draw",
    "quoted",
]

ModelLoader = Callable[[str], "LanguageModel"]
PEER_SECONDS = 5.0  # that a node spends on making, and again on scoring, the rollouts of one peer
# What could close a block, begin one, or spell a control token of some tokenizer.
_TAMED = str.maketrans({"<": "‹", ">": "›", "[": "(", "]": ")", "{": "(", "}": ")", "|": "¦", '"': "'"})


@dataclass(frozen=True)
class FollowUp:
    """What a follow-up question is made from: its place, its seed, and what its author has heard."""

    peer_id: str
    role: str
    stage: int
    number: int  # of the question: 0 for the author's first in this stage
    seed: int
    heard: tuple[Statement, ...] = ()  # of all earlier stages of the round
    claimed: str = ""  # the prompt that another peer shows; empty where the question is the node's own


class LanguageModel(Protocol):
    """The part of a model that environments and roles may use."""

    @property
    def name(self) -> str: ...

    def word_probability(
        self, prompts: Sequence[str], word: str, other: str, seconds: float | None = None
    ) -> list[float]:
        """Return how probable `word` is as the next word of each prompt, against `other`."""
        ...


class ModelRequest(Protocol):
    """Something that is to be done with the node's model, by itself or for several nodes at once."""

    def run(self) -> None: ...


class RoleContext(Protocol):
    """What a role may do in a stage."""

    watch: Stopwatch  # times the parts of the stage

    @property
    def peer_id(self) -> str: ...

    @property
    def model(self) -> LanguageModel: ...

    def questions(self, state: State, count: int | None = None) -> list[Question]:
        """Return the questions of this node in the stage."""
        ...

    def answer(
        self,
        questions: Sequence[Question],
        state: State,
        start: int = 0,
        count: int | None = None,
        greedy: bool = False,
    ) -> Generator[ModelRequest, None, list[Group]]:
        """Sample answers to the questions and score them."""
        ...

    def scored(self, questions: Sequence[Question], completions: Sequence[Sequence[Completion]]) -> list[Group]:
        """Score completions, whoever wrote them."""
        ...

    def heard(self, round: int, stage: int, role: str | None = None) -> list[Statement]:
        """Return what other peers published in a stage that has ended."""
        ...

    def turn(self, state: State) -> Iterator[ModelRequest]:
        """Play the stage as the ordinary role does."""
        ...

    def show(self, groups: Sequence[Group], state: State, **metrics: float) -> Iterator[ModelRequest]:
        """Publish the groups, report, and learn nothing."""
        ...


class Role:
    """How a node plays a stage. This one, the ordinary, answers, publishes, collects, learns and reports.

    A node has one role object for as long as it runs. Others override `turn`, with what `RoleContext` offers:
    `questions`,
    `answer`, `heard`, and at the end either `turn` or `show`.
    """

    learns: ClassVar[bool] = True  # whether its model is trained, measured on held-out questions, and saved
    system_prompt: ClassVar[str | None] = None  # the environment's, if None
    settings: ClassVar[Mapping[str, object]] = {}  # that belong to it, where the user leaves the defaults

    def __init__(self, environment: "Environment") -> None:
        self.environment = environment

    def turn(self, node: RoleContext, state: State) -> Iterator[ModelRequest]:
        """One stage. Yields what is to be done with the model; every stage ends with `node.turn` or `node.show`."""
        return node.turn(state)

    @classmethod
    def summary(cls, metrics: Mapping[str, float]) -> str:
        """The last metrics that a node in this role has told, for the person who started it."""
        return ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in metrics.items())

    def kept(self) -> dict[str, object]:
        """What outlives a restart: a small JSON object."""
        return {}

    def restore(self, kept: Mapping[str, object]) -> None:
        """Takes back what `kept` gave."""


class Environment:
    """Tasks and how they are scored.

    `seconds` is for the rollouts of a peer: they are handled apart from the node's own, for at most about that
    long, and only the first questions or rewards come back where that is not enough.
    """

    stages: ClassVar[int] = 1  # of a round; in each everybody publishes
    hears: ClassVar[int] = 0  # peers whose earlier stages a follow-up question may be made from
    hears_from: ClassVar[tuple[str, ...]] = ()  # the roles of those peers; any if there are none here
    shared: ClassVar[bool] = False  # whether all peers are asked the same questions, to judge each other's answers
    ending: ClassVar[float] = 0.0  # what an ordinary answer earns on top by ending by itself, and loses when it was cut
    system_prompt: ClassVar[str] = ""
    roles: ClassVar[Mapping[str, type[Role]]] = {"worker": Role}  # by name; the first is the ordinary one

    up: ClassVar[Mapping[str, object]] = {}  # settings that `rl-swarm up` begins with in a swarm of this kind

    def __init__(self, tasks: Sequence[Task], partial_rewards: bool = False) -> None:
        self.tasks, self.partial_rewards = tasks, partial_rewards

    @classmethod
    def preset(cls, model: str) -> Sequence[Task]:
        """The tasks of a swarm whose founder names none (`tasks: auto`), for a model."""
        return (Task(cls.__name__),)

    @classmethod
    def cast(cls, nodes: int) -> Sequence[str]:
        """The roles of the nodes that `rl-swarm up` starts."""
        return [next(iter(cls.roles))] * nodes

    @classmethod
    def versions(cls) -> dict[str, str]:
        """Of the packages on which the questions depend."""
        return {}

    def settle(self, settings: TaskSettings, hf_token: str | None, load_model: ModelLoader) -> None:
        """Takes what only concerns this node: where its files are, what it may do. Called once, before all else.
        `load_model` loads another model by its name, with this node's settings."""

    def questions(self, seeds: Sequence[int], seconds: float | None = None) -> list[Question]:
        """The training question of every seed; never one of the held-out set. Asked in the first stage, and none where
        the ordinary role has nothing to do there."""
        return []

    def follow_up(self, cues: Sequence[FollowUp], seconds: float | None = None) -> list[Question]:
        """The question of every cue, in a later stage or of another role; with the statements it answers to as parents.

        A receiver makes it again from what its author has heard, so it depends on the cue alone.
        """
        return self.questions([cue.seed for cue in cues], seconds)

    def held_out(self, count: int) -> list[Question]:
        """A fixed set of questions that `questions` never returns, tasks in turn; none where there is no such set."""
        return []

    def score(self, answered: Sequence[tuple[Question, str]], seconds: float | None = None) -> list[float]:
        """A reward for every (question, completion)."""
        raise NotImplementedError

    def credit(self, reward: float) -> float:
        """What a reward of `score` counts in the held-out score: there it should be a share of right answers."""
        return reward

    def well_formed(self, text: str) -> bool:
        """Whether a completion has the form of an answer, right or wrong."""
        return True

    def close(self) -> None:
        """Ends what the environment has started."""


def draw(seed: int, statements: Sequence[Statement], count: int) -> list[Statement]:
    """So many of the statements, by chance, but the same for everybody who has the same ones."""
    return sorted(statements, key=lambda one: (one.lot(seed), one.peer_id))[:count]


def quoted(text: str, most: int) -> str:
    """A stranger's text as one line between quotation marks: it cannot end its quotation, begin another part of the
    prompt, or spell a control token."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * most]).split()).translate(_TAMED)
    return f'"{line[:most]}{"…" if len(line) > most else ""}"'
