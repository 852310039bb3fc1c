"""Reads a run from its folder, for the live view, `status` and the summary."""

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from rl_swarm.errors import UserError
from rl_swarm.network.address import Address, open_address
from rl_swarm.network.documents import PEERS, RECORD_BYTES
from rl_swarm.network.listing import ThrottledListing
from rl_swarm.network.owner_documents import read_manifest, read_state
from rl_swarm.network.p2p.observer import observed
from rl_swarm.network.settings import NetworkSettings
from rl_swarm.node.evaluation import mean, protocol
from rl_swarm.protocol.identity import animal_name
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.rounds import Member, PeerInfo, State
from rl_swarm.protocol.wire import UNREADABLE, Rejected, convert, decode, unseal
from rl_swarm.storage.files import ROUND_FOLDER, LocalFiles
from rl_swarm.telemetry.journal import EVENTS, LOGS, MAX_UNREADABLE, METRICS, ends_mid_line, new_lines
from rl_swarm.telemetry.schema import HeldOutRecord, RoundRecord

TREND_ROUNDS = 20
LONGEST_LINE = 64 << 10  # bytes of a line about a round
Phase = Literal["waiting", "running", "stopped", "crashed", "finished"]
MEMBERSHIP = ("joined", "resumed", "left")  # events that begin and end the work of a node
MAX_FIGURES = 32
MAX_OTHERS = 256  # introductions of peers that are no members, read at a time
OTHERS_SECONDS = 5.0  # spent on their logs at a time


_ROUND = msgspec.json.Decoder(RoundRecord)


class EventLine(msgspec.Struct, frozen=True, gc=False):
    """Holds the fields that every line of `training_events.jsonl` has."""

    event: str
    timestamp: float


_EVENT = msgspec.json.Decoder(EventLine)


@dataclass
class NodeView:
    """Holds one node as its files show it."""

    node: str
    peer: PeerInfo | None = None
    member: Member | None = None
    alive: bool = False
    rounds: list[RoundRecord] = field(default_factory=list)
    held_out: list[dict[str, Any]] = field(default_factory=list)
    role_metrics: dict[str, float] = field(default_factory=dict)  # the last value of each
    introduced: bytes = b""  # as `peer` was read
    unreadable: Counter[str] = field(default_factory=Counter)  # whole lines, by log
    cut_off: set[str] = field(default_factory=set)  # logs that end amid a line although the node is gone
    _read: Counter[str] = field(default_factory=Counter)  # bytes, by log
    _membership: str = ""  # the last of these events in its log

    @property
    def name(self) -> str:
        return animal_name(self.peer.peer_id) if self.peer else self.node

    @property
    def start(self) -> dict[str, Any] | None:
        return next((line for line in self.held_out if line["when"] == "start"), None)

    @property
    def now(self) -> dict[str, Any] | None:
        return self.held_out[-1] if self.held_out else None

    @property
    def last(self) -> RoundRecord | None:
        return self.rounds[-1] if self.rounds else None

    @property
    def role(self) -> str:
        return "" if self.peer is None or self.peer.role is msgspec.UNSET else self.peer.role

    @property
    def has_reward(self) -> bool:
        return bool(self.rounds or (self.member and self.member.participation))

    def reward(self, rounds: int = TREND_ROUNDS, before: int = 0) -> float:
        """Return the mean reward of fresh local rollouts over some rounds, without the last `before`.

        Without its log, that is the mean of all rounds it reported.
        """
        if not self.rounds and self.member and self.member.participation:
            return self.member.reward / self.member.participation
        end = len(self.rounds) - before
        return mean([line.reward_local for line in self.rounds[max(0, end - rounds) : max(0, end)]])

    @property
    def external_accepted(self) -> int:
        return sum(line.external_accepted for line in self.rounds)

    @property
    def has_crashed(self) -> bool:
        """Return whether it is gone, and its log does not say that it left."""
        return not self.alive and self._membership in ("joined", "resumed")

    @property
    def unreadable_lines(self) -> int:
        return sum(map(self.unreadable_in, LOGS))

    def unreadable_in(self, log: str) -> int:
        return self.unreadable[log] + (log in self.cut_off)

    def refresh(self, files: LocalFiles) -> None:
        for line in self._new_lines(files, EVENTS):
            try:
                event = _EVENT.decode(line).event
                self._membership = event if event in MEMBERSHIP else self._membership
            except UNREADABLE:
                self.unreadable[EVENTS] += 1
        for line in self._new_lines(files, METRICS):
            try:
                if len(line) <= LONGEST_LINE:
                    played = _ROUND.decode(line)
                    self.role_metrics = dict([*self.role_metrics.items(), *played.role_metrics.items()][-MAX_FIGURES:])
                    if not played.idle:
                        self.rounds.append(played)
                    continue
            except UNREADABLE:
                pass  # not a round
            try:
                record = decode(line)
                convert(record, HeldOutRecord)
                self.held_out.append(record)
            except Rejected:
                self.unreadable[METRICS] += 1

    def _new_lines(self, files: LocalFiles, log: str) -> Iterator[bytes]:
        """Yield the new lines of a log, until too many of them cannot be read."""
        path = f"logs/{self.node}/{log}"
        lines, self._read[log] = new_lines(files, path, self._read[log])
        cut_off = not self.alive and ends_mid_line(files, path, self._read[log])
        self.cut_off = self.cut_off | {log} if cut_off else self.cut_off - {log}
        most = self.unreadable[log] + MAX_UNREADABLE
        for number, line in enumerate(lines):
            if self.unreadable[log] >= most:
                self.unreadable[log] += len(lines) - number
                return
            yield line


class RunView:
    """Reads a run; `refresh` reads only what is new."""

    def __init__(self, address: Path | str | Address, clock: Callable[[], State] | None = None) -> None:
        self.address = address if isinstance(address, Address) else open_address(address)
        self.clock = clock  # returns the state where no coordinator writes it
        self.root, self.store = self.address.here, self.address.store
        self.local_files = LocalFiles(self.root)  # logs and checkpoints
        self.manifest: Manifest | None = None
        self.state: State | None = None
        self.nodes: dict[str, NodeView] = {}
        self._listing = ThrottledListing()

    @classmethod
    def open(cls, address: Path | str) -> "RunView":
        """Open the run at an address and read it; raise a clear error if there is none."""
        view = cls.found(address)
        view.refresh()
        return view

    @classmethod
    def found(cls, address: Path | str | Address) -> "RunView":
        """Open the run at an address, and read nothing yet of what its nodes wrote."""
        view = cls(address)
        if view.address.peers:
            raise UserError(f"{address}: for this, give the folder of the swarm's coordinator, runs/<name>.")
        if view.address.is_url:
            view.reach()
        view.refresh_swarm()
        if view.manifest is None:
            with suppress(OSError):
                view.check_format()
            raise UserError(
                f"{address} is no swarm: it has no readable manifest.json. An address is an experiment directory, "
                "such as runs/<name> or <GDRIVE_PATH>/experiments/<EXPERIMENT_NAME>; `rl-swarm runs` lists yours."
            )
        return view

    def check_format(self) -> None:
        """Raise if another version of the package has written the manifest."""
        try:
            read_manifest(self.store)
        except Rejected as error:
            if "format" in str(error):
                raise UserError(f"The manifest.json in {self.address} cannot be used ({error}).") from error

    def reach(self) -> None:
        """Raise if a store does not answer, which differs from an empty one."""
        try:
            self.manifest = read_manifest(self.store)
        except (FileNotFoundError, Rejected):
            pass
        except OSError as error:
            raise UserError(f"{error.filename or self.address}: {error.strerror or error}") from error

    def refresh(self) -> None:
        self.refresh_swarm()
        deadline = time.monotonic() + OTHERS_SECONDS
        members = self.state.members if self.state else {}
        for node in sorted(self.nodes.values(), key=lambda node: _id_of(node) not in members):
            if _id_of(node) not in members and time.monotonic() > deadline:
                break  # anyone can introduce many nodes, with long logs
            self.refresh_node(node)

    def refresh_swarm(self) -> None:
        """Read the manifest, the state and the nodes' introductions."""
        try:
            self.manifest = self.manifest or read_manifest(self.store)
            self.state = self.clock() if self.clock else read_state(self.store, self.manifest)
        except (OSError, Rejected):
            pass  # not written yet, or just being replaced: what was read before stays
        swarm = self.manifest.swarm() if self.manifest else None
        for node in self._to_read():
            view = self.nodes.get(node) or NodeView(node)
            try:
                data = self.store.read(PEERS.of(node), RECORD_BYTES)
                if data == view.introduced:
                    continue
                peer = unseal(data, PeerInfo, RECORD_BYTES)
            except (OSError, Rejected):
                continue
            if (peer.swarm, peer.node) == (swarm, node):
                view.peer, view.introduced = peer, data
                self.nodes[node] = view

    def _to_read(self) -> list[str]:
        """Name the nodes whose introductions are read: members, known nodes, and a bounded number of others."""
        known = {member.node for member in self.state.members.values()} if self.state else set()
        known |= self.nodes.keys()
        others = [name for name in self._listing.nodes(self.store, PEERS) or [] if name not in known]
        return [*sorted(known), *others[:MAX_OTHERS]]

    def refresh_node(self, node: NodeView) -> None:
        node.alive = self.is_alive(node)
        node.refresh(self.local_files)
        node.member = self.state.members.get(node.peer.peer_id) if self.state and node.peer else None

    def is_alive(self, view: NodeView) -> bool:
        """Check the process of a node on this machine, and the last heartbeat of one elsewhere."""
        if view.peer is None or self.manifest is None:
            return False
        if view.peer.host == platform.node():
            return _runs(view.peer.pid)
        finished = self.state is not None and self.state.phase == "finished"
        return not finished and abs(time.time() - view.peer.timestamp) < self.manifest.peer_timeout

    def checkpoints(self, node: str) -> list[int]:
        """List the rounds of a node's checkpoints on this machine."""
        try:
            found = map(ROUND_FOLDER.fullmatch, self.local_files.names("checkpoints"))
        except OSError:
            return []
        rounds = sorted(int(match[1]) for match in found if match)
        return [number for number in rounds if self.local_files.has_folder(f"checkpoints/round_{number}/{node}")]

    @property
    def phase(self) -> Phase:
        """Return the phase of the run. A run that is `stopped` or `crashed` has not finished, and none of its nodes is
        alive; some of those that crashed did not leave."""
        if self.state is None:
            return "waiting"
        nodes = self.nodes.values()
        if self.state.phase != "running" or not nodes or any(view.alive for view in nodes):
            return self.state.phase
        return "crashed" if any(view.has_crashed for view in nodes) else "stopped"

    def active(self) -> list[NodeView]:
        """Return the nodes whose scores count: those that are alive; all of them once none is."""
        nodes = list(self.nodes.values())
        return [view for view in nodes if view.alive] or nodes

    def mean_held_out(self, when: str) -> float | None:
        lines = [view.start if when == "start" else view.now for view in self.active()]
        scores = [line["sampled"] for line in lines if line]
        return mean(scores) if scores else None

    def held_out_protocol(self) -> str:
        """Describe what a node's last held-out score is the mean of."""
        line = next((view.now for view in self.nodes.values() if view.now), None)
        return protocol(line["questions"], line.get("samples"), line.get("temperature")) if line else ""

    def rewards(self, stages: int) -> list[float | None]:
        """Return the mean reward of every stage over the last rounds; None where no node had a role."""
        lines = [line for view in self.nodes.values() for line in view.rounds[-stages * TREND_ROUNDS :]]
        by_stage = [[line.reward_local for line in lines if line.stage == stage] for stage in range(stages)]
        return [mean(rewards) if rewards else None for rewards in by_stage]

    def as_dict(self) -> dict[str, object]:
        """Return what `status --json` prints."""
        state, manifest = self.state, self.manifest
        return {
            "address": self.address.text,
            "name": manifest.name if manifest else None,
            "swarm": manifest.swarm() if manifest else None,
            "phase": self.phase,
            "round": state.round if state else 0,
            "stage": state.stage if state else 0,
            "rounds": manifest.rounds if manifest else None,
            **({"reward_by_stage": self.rewards(manifest.stages)} if manifest and manifest.stages > 1 else {}),
            "mean_held_out_start": self.mean_held_out("start"),
            "mean_held_out_now": self.mean_held_out("now"),
            "held_out_protocol": self.held_out_protocol(),
            "nodes": [
                {
                    "name": view.name,
                    "node": view.node,
                    "peer_id": view.peer.peer_id if view.peer else None,
                    "model": view.peer.model if view.peer else None,
                    "alive": view.alive,
                    "round": view.last.round if view.last else None,
                    "held_out_start": view.start["sampled"] if view.start else None,
                    "held_out_now": view.now["sampled"] if view.now else None,
                    "reward": view.reward() if view.has_reward else None,
                    "tokens_per_second": view.last.tokens_per_second if view.last else None,
                    "external_accepted": view.external_accepted,
                    "participation": view.member.participation if view.member else 0,
                    "wins": view.member.wins if view.member else 0,
                    "unreadable_lines": view.unreadable_lines,
                    **({"role": view.role} if view.role else {}),
                    **({"role_metrics": view.role_metrics} if view.role_metrics else {}),
                }
                for view in self.nodes.values()
            ],
        }


def _id_of(node: NodeView) -> str:
    return node.peer.peer_id if node.peer else ""


@contextmanager
def open_view(address: str, network: Callable[[], NetworkSettings] = NetworkSettings) -> Iterator[RunView]:
    """Open the run at an address, on whatever network, for as long as it is refreshed."""
    opened = open_address(address)
    if not opened.peers:
        yield RunView.found(opened)
        return
    with observed(address, network()) as (place, clock):
        view = RunView(place, clock)
        view.refresh_swarm()
        yield view


def _runs(pid: int) -> bool:
    try:
        return pid > 0 and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:
        return True
    except psutil.NoSuchProcess:
        return False
