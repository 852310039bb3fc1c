"""Lives the life of a node: round after round, with checkpoints and held-out scores, until the swarm ends."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import msgspec

from rl_swarm.environments.base import Environment, ModelRequest, Role
from rl_swarm.learning.checkpoints import Checkpoints, Place
from rl_swarm.learning.policy import Policy
from rl_swarm.network.base import Coordinator, Exchange
from rl_swarm.node.evaluation import evaluate
from rl_swarm.node.heartbeats import CurrentPhase
from rl_swarm.node.hub import Push
from rl_swarm.node.intake import Intake
from rl_swarm.node.round import StageContext
from rl_swarm.node.settings import NodeSettings
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.rounds import State
from rl_swarm.telemetry.journal import Journal, Stopwatch
from rl_swarm.telemetry.machine import LoadMeter
from rl_swarm.telemetry.schema import HeldOutRecord

log = logging.getLogger(__name__)


class Stopped(Exception):
    """Reports that the node was told to stop in the middle of a round."""


@dataclass
class Node:
    """Holds the parts of a node and plays its rounds; `node/round.py` has a single round."""

    intake_type: ClassVar[type[Intake]] = Intake

    name: str  # in what it sends
    identity: Identity
    settings: NodeSettings
    manifest: Manifest
    environment: Environment
    role: Role
    policy: Policy
    exchange: Exchange
    coordinator: Coordinator
    journal: Journal
    checkpoints: Checkpoints
    stop: threading.Event
    role_name: str = ""  # in what it sends; empty for the ordinary role
    push: Push | None = None  # to the hub, where the settings ask for it
    load: LoadMeter = field(default_factory=LoadMeter)  # of the machine
    phase: CurrentPhase = field(default_factory=CurrentPhase)  # for its heartbeats
    clock: Callable[[], float] = time.time
    done: tuple[int, int] = (-1, -1)  # the last round and stage that this node finished
    held_out: list[Question] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch = Stopwatch(self.phase.begin)  # of the stage at hand
        sharing = self.settings.sharing
        self.intake = self.intake_type(
            self.peer_id,
            self.role_name,
            self.settings,
            self.manifest,
            self.environment,
            self.exchange,
            self.journal,
            partial(self.policy.max_span_nlls, allowance=sharing.likelihood_allowance)
            if sharing.check_likelihood
            else None,
        )

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    def prepare(self) -> None:
        """Do what takes time before the first round, so that a node that has joined is ready to play."""
        if self.role.learns:
            self.held_out = self.environment.held_out(self.settings.evaluation.held_out_questions)
        if self.done == (-1, -1):
            self.measure("start")

    def run(self) -> None:
        """Play rounds until the swarm has finished or the node is told to stop."""
        while (state := self.wait()) is not None and state.phase == "running":
            self.note_skipped(state)
            try:
                self.play(state)
            except Stopped:
                break
            if state.stage + 1 < self.manifest.stages:
                continue
            self.measure_if_due(state)
            every = self.settings.checkpoint.hub_every if self.push and state.round + 1 < self.manifest.rounds else 0
            push = every > 0 and state.round % every == every - 1
            every = self.settings.checkpoint.checkpoint_every
            if push or (every and state.round % every == every - 1):
                self.save(push)
        finished = state is not None and state.phase == "finished"
        if finished:
            self.measure("end")
            self.journal.event("finished", round=self.done[0])
        if self.done != (-1, -1):
            self.save(push=finished)
        if self.push:
            self.push.finish()

    def wait(self) -> State | None:
        """Wait for the next stage of the swarm, or for its end."""
        self.phase.begin("waiting")
        return self.coordinator.wait_for(self.done)

    def play(self, state: State) -> None:
        """Play one stage of a round, and do all requests at once."""
        for request in self.play_stage(state):
            request.run()

    def play_stage(self, state: State) -> Iterator[ModelRequest]:
        """Begin one stage of a round and yield the requests of this node's role."""
        self.watch = Stopwatch(self.phase.begin)
        self.intake.begin_stage(state)
        return self.role.play_stage(StageContext(self, state))

    def measure_if_due(self, state: State) -> None:
        """Measure the held-out score after the rounds in which it is due."""
        every = self.settings.evaluation.held_out_every
        if every and state.round % every == every - 1 and state.round + 1 < self.manifest.rounds:
            self.measure("now")

    def measure(self, when: str) -> None:
        """Measure the held-out score, at the start and the end with greedy answers too."""
        if not self.held_out:
            return
        self.phase.begin("measuring")
        result = evaluate(
            self.policy, self.environment, self.held_out, self.settings.evaluation.held_out_samples, when != "now"
        )
        record = HeldOutRecord(when=when, round=self.done[0], **msgspec.structs.asdict(result))
        self.journal.metrics(record)
        log.info("held-out score %.3f (%s)", result.sampled, when)

    def save(self, push: bool = False) -> None:
        """Write a checkpoint: the node's place in the swarm, and the model if its role learns."""
        place = Place(
            self.manifest.swarm(),
            self.identity.peer_id,
            self.policy.name,
            *self.done,
            self.policy.version,
            logs=self.journal.digests(),
            standing=self.intake.reputation.snapshot(self.done[0]),
            role=self.role.snapshot() or msgspec.UNSET,
        )
        folder = self.checkpoints.save(self.policy if self.role.learns else None, place)
        self.journal.event("checkpoint", round=self.done[0])
        if push and self.push and self.role.learns:
            self.push(folder, self.policy, self.manifest)

    def note_skipped(self, state: State) -> None:
        """Log the rounds that this node has missed."""
        skipped = state.round - self.done[0] - 1
        if self.done == (-1, -1) and state.round > 0:
            self.journal.event("joined_late", round=state.round)
        elif skipped > 0:
            self.journal.event("skipped", first=self.done[0] + 1, last=state.round - 1)
            log.warning("skipped %d rounds, now at round %d", skipped, state.round)

    def check_stop(self) -> None:
        """Leave the round if the node was told to stop."""
        if self.stop.is_set():
            raise Stopped
