"""Runs a swarm in one process, its nodes in lock-step, with the same results as separate processes of `rl-swarm up`.

The nodes share one scoring process. Each runs the real `play_round`. Its requests to sample and train go to an engine,
which may serve all nodes together. The folder is an ordinary run directory, so `rl-swarm watch` shows it. Checkpoints
of all nodes are of one round: a run that was stopped, or killed, resumes from the last one and writes what it would
have written.
"""

import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec.structs import replace

from rl_swarm import environments
from rl_swarm.environments.base import Environment, Role
from rl_swarm.learning.checkpoints import CheckpointError, Checkpoints, Place, Saved, restore_optimizer
from rl_swarm.learning.devices import pick_device, use_threads
from rl_swarm.learning.parallel.shared_device import SharedDevice
from rl_swarm.learning.policy import Policy, Published, SampleRequest, TrainRequest
from rl_swarm.network.documents import MANIFEST, PEERS, STATE
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.local import LocalCoordinator, LocalExchange, LocalSwarm
from rl_swarm.network.owner_documents import read_manifest
from rl_swarm.node.founding import new_manifest
from rl_swarm.node.node import Node
from rl_swarm.node.round import question_seeds
from rl_swarm.node.settings import NodeSettings
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.rounds import PeerInfo, State
from rl_swarm.protocol.tasks import Task
from rl_swarm.protocol.wire import MAX_BYTES, Rejected, seal, unseal
from rl_swarm.storage.files import LocalFiles
from rl_swarm.storage.private import swarm_folder
from rl_swarm.storage.shared_log import SharedLog
from rl_swarm.telemetry.journal import METRICS, Journal

STATE_SECONDS = 1.0  # between states written for observers
ScoreKey = tuple[int, int, int, str, tuple[str, ...], str]  # a question, its parents, and an answer


class ModelEngine(Protocol):
    """Samples and trains for the nodes of a swarm."""

    def sample(self, work: Sequence[SampleRequest]) -> None: ...

    def learn(self, work: Sequence[TrainRequest]) -> None: ...


class SequentialEngine:
    """Serves every node by itself, as a process of its own would."""

    def __init__(self, policies: Sequence[Policy]) -> None: ...

    def sample(self, work: Sequence[SampleRequest | TrainRequest]) -> None:
        for one in work:
            one.run()

    learn = sample


def engine_for(policies: Sequence[Policy]) -> ModelEngine:
    """Choose the engine: on a GPU all nodes together."""
    if any(policy.device.type != "cuda" for policy in policies):
        return SequentialEngine(policies)
    from rl_swarm.experiment.batched_engine import BatchedEngine

    return BatchedEngine(policies)


class SharedEnvironment(Environment):
    """Serves all nodes: what is generated and scored for one is known to the others, for a stage."""

    def __init__(self, tasks: Sequence[Task], partial_rewards: bool) -> None:
        super().__init__(tasks, partial_rewards)
        self.made: dict[int, Question] = {}  # by seed
        self.scored: dict[ScoreKey, float] = {}

    @staticmethod
    def of(manifest: Manifest) -> "SharedEnvironment":
        """Derive the shared environment of a swarm's environment."""
        kind = environments.of_swarm(manifest)
        shared: type[SharedEnvironment] = type(f"SharedEnvironment{kind.__name__}", (SharedEnvironment, kind), {})
        return shared(manifest.tasks, manifest.partial_rewards)

    def forget(self) -> None:
        self.made.clear()
        self.scored.clear()

    def questions(self, seeds: Sequence[int], seconds: float | None = None) -> list[Question]:
        new = [seed for seed in dict.fromkeys(seeds) if seed not in self.made]
        found = super().questions(new, seconds) if new else []
        if len(found) < len(new):  # out of time: the node handles that
            return super().questions(seeds, seconds)
        self.made.update(zip(new, found, strict=True))
        return [self.made[seed] for seed in seeds]

    def score(self, answered: Sequence[tuple[Question, str]], seconds: float | None = None) -> list[float]:
        keys = [score_key(question, text) for question, text in answered]
        asked = dict(zip(keys, answered, strict=True))
        new = [key for key in asked if key not in self.scored]
        found = super().score([asked[key] for key in new], seconds) if new else []
        if len(found) < len(new):
            return super().score(answered, seconds)
        self.scored.update(zip(new, found, strict=True))
        return [self.scored[key] for key in keys]


def score_key(question: Question, text: str) -> ScoreKey:
    parents = tuple(parent.digest for parent in question.parents)
    return (question.number, question.seed, question.stage, question.role, parents, text)


@dataclass(frozen=True)
class RunMember:
    identity: Identity
    settings: NodeSettings


class LockstepSwarm:
    """Runs the nodes of one run."""

    def __init__(
        self,
        files: LocalFiles,
        members: Sequence[RunMember],
        owner: Identity,
        user: NodeSettings,
        specialists: Mapping[str, list[int]] | None = None,
        engine: Callable[[Sequence[Policy]], ModelEngine] | None = None,
    ) -> None:
        """Set up the nodes. The seed gives the owner's key to everyone, so checkpoints are signed with the user's
        key."""
        self.files, self.owner, self.settings = files, owner, members[0].settings
        self.store = FolderStore(files)
        self.signer = Identity.load_or_create(Path(user.network.identity_path))
        self.manifest = self._manifest(specialists or {})
        self.private = swarm_folder(user.storage, files.root, self.manifest.swarm())
        use_threads(self.settings.model.threads, pick_device(self.settings.model))
        self.environment = SharedEnvironment.of(self.manifest)
        # The clock stands still: in lock-step no node can be late.
        self.swarm = LocalSwarm(self.manifest, len(members), clock=lambda: 0.0)
        self.evaluation_seconds = 0.0  # seconds spent on held-out questions
        self._written_at = 0.0
        found = self._written(members)
        self.sharing = sharing(members)
        self.nodes = [self._node(member, found[1][member.identity.node] if found else None) for member in members]
        self.engine = (engine or engine_for)([node.policy for node in self.nodes])
        self.done = self.nodes[0].done[0]
        for node in self.nodes:
            rewind(node.journal.logs[METRICS], self.done)
            self._introduce(node)
        if found:
            self.swarm.state = found[0]
        held_out = self.environment.held_out(self.settings.evaluation.held_out_questions)
        for node in self.nodes:
            node.held_out = held_out

    def run(self, stop: threading.Event, on_round: Callable[["LockstepSwarm"], None] = lambda swarm: None) -> bool:
        """Run until all rounds are done (True), or until `stop` is set and the current round ends (False)."""
        if self.done < 0:
            self._evaluate("start")
        self._write_state()
        on_round(self)
        while self.swarm.state.phase == "running":
            if stop.is_set():
                if self.done >= 0:
                    self.save()
                return False
            self.round()
            every = self.settings.checkpoint.checkpoint_every
            if every and self.done % every == every - 1 and self.swarm.state.phase == "running":
                self.save()
            running = self.swarm.state.phase == "running"  # the end is written after the last evaluation
            if running and time.monotonic() - self._written_at > STATE_SECONDS:
                self._write_state()
            on_round(self)
        self._evaluate("end")
        for node in self.nodes:
            node.journal.event("finished", round=self.done)
            node.journal.close()
        self._write_state()
        return True

    def round(self) -> None:
        """Run one round of all nodes, stage by stage."""
        state = self.swarm.state
        for _ in range(self.manifest.stages):
            self._stage(self.swarm.state)
        self.done = state.round
        started = time.monotonic()
        for node in self.nodes:
            node.measure_if_due(state)
        self.evaluation_seconds += time.monotonic() - started

    def _stage(self, state: State) -> None:
        """Run one stage of all nodes: they answer and publish, then collect, then train and report."""
        self.environment.forget()
        # One request to the scoring process serves all nodes, here and below.
        self.environment.questions([seed for node in self.nodes for seed in question_seeds(node, state)])
        stages = [node.play_stage(state) for node in self.nodes]
        waiting = {number: next(stage) for number, stage in enumerate(stages)}
        while waiting:
            answering = {number: work for number, work in waiting.items() if isinstance(work, SampleRequest)}
            learning = {number: work for number, work in waiting.items() if isinstance(work, TrainRequest)}
            ready = list(waiting)
            if answering:  # nodes that have published wait for the others
                self.engine.sample(list(answering.values()))
                self.environment.score(
                    [
                        (question, completion.text)
                        for work in answering.values()
                        for question, group in zip(work.questions, work.completions, strict=True)
                        for completion in group
                    ]
                )
                ready = list(answering)
            elif not all(isinstance(work, Published) for work in waiting.values()):
                self.engine.learn(list(learning.values()))
                ready = list(learning)
            for number in ready:
                if (work := next(stages[number], None)) is None:
                    del waiting[number]
                else:
                    waiting[number] = work

    def save(self) -> None:
        """Write a checkpoint of all nodes. It counts once the state, which is written last, is there."""
        for node in self.nodes:
            node.save()
        state = seal(self.swarm.state, self.signer)
        LocalFiles(self.private).write(_state(self.done), state)
        with suppress(OSError):  # a copy, like those of the nodes' checkpoints
            self.files.write(_state(self.done), state)
            nodes = [node.name for node in self.nodes]
            for name in self.files.names("checkpoints"):  # nodes keep only their last checkpoints
                if not any(self.files.has_folder(f"checkpoints/{name}/{node}") for node in nodes):
                    self.files.remove(f"checkpoints/{name}")
        self._write_state()

    def clear(self) -> None:
        """Remove the checkpoints of a run that has ended."""
        LocalFiles(self.private.parent).remove(self.private.name)
        with suppress(OSError):
            self.files.remove("checkpoints")

    def close(self) -> None:
        self.environment.close()
        for node in self.nodes:
            node.policy.close()

    def _manifest(self, specialists: Mapping[str, list[int]]) -> Manifest:
        try:
            return read_manifest(self.store)
        except FileNotFoundError:
            stages = environments.named(self.settings.task.environment).stages
            name = self.files.root.name
            manifest = new_manifest(self.settings, name, self.owner.peer_id, time.time(), stages)
            if specialists:
                manifest = replace(manifest, specialists=dict(specialists))
            self.store.write(MANIFEST, seal(manifest, self.owner))
            return manifest

    def _written(self, members: Sequence[RunMember]) -> tuple[State, dict[str, tuple[Path, Place]]] | None:
        """Find the newest checkpoint that all nodes have: the state after it, and where each node's lies."""
        known: dict[str, dict[int, Saved]] = {}
        for member in members:
            found: dict[int, Saved] = {}
            for saved in self._checkpoints(member).written(self.manifest.swarm()):
                found.setdefault(saved.place.round, saved)  # the private copy wins
            known[member.identity.node] = found
        common = set.intersection(*(set(places) for places in known.values()))
        for number in sorted(common, reverse=True):
            try:
                state = self._state(number)
                places = {
                    member.identity.node: (self._checkpoints(member).fetch(saved), saved.place)
                    for member in members
                    for saved in [known[member.identity.node][number]]
                }
            except (OSError, Rejected, CheckpointError):
                continue
            return state, places
        return None

    def _state(self, number: int) -> State:
        """Read the state that belongs to a checkpoint of all nodes."""
        try:
            data = LocalFiles(self.private).read(_state(number), MAX_BYTES)
        except FileNotFoundError:
            data = self.files.read(_state(number), MAX_BYTES)
        state = unseal(data, State)
        signed = (state.swarm, state.peer_id, state.round)
        if signed != (self.manifest.swarm(), self.signer.peer_id, number + 1):
            raise Rejected(RejectReason.OWNER, "not signed by this user")
        return state

    def _checkpoints(self, member: RunMember) -> Checkpoints:
        # A checkpoint counts once all nodes have it, so a node keeps the previous one until then.
        node, keep = member.identity.node, max(2, member.settings.checkpoint.keep_checkpoints)
        folder = self.private / node / "checkpoints"
        return Checkpoints(folder, self.signer, node, self.files, keep, keep_private=2)

    def _node(self, member: RunMember, written: tuple[Path, Place] | None) -> Node:
        identity, settings, never = member.identity, member.settings, threading.Event()
        sharing, path = self.sharing.get(settings.model.model), written[0] if written else None
        policy = Policy.load(settings, self.environment.system_prompt, path, sharing)
        node = Node(
            name=identity.node,
            identity=identity,
            settings=settings,
            manifest=self.manifest,
            environment=self.environment,
            role=Role(self.environment),
            policy=policy,
            exchange=LocalExchange(self.swarm, never, settings.sharing.fetch_max_peers),
            coordinator=LocalCoordinator(self.swarm, never),
            journal=Journal(self.private / identity.node / "logs", files=self.files, folder=f"logs/{identity.node}"),
            checkpoints=self._checkpoints(member),
            stop=never,
        )
        if written:
            folder, place = written
            restore_optimizer(policy, folder)
            node.journal.restore(place.logs)
            policy.version, node.done = place.policy_version, (place.round, place.stage)
            node.intake.reputation.restore(place.standing)
        return node

    def _introduce(self, node: Node) -> None:
        peer = PeerInfo(
            peer_id=node.identity.peer_id,
            swarm=self.manifest.swarm(),
            node=node.name,
            model=node.policy.name,
            tokenizer=node.policy.tokenizer_hash,
            device=str(node.policy.device),
            host=platform.node(),
            pid=os.getpid(),
            joined=time.time(),
            timestamp=time.time(),
        )
        node.coordinator.register(peer)
        self.store.write(PEERS.of(node.name), seal(peer, node.identity))

    def _evaluate(self, when: str) -> None:
        started = time.monotonic()
        for node in self.nodes:
            node.measure(when)
        self.evaluation_seconds += time.monotonic() - started

    def _write_state(self) -> None:
        """Write the swarm's state for observers."""
        self._written_at = time.monotonic()
        self.store.write(STATE, seal(replace(self.swarm.state, timestamp=time.time()), self.owner))


def sharing(members: Sequence[RunMember]) -> dict[str, SharedDevice]:
    """Return what nodes with one model share on a GPU."""
    if pick_device(members[0].settings.model).type != "cuda":
        return {}
    models = Counter(member.settings.model.model for member in members)
    return {model: SharedDevice(count, threads=False) for model, count in models.items() if count > 1}


def rewind(log: SharedLog[str], done: int) -> None:
    """Keep the lines of rounds up to `done`: later rounds run again."""
    lines = log.read().splitlines()
    kept = [line for line in lines if msgspec.json.decode(line)["round"] <= done] if done >= 0 else []
    log.replace(b"".join(line + b"\n" for line in kept))


def _state(number: int) -> str:
    return f"checkpoints/round_{number}/state.json"
