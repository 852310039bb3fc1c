"""Shares the streams on which other peers ask for documents, fairly.

A peer has a few streams at a time. Waiting for a request costs nearly nothing, so a new stream is always let in. Where
too many wait, the peer with most streams loses its oldest one. Answering costs memory, so answers are limited, and half
of them are reserved for members. Requests for the time need no turn.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

MAX_OF_PEER = 8  # streams; a node opens half as many
MAX_WAITING = 64  # streams whose request has not come yet
MAX_ANSWERS = 64  # that are being given
STRANGERS_ANSWERS = 32  # of them, to peers that are no members


@dataclass(eq=False)
class PeerStream:
    peer_id: str
    is_member: bool
    close: Callable[[], None]


class StreamSlots:
    """Decides which streams may wait for their request, and which are answered."""

    def __init__(self) -> None:
        self.waiting = dict[PeerStream, None]()  # the longest waiting first
        self.answered = dict[PeerStream, None]()

    def open(self, stream: PeerStream) -> bool:
        """Let a stream wait for its request, unless its peer has too many."""
        counts = Counter(other.peer_id for other in [*self.waiting, *self.answered])
        if counts[stream.peer_id] >= MAX_OF_PEER:
            return False
        self.waiting[stream] = None
        if len(self.waiting) > MAX_WAITING:
            counts[stream.peer_id] += 1
            loser = max(self.waiting, key=lambda other: (not other.is_member, counts[other.peer_id]))
            del self.waiting[loser]
            loser.close()
        return stream in self.waiting

    def answer(self, stream: PeerStream) -> bool:
        """Give a stream whose request has come a turn to be answered, if there is one."""
        if stream not in self.waiting:
            return False
        strangers = sum(not other.is_member for other in self.answered)
        if len(self.answered) >= MAX_ANSWERS or (not stream.is_member and strangers >= STRANGERS_ANSWERS):
            return False
        del self.waiting[stream]
        self.answered[stream] = None
        return True

    def leave(self, stream: PeerStream) -> None:
        self.waiting.pop(stream, None)
        self.answered.pop(stream, None)
