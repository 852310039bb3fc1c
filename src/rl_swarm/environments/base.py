"""Defines an environment: questions from seeds, rewards for answers, stages, and the roles that play them.

Every peer can make all of this again: a question follows from its seed and from the messages of the earlier stages of
its round. docs/environments.md builds an environment.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from rl_swarm.environments.settings import TaskSettings
from rl_swarm.protocol.questions import PeerMessage, Question
from rl_swarm.protocol.rollouts import Completion, Group
from rl_swarm.protocol.tasks import Task, TaskError
from rl_swarm.telemetry.journal import Stopwatch

__all__ = [
    "Environment",
    "FollowUp",
    "PeerMessage",
    "Question",
    "Role",
    "RoleContext",
    "Task",
    "TaskError",
    "draw",
    "quoted",
]

ModelLoader = Callable[[str], "LanguageModel"]
PEER_SECONDS = 5.0  # for making the questions of one peer's rollouts, and as many for scoring them
# Characters that could close a block, begin one, or spell a control token of some tokenizer.
_TAMED = str.maketrans({"<": "‹", ">": "›", "[": "(", "]": ")", "{": "(", "}": ")", "|": "¦", '"': "'"})


@dataclass(frozen=True)
class FollowUp:
    """Holds what a follow-up question is made from: its place, its seed, and the messages of context peers."""

    peer_id: str
    role: str
    stage: int
    number: int  # of the question: 0 for the author's first in this stage
    seed: int
    messages: tuple[PeerMessage, ...] = ()  # of all earlier stages of the round
    claimed: str = ""  # the prompt that another peer shows; empty where the question is the node's own


class LanguageModel(Protocol):
    """Offers environments and roles the part of a model that they may use."""

    @property
    def name(self) -> str: ...

    def word_probability(
        self, prompts: Sequence[str], word: str, other: str, seconds: float | None = None
    ) -> list[float]:
        """Return how probable `word` is as the next word of each prompt, against `other`."""
        ...


class ModelRequest(Protocol):
    """Asks for work with the node's model, by itself or for several nodes at once."""

    def run(self) -> None: ...


class RoleContext(Protocol):
    """Offers a role what it may do in one stage of a round."""

    round: int
    stage: int
    peer_id: str
    watch: Stopwatch  # times the parts of the stage

    @property
    def model(self) -> LanguageModel: ...

    def questions(self, count: int | None = None) -> list[Question]:
        """Return the questions of this node in the stage."""
        ...

    def sample(
        self, questions: Sequence[Question], count: int | None = None, greedy: bool = False
    ) -> Generator[ModelRequest, None, list[Group]]:
        """Sample `count` answers to each question with the model, and score them."""
        ...

    def score(self, questions: Sequence[Question], completions: Sequence[Sequence[Completion]]) -> list[Group]:
        """Score completions that this node publishes, also where no model wrote them."""
        ...

    def peer_messages(self, round: int, stage: int, role: str | None = None) -> list[PeerMessage]:
        """Return what other peers published in a stage that has ended; `""` is the ordinary role."""
        ...

    def train(self) -> Iterator[ModelRequest]:
        """Play the stage as the ordinary role does: ask, sample, score, publish, collect, train, report."""
        ...

    def publish(self, groups: Sequence[Group], **figures: float) -> Iterator[ModelRequest]:
        """Publish the groups, report and log the figures; train nothing."""
        ...


class Role:
    """Plays the stages of a node. This one is the ordinary role, which samples, publishes, collects and trains.

    A node has one role object for as long as it runs. Other roles override `play_stage`.
    """

    learns: ClassVar[bool] = True  # whether its model is trained, measured on held-out questions, and saved
    system_prompt: ClassVar[str | None] = None  # the environment's, if None
    settings: ClassVar[Mapping[str, object]] = {}  # that belong to it, where the user leaves the defaults

    def __init__(self, environment: "Environment") -> None:
        self.environment = environment

    def play_stage(self, context: RoleContext) -> Iterator[ModelRequest]:
        """Play one stage and yield requests to the model. Every stage ends with `context.train` or `publish`."""
        return context.train()

    @classmethod
    def summary(cls, metrics: Mapping[str, float]) -> str:
        """Put the last metrics of a node in this role into a sentence, for the user who started it."""
        return ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in metrics.items())

    def snapshot(self) -> dict[str, object]:
        """Return what outlives a restart, as a small JSON object."""
        return {}

    def restore(self, snapshot: Mapping[str, object]) -> None:
        """Take back what `snapshot` returned."""


class Environment:
    """Makes questions and scores answers.

    `seconds` is for the rollouts of a peer. They are handled apart from the node's own, for at most about that long,
    and only the first questions or rewards come back where that is not enough.
    """

    stages: ClassVar[int] = 1  # of a round; every node publishes in each
    context_peers: ClassVar[int] = 0  # peers whose earlier stages a follow-up question may be made from
    context_roles: ClassVar[tuple[str, ...]] = ()  # the roles of those peers; empty for any
    shared: ClassVar[bool] = False  # whether all peers are asked the same questions, to judge each other's answers
    ending_bonus: ClassVar[float] = 0.0  # an ordinary answer earns it for ending by itself, and loses it when cut
    system_prompt: ClassVar[str] = ""
    roles: ClassVar[Mapping[str, type[Role]]] = {"worker": Role}  # by name; the first is the ordinary one

    defaults: ClassVar[Mapping[str, object]] = {}  # settings that `rl-swarm up` begins with in a swarm of this kind

    def __init__(self, tasks: Sequence[Task], partial_rewards: bool = False) -> None:
        self.tasks, self.partial_rewards = tasks, partial_rewards

    @classmethod
    def preset(cls, model: str) -> Sequence[Task]:
        """Return the tasks of a swarm whose founder names none (`tasks: auto`), for a model."""
        return (Task(cls.__name__),)

    @classmethod
    def assign_roles(cls, nodes: int) -> Sequence[str]:
        """Return the roles of the nodes that `rl-swarm up` starts."""
        return [next(iter(cls.roles))] * nodes

    @classmethod
    def versions(cls) -> dict[str, str]:
        """Return the versions of the packages on which the questions depend."""
        return {}

    def configure(self, settings: TaskSettings, hf_token: str | None, load_model: ModelLoader) -> None:
        """Take the settings of this node alone, such as where its files are. Called once, before all else.

        `load_model` loads another model by its name, with this node's settings.
        """

    def questions(self, seeds: Sequence[int], seconds: float | None = None) -> list[Question]:
        """Make the training question of every seed; never one of the held-out set.

        They are for the first stage. An environment returns none where the ordinary role has nothing to do there.
        """
        return []

    def follow_up(self, follow_ups: Sequence[FollowUp], seconds: float | None = None) -> list[Question]:
        """Make the questions of a later stage or another role, with the messages that they answer to as parents.

        A receiver makes each question again, so it depends on its `FollowUp` alone.
        """
        return self.questions([one.seed for one in follow_ups], seconds)

    def held_out(self, count: int) -> list[Question]:
        """Return a fixed set of questions that `questions` never returns, or none where there is no such set."""
        return []

    def score(self, answered: Sequence[tuple[Question, str]], seconds: float | None = None) -> list[float]:
        """Return a reward for every question and completion."""
        raise NotImplementedError

    def credit(self, reward: float) -> float:
        """Return what a reward of `score` counts in the held-out score, which should be a share of right answers."""
        return reward

    def ending_reward(self, question: Question, ended: bool) -> float:
        """Return what an own answer earns for its end. A peer's word is not taken for it."""
        if question.role:
            return 0.0
        return self.ending_bonus if ended else -self.ending_bonus

    def tests(self, question: Question) -> list[tuple[str, str]]:
        """Return the tests of a program that answers the question, each a call and its value; nothing is run."""
        return []

    def well_formed(self, text: str) -> bool:
        """Tell whether a completion has the form of an answer, right or wrong."""
        return True

    def close(self) -> None:
        """End the processes that the environment has started."""


def draw(seed: int, messages: Sequence[PeerMessage], count: int) -> list[PeerMessage]:
    """Draw `count` of the messages; all peers that have the same messages draw the same."""
    return sorted(messages, key=lambda one: (one.draw_key(seed), one.peer_id))[:count]


def quoted(text: str, limit: int) -> str:
    """Quote a stranger's text in one line of at most `limit` characters.

    It cannot end its quotation, begin another part of the prompt, or spell a control token.
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split()).translate(_TAMED)
    return f'"{line[:limit]}{"…" if len(line) > limit else ""}"'
