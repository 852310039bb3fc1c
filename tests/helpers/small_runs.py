"""Writes run directories for the tests of the dashboard with the nodes' own code, without a model."""

import os
import platform
import threading
import time
from functools import cache
from pathlib import Path

from msgspec.structs import replace

from benchmarks.lib.paths import STATE
from rl_swarm.config import resolve as config
from rl_swarm.config.settings import UP_PRESET
from rl_swarm.environments import task_list
from rl_swarm.environments.reasoning import Reasoning
from rl_swarm.environments.settings import TaskSettings
from rl_swarm.network.coordinator import DocumentCoordinator
from rl_swarm.network.exchange import DocumentExchange
from rl_swarm.network.folder import FolderStore
from rl_swarm.node.worker import found
from rl_swarm.protocol import rounds
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest, question_seed
from rl_swarm.protocol.rollouts import Answer, Publication, Sampling
from rl_swarm.protocol.rounds import PeerInfo, Report, Rules, State
from rl_swarm.protocol.wire import seal
from rl_swarm.storage.files import Files, LocalFiles
from rl_swarm.telemetry.journal import Journal
from rl_swarm.telemetry.schema import HeldOutRecord, RoundRecord, Seconds

HOSTILE = "<script>window.hacked = true</script><img src=x onerror='window.hacked = true'>\n=1+1"


@cache
def questions_of(manifest_tasks: str) -> Reasoning:
    return Reasoning(task_list(TaskSettings(tasks=manifest_tasks), "tiny"))


class SmallRun:
    """Plays the rounds of a few nodes by calls of a test."""

    def __init__(
        self, root: Path, nodes: int = 2, total: int = 3, pid: int | None = None, files: Files | None = None,
        **flags: object,
    ) -> None:  # fmt: skip
        root.mkdir(parents=True)
        self.root, self.files, self.stop = root, files or LocalFiles(root), threading.Event()
        self.store = FolderStore(self.files)
        settings = config.load(
            UP_PRESET, flags={"rounds": total, "tasks": "chain_sum,gcd", **flags}, environ={}
        ).settings
        self.owner = Identity.generate()
        self.manifest: Manifest = found(self.store, settings, root.name, self.owner)
        self.identities = [Identity.generate() for _ in range(nodes)]
        self.journals = {
            i.node: Journal(root.with_name(f"{root.name}-private") / i.node, (), self.files, f"logs/{i.node}")
            for i in self.identities
        }
        self.state = State(swarm=self.manifest.swarm())
        for identity in self.identities:
            self.join(identity, os.getpid() if pid is None else pid)
        self.tick()

    @property
    def names(self) -> list[str]:
        return [identity.node for identity in self.identities]

    def join(self, identity: Identity, pid: int) -> None:
        now = time.time()
        peer = PeerInfo(
            peer_id=identity.peer_id, swarm=self.manifest.swarm(), node=identity.node, model="tiny", device="cpu",
            host=platform.node(), pid=pid, joined=now, timestamp=now,
        )  # fmt: skip
        DocumentCoordinator(self.store, self.manifest, identity, identity.node, self.stop).register(peer)
        self.journals[identity.node].event("joined", round=-1, model="tiny", pid=pid)
        self.score(identity, "start", 0.2)
        self.state = rounds.record_presence(self.state, identity.peer_id, identity.node, now)

    def tick(self) -> None:
        rules = Rules.of(self.manifest, len(self.identities))
        self.state, _ = rounds.advance(self.state, rules, time.time())
        self.files.write(STATE, seal(replace(self.state, peer_id=self.owner.peer_id), self.owner))

    def play(self, text: str = "<answer>7</answer>", more: float = 0.0) -> None:
        """Play one round of every node: the first question is answered correctly once, the second never.

        `more` raises the rewards.
        """
        played = self.state.round
        first = self.identities[0].peer_id
        for number, identity in enumerate(self.identities):
            self.publish(identity, played, text)
            others = [other.peer_id for other in self.identities if other is not identity]
            self.write_round(identity.node, played, 0.25 + number / 100 + more, others)
            report = Report(
                peer_id=identity.peer_id, swarm=self.manifest.swarm(), node=identity.node, round=played, stage=0,
                timestamp=time.time(), reward=0.25, training_reward=0.3, rollouts=2, vote=first,
            )  # fmt: skip
            DocumentCoordinator(self.store, self.manifest, identity, identity.node, self.stop).submit(report)
            self.state = rounds.record_report(self.state, report, time.time())
        self.tick()

    def publish(self, identity: Identity, played: int, text: str) -> None:
        seeds = [question_seed(self.manifest, played, identity.peer_id, k) for k in range(2)]
        asked = questions_of("chain_sum,gcd").questions(seeds)
        publication = Publication(
            peer_id=identity.peer_id, kind="rollouts", swarm=self.manifest.swarm(), node=identity.node, round=played,
            stage=0, timestamp=time.time(), model="tiny", policy_version=played, sampling=Sampling(1.0, 1.0, 0, 24),
            rollouts={
                str(k): [
                    Answer(prompt=q.prompt, response=f"<answer>{q.answer}</answer>", reward=1.0 - k),
                    Answer(prompt=q.prompt, response=text, reward=0.0),
                ]
                for k, q in enumerate(asked)
            },
        )  # fmt: skip
        node = identity.node
        DocumentExchange(self.store, self.manifest, identity, node, self.stop, print).publish(publication)

    def write_round(self, node: str, played: int, reward: float, learned_from: list[str], tokens: int = 50) -> None:
        self.journals[node].metrics(RoundRecord(
            round=played, stage=0, reward_local=reward, reward_training=reward, local_groups=4,
            local_with_signal=3, external_accepted=len(learned_from), external_by_peer=dict.fromkeys(learned_from, 1),
            external_rejected={"digest": 1}, tokens_per_second=100.0,
            generated_tokens=tokens, trained_tokens=40, seconds=Seconds(generate=0.5, train=0.25),
            entropy=0.5, grad_norm=1.0, completion_length=6.0, peak_memory=1 << 28,
        ))  # fmt: skip

    def score(self, identity: Identity, when: str, sampled: float) -> None:
        played = self.state.round - 1 if when == "start" else self.state.round
        tasks = {"chain_sum": sampled, "gcd": sampled}
        greedy = None if when == "now" else sampled
        self.journals[identity.node].metrics(HeldOutRecord(
            when=when, round=played, questions=16, sampled=sampled, greedy=greedy, well_formed=0.5,
            accuracy_well_formed=0.5, by_task=tasks, greedy_by_task={}, well_formed_by_task=tasks,
            accuracy_well_formed_by_task=tasks, examples=[],
        ))  # fmt: skip
