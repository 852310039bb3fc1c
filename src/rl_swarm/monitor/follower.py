"""Follows a swarm: every poll reads what is new since the last one."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from rl_swarm.monitor.node_history import AHEAD, NodeHistory
from rl_swarm.monitor.records import Event
from rl_swarm.monitor.reports import ReportReader, add_report
from rl_swarm.monitor.run_reader import NodeView, RunView
from rl_swarm.monitor.sentences import told
from rl_swarm.protocol.rounds import State

log = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0  # between polls
LONGEST_PAUSE = 5.0
IDLE_TIMES = 25  # a pause is this many times as long as the poll's processor time
READ_SECONDS, FIRST_SECONDS = (2.0, 10.0)  # that a poll, and the first one, spend on logs; the rest waits for the next
MAX_EVENTS = 2000  # kept, of all nodes together
MAX_MADE = 64  # results that are kept for one version
Place = tuple[str, int, int, int]  # phase, round, stage, reports
T = TypeVar("T")


class Poller:
    """Lets one thread read for many viewers, at a bounded share of a processor. Hold `lock` to read from it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.lock = threading.Lock()
        self.version = 0
        self._made: dict[Hashable, Any] = {}  # at this version
        self._made_at = 0
        self._polling = threading.Lock()
        self._next = -1.0

    def poll(self) -> int:
        """Read what is new if it is time to and no other thread does. Return the version after that."""
        first = not self.version  # threads wait for the first poll, and for no other
        if (not first and self.clock() < self._next) or not self._polling.acquire(blocking=first):
            return self.version
        try:
            if not self.version or self.clock() >= self._next:
                started, cost = self.clock(), time.thread_time()
                changed = self._read()  # may take long: other threads use what is known
                with self.lock:
                    self.version += changed or not self.version
                ended, cost = self.clock(), time.thread_time() - cost
                pause = max(PAUSE_SECONDS, ended - started, IDLE_TIMES * cost)
                self._next = ended + min(pause, LONGEST_PAUSE)
        finally:
            self._polling.release()
        return self.version

    def poll_now(self) -> int:
        """Poll although it is not time to: a viewer that leaves wants the end."""
        self._next = self.clock()
        return self.poll()

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returns, and make it once for every version. Hold the lock."""
        if self._made_at != self.version or len(self._made) >= MAX_MADE:
            self._made, self._made_at = {}, self.version
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found

    def _read(self) -> bool:
        """Read what is new; return whether there was anything."""
        raise NotImplementedError


class Follower(Poller):
    """Follows a swarm: its nodes' histories and events."""

    def __init__(
        self, view: RunView, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
    ) -> None:
        super().__init__(clock)
        self.view, self.now = view, now
        self.histories: dict[str, NodeHistory] = {}
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._reports = ReportReader()
        self._trouble = ""  # why it could not be read; logged once
        self._last = ""  # the node whose log was read last
        self._place: Place | None = None  # in the run, at the last poll
        self._numbers: dict[str, int] = {}  # of the nodes on the map, by peer id: their places in the view
        self._phases: list[object] = []  # of the nodes, at the last poll

    def _read(self) -> bool:
        view = self.view
        try:
            view.refresh_swarm()
            self._trouble = ""
        except OSError as error:  # a store or peers do not answer now: what was read before stays
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.warning("the swarm cannot be read now: %s", error)
            return False
        place = _place(view.state)
        changed, self._place = place != self._place, place
        for number, node in enumerate(view.nodes.values()):
            if node.peer:
                self._numbers.setdefault(node.peer.peer_id, number)
        phases: list[object] = [node.peer.phase if node.peer else None for node in view.nodes.values()]
        changed, self._phases = changed or phases != self._phases, phases
        deadline = self.clock() + (READ_SECONDS if self.version else FIRST_SECONDS)
        for node in self._in_turn():  # one at a time: all logs together may not fit into memory
            view.refresh_node(node)
            with self.lock:
                changed |= self._take(node)
            self._last = node.node
            if self.clock() > deadline:
                break
        if view.address.is_url:
            reports = self._reports.read(view)
            with self.lock:
                for report in reports:
                    stages = view.manifest.stages if view.manifest else 1
                    add_report(report, self.histories[report.node], stages, self._numbers)
            changed |= bool(reports)
        return changed

    def _in_turn(self) -> list[NodeView]:
        """Return the nodes, those first that the last poll had no time for."""
        nodes = list(self.view.nodes.values())
        names = [node.node for node in nodes]
        begin = names.index(self._last) + 1 if self._last in names else 0
        return [*nodes[begin:], *nodes[:begin]]

    def _take(self, node: NodeView) -> bool:
        """Add what was read of a node to its history; return whether there was anything."""
        view, state = self.view, self.view.state
        known = view.manifest.rounds if view.manifest else 0
        most = min(known, state.round + AHEAD) if state else 0
        history = self.histories.setdefault(node.node, NodeHistory())
        events = [*history.new_events(node, view.local_files), *history.good_news(node)]
        if history.alive is None and view.address.is_url and node.peer:  # its log is on another machine
            joined = Event(node.peer.joined, node.node, node.name, "joined", None, f"with {node.peer.model}")
            events.append(told(joined, {"model": node.peer.model}))
        if history.alive is not None and history.alive != node.alive and state and state.phase == "running":
            word = "online" if node.alive else "offline"
            events.append(told(Event(self.now(), node.node, node.name, word, state.round, ""), {}))
        changed = bool(history.update(node, most, self._numbers)) or bool(events) or history.alive != node.alive
        history.alive = node.alive
        self.events.extend(events)
        return changed


def _place(state: State | None) -> Place | None:
    return (state.phase, state.round, state.stage, len(state.reports)) if state else None
