"""Defines the nodes of an attacked swarm: honest ones, gullible ones, and what they share in one process."""

import gzip
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl_swarm.environments.reasoning import Reasoning, extract
from rl_swarm.network.documents import rollouts_key
from rl_swarm.network.exchange import DocumentExchange
from rl_swarm.node.intake import Accepted, Intake
from rl_swarm.node.node import Node
from rl_swarm.protocol.manifest import derive_seed
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.rollouts import Completion, Group, Publication
from rl_swarm.protocol.rounds import State

BARRIER_SECONDS = 300.0  # limit for nodes to wait for each other
# The original scorers, unchanged, on peers' answers: in a process of its own, because they execute answers.
ORIGINAL_SCORER = """
import json, sys, reasoning_gym
tasks, answers = json.load(sys.stdin)
for task, config in tasks:
    data = reasoning_gym.create_dataset(task, seed=1, size=1, **config)
    for answer in answers:
        try:
            data.score_answer(answer, data[0])
        except Exception:
            pass
"""


class MemoryFiles:
    """Keeps a shared folder in memory; every peer may write to it."""

    def __init__(self, data: Mapping[str, bytes] | None = None) -> None:
        self.data = dict(data or {})

    def read(self, path: str, limit: int) -> bytes:
        if path not in self.data:
            raise FileNotFoundError(path)
        return self.data[path][: limit + 1]

    def write(self, path: str, data: bytes) -> None:
        self.data[path] = data

    def append(self, path: str, data: bytes, at: int | None = None) -> None:
        self.data[path] = self.data.get(path, b"") + data

    def names(self, folder: str) -> list[str]:
        return [path.rpartition("/")[2] for path in self.data if path.rpartition("/")[0] == folder]

    def remove(self, folder: str) -> None:
        for path in [path for path in self.data if path.startswith(f"{folder}/")]:
            del self.data[path]

    def move(self, folder: str, target: str) -> None:
        raise NotImplementedError


class SharedScorer(Reasoning):
    """Shares one scoring process among all honest nodes, each in a thread."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lock = threading.Lock()

    def questions(self, seeds: Sequence[int], seconds: float | None = None) -> list[Question]:
        with self.lock:
            return super().questions(seeds, seconds)

    def score(self, answered: Sequence[tuple[Question, str]], seconds: float | None = None) -> list[float]:
        with self.lock:
            return super().score(answered, seconds)


class BarrierExchange(DocumentExchange):
    """Reads rollouts once all honest nodes, and then the attackers, have published."""

    barrier: threading.Barrier
    met: int = -1  # the last round in which all had published

    def wait_for_all(self) -> None:
        self.barrier.wait(BARRIER_SECONDS)
        self.barrier.wait(BARRIER_SECONDS)

    def collect(
        self, round: int, stage: int, nodes: Sequence[str], patience: float = 0.0, in_order: bool = False
    ) -> Iterator[Publication]:
        if self.met != round:
            self.met = round
            self.wait_for_all()
        yield from super().collect(round, stage, nodes, patience, in_order)


class HonestIntake(Intake):
    """Keeps the external groups of the last round."""

    exchange: BarrierExchange
    taken: Sequence[Group] = ()

    def collect(self, state: State, own: Sequence[Group] = ()) -> Accepted:
        accepted = super().collect(state, own)
        self.taken = accepted.chosen
        return accepted


class GullibleIntake(HonestIntake):
    """Believes every peer. A document that it cannot read costs it the round's rollouts, as a crash would."""

    runs_answers = False

    def collect(self, state: State, own: Sequence[Group] = ()) -> Accepted:
        self.exchange.wait_for_all()
        rng = random.Random(derive_seed(self.manifest.seed, "select", self.peer_id, state.round, state.stage))
        nodes = [m.node for peer_id, m in sorted(state.members.items()) if peer_id != self.peer_id]
        try:
            groups = [group for node in nodes for group in self.believed(node, state)]
        except (ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
            self.reject("somebody", RejectReason.UNREADABLE, str(error))
            groups = []
        if self.runs_answers:
            self.run_answers(groups)
        pool = [group for group in groups if group.has_signal]
        self.taken = rng.sample(pool, min(self.settings.learning.external_groups, len(pool)))
        return Accepted(chosen=list(self.taken), scored=groups)

    def believed(self, node: str, state: State) -> list[Group]:
        deadline = time.monotonic() + self.manifest.peer_timeout
        key = rollouts_key(state.round, state.stage, node)
        while True:
            try:
                data = self.exchange.store.read(key, 1 << 30)
                break
            except FileNotFoundError:
                if time.monotonic() >= deadline:
                    return []
                time.sleep(0.05)
        fields = json.loads(gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data)
        return [
            Group(
                fields["peer_id"],
                Question("", 0, 0, answers[0]["prompt"], None),
                tuple(Completion(answer["response"], answer.get("ended", True)) for answer in answers),
                tuple(float(answer["reward"]) for answer in answers),
                external=True,
            )
            for answers in fields["rollouts"].values()
        ]

    def run_answers(self, groups: Sequence[Group]) -> None:
        tasks = [(task.name, task.config) for task in self.manifest.tasks]
        texts = {text for group in groups for c in group.completions if (text := extract(c.text)) is not None}
        asked = json.dumps([tasks, sorted(texts)])
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", ORIGINAL_SCORER]
            subprocess.run(command, input=asked.encode(), cwd=folder, timeout=300, capture_output=True)


class Honest(Node):
    exchange: BarrierExchange
    intake: HonestIntake
    intake_type = HonestIntake
    stream: Any = None  # on a GPU


class Gullible(Honest):
    intake: GullibleIntake
    intake_type = GullibleIntake
