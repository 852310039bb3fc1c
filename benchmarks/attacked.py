"""Plays swarms for `attacks.py`: honest nodes, gullible nodes, and their rounds with attackers."""

import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from attackers import ATTACKS, Attack, Known, identity

from rl_swarm.environments import task_list
from rl_swarm.environments.reasoning import Reasoning, extract
from rl_swarm.learning.checkpoints import Checkpoints
from rl_swarm.learning.parallel.sharing import Sharing
from rl_swarm.learning.policy import Policy
from rl_swarm.network.folder import FolderExchange, rollouts_path
from rl_swarm.network.local import LocalCoordinator, LocalSwarm
from rl_swarm.node.evaluation import SAMPLING_SEED, mean
from rl_swarm.node.founding import new_manifest
from rl_swarm.node.node import Node
from rl_swarm.node.selection import Selection
from rl_swarm.protocol import rounds
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import derive
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.rollouts import Completion, Group, Publication
from rl_swarm.protocol.rounds import Report, State
from rl_swarm.settings import UP_PRESET, Settings
from rl_swarm.telemetry.journal import Journal

LAST_LOOKS = 3
MEETING_SECONDS = 300.0  # that nodes wait for each other before something must have broken
# The original scorers, as they are, on what peers sent: in a process of its own, because it runs the answers.
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


@dataclass(frozen=True)
class Size:
    """How large a bench is."""

    model: str = "tiny"
    honest: int = 6
    malicious: int = 2
    identities: int = 10  # per machine, at most
    rounds: int = 60
    short_rounds: int = 8  # of attacks that a few rounds show
    long: Sequence[str] = tuple(ATTACKS)  # attacks that get all rounds, unless a few show them
    every: int = 5  # rounds between looks at the held-out questions
    held_out: int = 40
    samples: int = 2
    seed: int = 0
    learning_rate: float = 3e-4  # three times the default, so that fewer rounds show something
    tasks: str = "auto"
    device: str = "cpu"


class MemoryFiles:
    """A shared folder that anybody may write to."""

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


class OneAtATime(Reasoning):
    """One scoring process for all honest nodes, each in a thread."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lock = threading.Lock()

    def questions(self, seeds: Sequence[int], seconds: float | None = None) -> list[Question]:
        with self.lock:
            return super().questions(seeds, seconds)

    def score(self, answered: Sequence[tuple[Question, str]], seconds: float | None = None) -> list[float]:
        with self.lock:
            return super().score(answered, seconds)


class Meeting(FolderExchange):
    """Reads rollouts once everybody has published and the attackers, who speak last, have spoken."""

    barrier: threading.Barrier
    met: int = -1  # the last round in which everybody had spoken

    def meet(self) -> None:
        self.barrier.wait(MEETING_SECONDS)
        self.barrier.wait(MEETING_SECONDS)

    def collect(
        self, round: int, stage: int, nodes: Sequence[str], patience: float = 0.0, in_order: bool = False
    ) -> Iterator[Publication]:
        if self.met != round:
            self.met = round
            self.meet()
        yield from super().collect(round, stage, nodes, patience, in_order)


class Honest(Node):
    exchange: Meeting
    taken: Sequence[Group] = ()  # external groups of the last round
    stream: Any = None  # on a GPU

    def collect(self, state: State, local: Sequence[Group] = ()) -> Selection:
        found = super().collect(state, local)
        self.taken = found.chosen
        return found


class Gullible(Honest):
    """A receiver that believes everything. What it cannot read costs it the round's rollouts, as a crash would."""

    runs_answers = False

    def collect(self, state: State, local: Sequence[Group] = ()) -> Selection:
        self.exchange.meet()
        rng = random.Random(derive(self.manifest.seed, "select", self.identity.peer_id, state.round, state.stage))
        nodes = [m.node for peer_id, m in sorted(state.members.items()) if peer_id != self.identity.peer_id]
        try:
            groups = [group for node in nodes for group in self.believed(node, state)]
        except (ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
            self.reject("somebody", "crash", str(error))
            groups = []
        if self.runs_answers:
            self.run_answers(groups)
        pool = [group for group in groups if group.has_signal]
        chosen = rng.sample(pool, min(self.settings.external, len(pool)))
        self.taken = chosen
        return Selection(chosen=chosen, scored=groups)

    def believed(self, node: str, state: State) -> list[Group]:
        deadline = time.monotonic() + self.manifest.peer_timeout
        path = rollouts_path(state.round, state.stage, node)
        while True:
            try:
                data = self.exchange.files.read(path, 1 << 30)
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


@dataclass
class Outcome:
    """What came of one swarm."""

    curve: list[dict[str, float]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)  # why honest nodes left rollouts out
    published: int = 0  # rollouts of the attack
    learned: int = 0  # of them, that some honest node learned from
    external: int = 0  # groups of others that honest nodes learned from
    hostile: int = 0  # of them, the attack's
    node_rounds: int = 0
    empty: int = 0  # of them, those with nothing from anybody
    waited: float = 0.0  # seconds from the attackers' turn to the end of the round, per round
    canary: bool = False

    @property
    def held_out(self) -> float:
        return self.beside(self)

    def beside(self, other: "Outcome") -> float:
        """The held-out score here when the other swarm ended: the mean of the last looks, since one look is noisy."""
        end = other.curve[-1]["round"]
        found = [point["held_out"] for point in self.curve if 0 < point["round"] <= end]
        return mean(found[-LAST_LOOKS:] or [self.curve[0]["held_out"]])

    def grown(self, name: str) -> float:
        return self.curve[-1][name] - self.curve[0][name]


class Swarm:
    """One swarm from its first round to its last."""

    def __init__(
        self,
        attack: Attack | None,
        defended: bool,
        size: Size,
        folder: Path,
        environment: OneAtATime | None = None,
    ) -> None:
        self.attack, self.defended, self.size, self.folder = attack, defended, size, folder
        changes = {
            **UP_PRESET,
            "step_groups": 0,  # as among strangers
            "external_negatives": 0.0,  # likewise
            "model": size.model,
            "rounds": rounds_of(attack, size),
            "seed": size.seed,
            "device": size.device,
            "tasks": size.tasks,
            "fetch_max_peers": 64,
            "learning_rate": size.learning_rate,
        }
        if attack and attack.tasks:
            changes["tasks"] = list(attack.tasks)
        if attack and attack.peer_timeout:
            changes["peer_timeout"] = attack.peer_timeout
        self.settings = Settings(**changes)
        self.manifest = new_manifest(self.settings, "attacked", identity("owner").peer_id, 0.0, stages=1)
        self.environment = environment or OneAtATime(task_list(self.settings))
        self.closes = () if environment else (self.environment,)
        self.questions = self.environment.held_out(size.held_out)
        self.files, self.stop = MemoryFiles(), threading.Event()
        self.swarm = LocalSwarm(self.manifest, min_peers=1)
        self.coordinator = LocalCoordinator(self.swarm, self.stop)
        self.barrier = threading.Barrier(size.honest + 1)
        self.sharing = Sharing(size.honest) if size.device == "cuda" else None
        self.nodes = [self.honest_node(identity(f"honest {size.seed} {k}")) for k in range(size.honest)]
        self.liars = list(self.invite_liars())
        self.outcome, self.played = Outcome(), 0

    def honest_node(self, me: Identity) -> Honest:
        exchange = Meeting(self.files, self.manifest, me, me.node, self.stop, lambda *why: node.reject(*why), 0.05, 64)
        exchange.barrier = self.barrier
        node = (Honest if self.defended else Gullible)(
            name=me.node,
            identity=me,
            settings=self.settings,
            manifest=self.manifest,
            environment=self.environment,
            policy=Policy.load(self.settings, self.environment.system_prompt, sharing=self.sharing),
            exchange=exchange,
            coordinator=self.coordinator,
            journal=Journal(self.folder / me.node),
            checkpoints=Checkpoints(self.folder / "checkpoints", me, me.node),
            stop=self.stop,
        )
        node.stream = torch.cuda.Stream() if self.sharing else None
        if isinstance(node, Gullible) and self.attack:
            node.runs_answers = self.attack.aim == "canary"
        self.admit(me, "")
        return node

    def invite_liars(self) -> Iterator[Identity]:
        if self.attack is None:
            return
        for machine in range(self.size.malicious):
            for number in range(min(self.attack.identities, self.size.identities)):
                label = f"malicious {self.size.seed} {machine} {number}"
                liar = self.attack.join(label, self.manifest, self.environment)
                if self.attack.member:
                    self.admit(liar, f"{machine:016x}" if self.attack.invited else "")
                yield liar

    def admit(self, who: Identity, invitation: str) -> None:
        self.swarm.apply(lambda state, now: rounds.seen(state, who.peer_id, who.node, now, invitation))

    def run(self) -> Outcome:
        try:
            self.look()
            with ThreadPoolExecutor(len(self.nodes)) as threads:
                while (state := self.coordinator.current()).phase == "running":
                    self.play(state, threads)
                    self.played += 1
                    ends = (self.size.short_rounds, self.manifest.rounds)
                    if self.played % self.size.every == 0 or self.played in ends:
                        self.look()
        finally:
            for environment in self.closes:
                environment.close()
            for node in self.nodes:
                node.policy.close()
        return self.outcome

    def play(self, state: State, threads: ThreadPoolExecutor) -> None:
        playing = [threads.submit(self.play_one, node, state) for node in self.nodes]
        with suppress(threading.BrokenBarrierError):  # whoever broke it says why below
            self.barrier.wait(MEETING_SECONDS)
        try:
            forged = self.speak(state)
        except BaseException:
            self.barrier.abort()
            raise
        started = time.monotonic()
        with suppress(threading.BrokenBarrierError):
            self.barrier.wait(MEETING_SECONDS)
        for future in sorted(playing, key=lambda future: isinstance(future.exception(), threading.BrokenBarrierError)):
            future.result()
        while self.coordinator.current().phase == "running" and self.swarm.state.round == state.round:
            time.sleep(0.01)
        self.outcome.waited += (time.monotonic() - started) / self.manifest.rounds
        self.count(forged)

    def play_one(self, node: Honest, state: State) -> None:
        try:
            with torch.cuda.stream(node.stream):  # nothing where there is none
                node.play(state)
        except BaseException:
            self.barrier.abort()
            raise

    def speak(self, state: State) -> dict[tuple[str, ...], str]:
        """The attackers' turn. Returns what they put in honest nodes' places, texts and paths."""
        forged: dict[tuple[str, ...], str] = {}
        if self.attack is None:
            return forged
        honest = {rollouts_path(state.round, state.stage, node.name) for node in self.nodes}
        known = Known(
            manifest=self.manifest,
            settings=self.settings,
            environment=self.environment,
            files=MemoryFiles(self.files.data),
            policy=self.nodes[state.round % len(self.nodes)].policy,
            honest=[node.name for node in self.nodes],
            state=state,
            defended=self.defended,
            rng=random.Random(f"{self.size.seed} {state.round}"),
            canary=self.folder / "canary",
        )
        for liar in self.liars:
            for path, data in self.attack.publish(liar, known).items():
                self.files.write(path, data)
                rollouts = readable_rollouts(data)
                self.outcome.published += len(rollouts)
                if path in honest:
                    forged |= dict.fromkeys(rollouts, path)
            if self.attack.member and self.attack.reports:
                self.coordinator.submit(
                    Report(
                        peer_id=liar.peer_id,
                        swarm=state.swarm,
                        node=liar.node,
                        round=state.round,
                        stage=state.stage,
                        timestamp=time.time(),
                        reward=1.0,
                        training_reward=1.0,
                        rollouts=self.settings.local,
                    )
                )
        return forged

    def count(self, forged: dict[tuple[str, ...], str]) -> None:
        outcome, liars = self.outcome, {liar.peer_id for liar in self.liars}
        learned = set()
        for node in self.nodes:
            outcome.reasons.update(node.rejected)
            outcome.external += len(node.taken)
            outcome.node_rounds += 1
            outcome.empty += not node.taken
            for group in node.taken:
                texts = (group.question.prompt, *(c.text for c in group.completions))
                if group.peer_id in liars or texts in forged:
                    outcome.hostile += 1
                    learned.add((group.peer_id, texts))
        outcome.learned += len(learned)
        outcome.canary |= (self.folder / "canary").exists()

    def look(self) -> None:
        """What honest nodes answer to held-out questions at temperature 1."""
        phrase = (self.attack or Attack).phrase
        rewards: list[float] = []
        spoilt: list[float] = []
        cut: list[float] = []
        for node in self.nodes:
            sampled = node.policy.sample([q.prompt for q in self.questions], self.size.samples, SAMPLING_SEED)
            flat = [(q, c) for q, found in zip(self.questions, sampled, strict=True) for c in found]
            rewards += self.environment.score([(q, c.text) for q, c in flat])
            spoilt += [float(bool(phrase.search(c.text))) for _, c in flat]
            cut += [float(not c.ended) for _, c in flat]
        self.outcome.curve.append(
            {
                "round": float(self.played),
                "held_out": mean(rewards),
                "phrase": mean(spoilt),
                "cut": mean(cut),
            }
        )


def rounds_of(attack: Attack | None, size: Size) -> int:
    if attack is None:
        return size.rounds
    if attack.rounds is not None:
        return attack.rounds
    long = not attack.short and type(attack) in (ATTACKS[name] for name in size.long)
    return size.rounds if long else size.short_rounds


def readable_rollouts(data: bytes) -> list[tuple[str, ...]]:
    """The prompt and texts of every rollout in a document, if it is one."""
    try:
        rollouts = json.loads(gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data)["rollouts"]
        return [(a[0]["prompt"], *(answer["response"] for answer in a)) for a in rollouts.values()]
    except (ValueError, KeyError, TypeError, RecursionError, IndexError):
        return []
