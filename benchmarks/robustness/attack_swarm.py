"""Plays the swarms of `attacks.py`: rounds of honest nodes in which attackers publish last."""

import gzip
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.robustness.attack_nodes import (
    BARRIER_SECONDS,
    BarrierExchange,
    Gullible,
    Honest,
    MemoryFiles,
    SharedScorer,
)
from benchmarks.robustness.attack_outcome import Outcome, Size, rounds_of
from benchmarks.robustness.attack_types import Attack, Known, identity
from rl_swarm.config.settings import UP_PRESET, Settings
from rl_swarm.environments import task_list
from rl_swarm.environments.base import Role
from rl_swarm.learning.checkpoints import Checkpoints
from rl_swarm.learning.parallel.shared_device import SharedDevice
from rl_swarm.learning.policy import Policy
from rl_swarm.network.documents import rollouts_key
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.layout import path_of
from rl_swarm.network.local import LocalCoordinator, LocalSwarm
from rl_swarm.node.evaluation import SAMPLING_SEED, mean
from rl_swarm.node.founding import new_manifest
from rl_swarm.protocol import rounds
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.rounds import Report, State
from rl_swarm.telemetry.journal import Journal


class Swarm:
    """Plays one swarm from its first round to its last."""

    def __init__(
        self, attack: Attack | None, defended: bool, size: Size, folder: Path, environment: SharedScorer | None = None
    ) -> None:
        self.attack, self.defended, self.size, self.folder = attack, defended, size, folder
        changes = {
            **UP_PRESET,
            "groups_per_update": 0,  # as among strangers
            "negative_scale": 0.0,  # likewise
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
        self.settings = Settings.of(**changes)
        self.manifest = new_manifest(self.settings, "attacked", identity("owner").peer_id, 0.0, stages=1)
        self.environment = environment or SharedScorer(task_list(self.settings.task, self.settings.model.model))
        self.closes = () if environment else (self.environment,)
        self.questions = self.environment.held_out(size.held_out)
        self.files, self.stop = MemoryFiles(), threading.Event()
        self.store = FolderStore(self.files)
        self.swarm = LocalSwarm(self.manifest, min_peers=1)
        self.coordinator = LocalCoordinator(self.swarm, self.stop)
        self.barrier = threading.Barrier(size.honest + 1)
        self.sharing = SharedDevice(size.honest) if size.device == "cuda" else None
        self.nodes = [self.honest_node(identity(f"honest {size.seed} {k}")) for k in range(size.honest)]
        self.liars = list(self.invite_liars())
        self.outcome, self.played = Outcome(), 0

    def honest_node(self, me: Identity) -> Honest:
        exchange = BarrierExchange(
            self.store, self.manifest, me, me.node, self.stop, lambda *why: node.intake.reject(*why), 0.05, 64
        )
        exchange.barrier = self.barrier
        node = (Honest if self.defended else Gullible)(
            name=me.node,
            identity=me,
            settings=self.settings,
            manifest=self.manifest,
            environment=self.environment,
            role=Role(self.environment),
            policy=Policy.load(self.settings, self.environment.system_prompt, shared=self.sharing),
            exchange=exchange,
            coordinator=self.coordinator,
            journal=Journal(self.folder / me.node),
            checkpoints=Checkpoints(self.folder / "checkpoints", me, me.node),
            stop=self.stop,
        )
        node.stream = torch.cuda.Stream() if self.sharing else None
        if isinstance(node, Gullible) and self.attack:
            node.intake.runs_answers = self.attack.aim == "canary"
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
        self.swarm.apply(lambda state, now: rounds.record_presence(state, who.peer_id, who.node, now, invitation))

    def run(self) -> Outcome:
        try:
            self.evaluate()
            with ThreadPoolExecutor(len(self.nodes)) as threads:
                while (state := self.coordinator.current()).phase == "running":
                    self.play(state, threads)
                    self.played += 1
                    ends = (self.size.short_rounds, self.manifest.rounds)
                    if self.played % self.size.every == 0 or self.played in ends:
                        self.evaluate()
        finally:
            for environment in self.closes:
                environment.close()
            for node in self.nodes:
                node.policy.close()
        return self.outcome

    def play(self, state: State, threads: ThreadPoolExecutor) -> None:
        playing = [threads.submit(self.play_one, node, state) for node in self.nodes]
        with suppress(threading.BrokenBarrierError):  # the failed thread raises below
            self.barrier.wait(BARRIER_SECONDS)
        try:
            forged = self.publish_attacks(state)
        except BaseException:
            self.barrier.abort()
            raise
        started = time.monotonic()
        with suppress(threading.BrokenBarrierError):
            self.barrier.wait(BARRIER_SECONDS)
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

    def publish_attacks(self, state: State) -> dict[tuple[str, ...], str]:
        """Let the attackers publish; return texts and paths of what they put in honest nodes' places."""
        forged: dict[tuple[str, ...], str] = {}
        if self.attack is None:
            return forged
        honest = {rollouts_key(state.round, state.stage, node.name) for node in self.nodes}
        known = Known(
            manifest=self.manifest,
            settings=self.settings,
            environment=self.environment,
            store=FolderStore(MemoryFiles(self.files.data)),
            policy=self.nodes[state.round % len(self.nodes)].policy,
            honest=[node.name for node in self.nodes],
            state=state,
            defended=self.defended,
            rng=random.Random(f"{self.size.seed} {state.round}"),
            canary=self.folder / "canary",
        )
        for liar in self.liars:
            for key, data in self.attack.publish(liar, known).items():
                self.store.write(key, data)
                rollouts = readable_rollouts(data)
                self.outcome.published += len(rollouts)
                if key in honest:
                    forged |= dict.fromkeys(rollouts, path_of(key))
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
                        rollouts=self.settings.learning.local_groups,
                    )
                )
        return forged

    def count(self, forged: dict[tuple[str, ...], str]) -> None:
        outcome, liars = self.outcome, {liar.peer_id for liar in self.liars}
        learned = set()
        for node in self.nodes:
            outcome.reasons.update(node.intake.rejected)
            outcome.external += len(node.intake.taken)
            outcome.node_rounds += 1
            outcome.empty += not node.intake.taken
            for group in node.intake.taken:
                texts = (group.question.prompt, *(c.text for c in group.completions))
                if group.peer_id in liars or texts in forged:
                    outcome.hostile += 1
                    learned.add((group.peer_id, texts))
        outcome.learned += len(learned)
        outcome.canary |= (self.folder / "canary").exists()

    def evaluate(self) -> None:
        """Score what honest nodes answer to held-out questions at temperature 1."""
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
            {"round": float(self.played), "held_out": mean(rewards), "phrase": mean(spoilt), "cut": mean(cut)}
        )


def readable_rollouts(data: bytes) -> list[tuple[str, ...]]:
    """Return the prompt and texts of every rollout in a document; nothing where it is none."""
    try:
        rollouts = json.loads(gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data)["rollouts"]
        return [(a[0]["prompt"], *(answer["response"] for answer in a)) for a in rollouts.values()]
    except (ValueError, KeyError, TypeError, RecursionError, IndexError):
        return []
