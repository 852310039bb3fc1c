"""Defines an exchange, which moves rollouts between nodes, and a coordinator, which announces the round."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from rl_swarm.errors import UserError
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.rollouts import Publication
from rl_swarm.protocol.rounds import PeerInfo, Report, State

OnReject = Callable[[str, RejectReason, str], None]  # node, reason, detail


class NetworkError(UserError):
    """Reports a swarm that cannot be reached or used; the message says what would work."""


class Exchange(Protocol):
    """Moves rollouts between peers.

    A collected publication is signed by its peer and meant for this swarm, round and stage. Nothing else in it has been
    checked.
    """

    def publish(self, publication: Publication) -> None: ...

    def collect(
        self, round: int, stage: int, nodes: Sequence[str], patience: float = 0.0, in_order: bool = False
    ) -> Iterator[Publication]:
        """Yield what the given nodes published, fetching one publication at a time as the caller consumes.

        Wait up to `patience` seconds for nodes that have not published yet. `in_order` keeps to the order of `nodes`;
        otherwise publications come as they are found.
        """
        ...

    def subnets(self) -> Mapping[str, str]:
        """Return the subnets of peers whose addresses this node sees.

        Keys cost nothing and addresses do, so the peers of one subnet count as one source.
        """
        ...


class Coordinator(Protocol):
    """Announces the round and takes reports."""

    def register(self, peer: PeerInfo) -> None:
        """Join, and later send a heartbeat."""
        ...

    def current(self) -> State: ...

    def wait_for(self, after: tuple[int, int]) -> State | None:
        """Return the first state past (round, stage), or the final one; None when this node is told to stop."""
        ...

    def submit(self, report: Report) -> None: ...
