"""Describes a swarm, signed by its owner, and derives the seeds of its questions.

No node chooses its questions. The seed of a peer's k-th question in a round follows from the manifest. So every peer
can make every question and its answer key again.
"""

import hashlib
import random
import re
import unicodedata
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rl_swarm.protocol.tasks import Task
from rl_swarm.protocol.wire import Id, Name, canonical, digest

# reasoning-gym adds the seed to an index and some tasks feed the sum to numpy, which takes 32 bits.
SEED_BITS = 31
ENVIRONMENT_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
EnvironmentName = Annotated[str, Meta(pattern=rf"^{ENVIRONMENT_NAME.pattern}\Z")]
RoundEnd = Literal["interval", "everyone", "deadline", "lockstep"]
Admission = Literal["open", "invited"]
FORMAT = 2  # of the documents of a swarm: names and meaning of their fields
MAX_DRAWS = 1000  # for a question of a specialist's tasks


class Limits(msgspec.Struct, frozen=True):
    """Bounds what a receiver accepts."""

    file_bytes: Annotated[int, Meta(ge=1, le=4 << 20)] = 4 << 20
    questions: Annotated[int, Meta(ge=1, le=65_536)] = 1024  # per peer, round and stage
    completions: Annotated[int, Meta(ge=1, le=4096)] = 256  # per question
    characters: Annotated[int, Meta(ge=1, le=1 << 20)] = 131_072  # per text


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    peer_id: str = ""  # the owner's; set when the manifest is sealed
    format: Annotated[int, Meta(ge=1, lt=1 << 31)] = FORMAT  # of all documents of the swarm
    name: Name
    created: float
    seed: Annotated[int, Meta(ge=0, le=1 << 62)]
    environment: EnvironmentName
    tasks: Annotated[list[Task], Meta(min_length=1, max_length=256)]
    partial_rewards: bool
    versions: Annotated[dict[Name, Id], Meta(max_length=32)]
    rounds: Annotated[int, Meta(ge=1, lt=1 << 53)]
    stages: Annotated[int, Meta(ge=1, le=64)]
    round_end: RoundEnd
    round_interval: float
    peer_timeout: float
    limits: Limits = Limits()
    admission: Admission = "open"
    # Peers that are asked questions of some tasks only, by the tasks' numbers; not written where there are none.
    specialists: Annotated[dict[Id, list[int]], Meta(max_length=1024)] | msgspec.UnsetType = msgspec.UNSET
    # All peers are asked the same questions; not written where each has its own.
    same_questions: bool | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            version = "rl-swarm 0.1" if self.format < FORMAT else "a newer version of rl-swarm"
            raise ValueError(f"it has format {self.format}, written by {version}; this version reads format {FORMAT}")

    def swarm(self) -> str:
        """Return the id that every message of this swarm carries, so that none can be replayed in another swarm."""
        return digest(canonical(self))[:32]

    def questions_key(self) -> bytes:
        """Return what the questions depend on, and nothing else, so that two runs with one seed ask the same."""
        return canonical([self.seed, self.environment, self.tasks, self.versions])


def swarm_name(text: str) -> str:
    """Make a swarm's name from that of its folder, which may hold any letters: `Mein Läufchen` becomes
    `Mein-Laufchen`."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("._-")[:64] or "run"


def derive_seed(*parts: str | int | bytes) -> int:
    """Derive a seed from its parts, H(part, part, ...): uniform, and independent for different parts."""
    encoded = canonical([part.hex() if isinstance(part, bytes) else part for part in parts])
    return int.from_bytes(hashlib.sha256(encoded).digest()[:8], "big") >> (64 - SEED_BITS)


def question_seed(manifest: Manifest, round: int, peer_id: str, number: int) -> int:
    root = manifest.questions_key()
    if manifest.same_questions is True:
        return derive_seed(root, round, number)
    seed = derive_seed(root, round, peer_id, number)
    specialists = {} if manifest.specialists is msgspec.UNSET else manifest.specialists
    theirs = specialists.get(peer_id, [])
    for draw in range(1, MAX_DRAWS if theirs else 1):
        if task_index(seed, manifest.tasks) in theirs:
            break
        seed = derive_seed(root, round, peer_id, number, draw)
    return seed


def task_index(seed: int, tasks: Sequence[Task]) -> int:
    """Return the index of the task that a question is drawn from."""
    return random.Random(seed).choices(range(len(tasks)), [task.weight for task in tasks])[0]
