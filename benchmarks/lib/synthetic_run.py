"""Writes the history of a swarm that was never played: journals, introductions and the state, without a model."""

import os
import platform
import threading
import time
from pathlib import Path

from msgspec import UNSET
from msgspec.structs import replace

from benchmarks.lib.paths import STATE
from rl_swarm.config import resolve as config
from rl_swarm.config.settings import UP_PRESET
from rl_swarm.network.coordinator import DocumentCoordinator
from rl_swarm.network.folder import FolderStore
from rl_swarm.node.worker import found
from rl_swarm.protocol import rounds
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.rounds import Member, PeerInfo, Report, Rules, State
from rl_swarm.protocol.wire import seal
from rl_swarm.storage.files import LocalFiles
from rl_swarm.telemetry.journal import Journal
from rl_swarm.telemetry.schema import HeldOutRecord, RoundRecord, Seconds

SCORED_EVERY = 100  # rounds between held-out scores
SECONDS = {"questions": 0.001, "generate": 0.5, "score": 0.02, "publish": 0.001, "collect": 0.25, "train": 0.2,
"report": 0.001}  # fmt: skip
TASKS = ("basic_arithmetic", "chain_sum", "count_primes", "gcd", "leg_counting", "letter_counting")


def reward(node: int, played: int) -> float:
    """Return a node's reward in a round: every node differs, and all of them learn."""
    return round(0.8 - 0.6 / (1 + played / 500) + (node % 97) / 1000 + (played * 7 + node) % 5 / 100, 6)


class History:
    """Writes a swarm of so many nodes that has played so many rounds, and continues it with every `play`."""

    def __init__(self, root: Path, nodes: int, played: int, ahead: int = 1000, interval: float = 10.0) -> None:
        self.root, self.files, self.stop = root, LocalFiles(root), threading.Event()
        self.store = FolderStore(self.files)
        root.mkdir(parents=True)
        flags = {"rounds": played + ahead, "round_end": "interval", "round_interval": interval, "peer_timeout": 300.0}
        settings = config.load(UP_PRESET, flags=flags, environ={}).settings
        self.owner = Identity.generate()
        self.manifest = found(self.store, settings, root.name, self.owner)
        self.rules = Rules.of(self.manifest)
        self.swarm = self.manifest.swarm()
        self.peers = [Identity.generate() for _ in range(nodes)]
        self.joined = time.time() - played * interval
        private = root.with_name(f"{root.name}-private")
        self.journals = [Journal(private / peer.node, (), self.files, f"logs/{peer.node}") for peer in self.peers]
        for node in range(nodes):
            self._live(node, played)
        now = time.time()
        members = {
            peer.peer_id: Member(peer.node, 0, now, played, sum(reward(k, r) for r in range(played)),
            wins=played * (k == 0))
            for k, peer in enumerate(self.peers)
        }  # fmt: skip
        self.state = State(swarm=self.swarm, phase="running", round=played, started=now, timestamp=now, members=members)
        self._write_state()

    def _live(self, node: int, played: int) -> None:
        journal = self.journals[node]
        journal.event("joined", round=-1, model="tiny", pid=os.getpid())
        self._score(node, 0, "start")
        for number in range(played):
            self._write_round(node, number)
            if (number + 1) % SCORED_EVERY == 0:
                self._score(node, number + 1, "now")
        self.sign(node)

    def sign(self, node: int, phase: str = "") -> None:
        """Write a node's introduction or heartbeat, as from a machine of its own."""
        peer = self.peers[node]
        info = PeerInfo(
            peer_id=peer.peer_id, swarm=self.swarm, node=peer.node, model="tiny", device="cpu",
            host=f"{platform.node()}-{node}", pid=1, joined=self.joined, timestamp=time.time(),
            phase=phase or UNSET,
        )  # fmt: skip
        DocumentCoordinator(self.store, self.manifest, peer, peer.node, self.stop).register(info)

    def play(self, node: int) -> None:
        """Write the present round of one node: a line of its journal and a report."""
        peer, played = self.peers[node], self.state.round
        self._write_round(node, played)
        report = Report(
            peer_id=peer.peer_id, swarm=self.swarm, node=peer.node, round=played, stage=0, timestamp=time.time(),
            reward=reward(node, played), training_reward=reward(node, played), rollouts=4, vote=self.peers[0].peer_id,
        )  # fmt: skip
        DocumentCoordinator(self.store, self.manifest, peer, peer.node, self.stop).submit(report)
        self.state = rounds.record_report(self.state, report, time.time())

    def end_round(self) -> None:
        over = self.state.started + self.rules.interval + 1
        self.state, _ = rounds.advance(self.state, self.rules, over)
        now = time.time()
        self.state = replace(self.state, started=now, timestamp=now)
        self._write_state()

    def _write_state(self) -> None:
        self.files.write(STATE, seal(replace(self.state, reports={}), self.owner))

    def _write_round(self, node: int, played: int) -> None:
        value, others = reward(node, played), len(self.peers)
        start, phases = 0.0, []
        for phase, seconds in SECONDS.items():
            phases.append((phase, round(start, 4), round(start + seconds, 4)))
            start += seconds
        taken = {self.peers[(node + step * (played % 7 + 1)) % others].peer_id: 1 for step in (1, 2, 3, 4)}
        self.journals[node].metrics(RoundRecord(
            round=played, stage=0, policy_version=played + 1, reward_local=value,
            reward_training=value + 0.05, local_groups=4, local_with_signal=3, zero_std_fraction=0.25,
            completion_length=20.0 - value, truncated_fraction=0.03125, entropy=1.0 - value / 3, clip_fraction=0.0,
            logprob_mismatch=0.003215599765, loss=0.014643197879, kl=0.0, grad_norm=1 / (1 + value),
            trained_tokens=300 + played % 9,
            tokens_per_second=1500.0 + played % 100, seconds=Seconds(**SECONDS),
            external_accepted=len(taken), external_scored=12, external_by_peer=taken, external_rejected={},
            external_max_nll=2.29, peak_memory=546172928,
        ), began=self.joined + played, phases=phases)  # fmt: skip

    def _score(self, node: int, played: int, when: str) -> None:
        """Return a held-out score after so many rounds."""
        value = reward(node, played)
        by_task = dict.fromkeys(TASKS, value)
        self.journals[node].metrics(HeldOutRecord(
            when=when, round=played - 1, questions=200, sampled=value, greedy=value, well_formed=0.5,
            accuracy_well_formed=0.5, by_task=by_task, greedy_by_task=by_task, well_formed_by_task=by_task,
            accuracy_well_formed_by_task=by_task, examples=[],
        ))  # fmt: skip
