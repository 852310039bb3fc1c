"""Defines how nodes meet: an exchange moves rollouts, a coordinator says which round it is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from rl_swarm.errors import UserError
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.rollouts import Publication
from rl_swarm.protocol.rounds import PeerInfo, Report, State

OnReject = Callable[[str, RejectReason, str], None]  # node, reason, detail


class NetworkError(UserError):
    """The swarm cannot be reached or used; the message says what would work."""


class Exchange(Protocol):
    """Moves rollouts between peers. What `collect` yields is signed by its peer and meant for this swarm,
    round and stage; nothing in it has been believed beyond that."""

    def publish(self, publication: Publication) -> None: ...

    def collect(
        self, round: int, stage: int, nodes: Sequence[str], patience: float = 0.0, in_order: bool = False
    ) -> Iterator[Publication]:
        """What the given nodes published, asked for one by one as the caller consumes.

        Waits up to `patience` seconds for those that have not published yet, then goes on without them.
        `in_order` keeps to the order of `nodes`; otherwise whoever is there comes first.
        """
        ...

    def subnets(self) -> Mapping[str, str]:
        """Of peers whose address this node sees: the part of the internet that it is in. Names are free, addresses are
        not, so those of one subnet count as one source."""
        ...


class Coordinator(Protocol):
    """Says which round it is and takes reports."""

    def register(self, peer: PeerInfo) -> None:
        """Joins, and later gives a sign of life."""
        ...

    def current(self) -> State: ...

    def wait_for(self, after: tuple[int, int]) -> State | None:
        """The first state past (round, stage), or the final one; None when this node is told to stop."""
        ...

    def submit(self, report: Report) -> None: ...
