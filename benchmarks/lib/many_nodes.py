"""Writes the introductions of a swarm among peers with thousands of nodes, and serves its page."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from benchmarks.lib.synthetic_run import History, reward
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.rounds import Member
from rl_swarm.web import server

PLAYED = 30  # rounds
LOGGED = 20  # nodes with a log; of the others the coordinator's counts are known


class ManyNodes:
    """Holds a folder with so many nodes. Its state is handed over, as a swarm among peers does it: no document holds
    that many members."""

    def __init__(self, root: Path, nodes: int) -> None:
        self.history = History(root, min(nodes, LOGGED), PLAYED)
        members = dict(self.history.state.members)
        for number in range(LOGGED, nodes):
            peer = Identity.generate()
            self.history.peers.append(peer)
            self.history.sign(number)
            total = sum(reward(number, played) for played in range(PLAYED))
            members[peer.peer_id] = Member(peer.node, 0, self.history.joined, PLAYED, total, wins=number % 7)
        self.state = replace(self.history.state, members=members)

    def view(self) -> RunView:
        return RunView(self.history.root, clock=lambda: self.state)

    @contextmanager
    def served(self, port: int = 19700) -> Iterator[str]:
        """Serve the page; yield its address."""
        stop, listening = threading.Event(), server.bound("127.0.0.1", port)
        thread = threading.Thread(target=server.serve, args=(self.view(), listening, stop))
        thread.start()
        try:
            yield server.url_of(listening)
        finally:
            stop.set()
            thread.join()
