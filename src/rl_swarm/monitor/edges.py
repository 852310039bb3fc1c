"""Keeps from whom one node learned in every round, small: of many rounds neighbours are merged, as in curves."""

from array import array
from collections.abc import Mapping
from heapq import nlargest

MAX_FRAMES = 128  # merged rounds of one node in memory
PER_FRAME = 8  # peers that are kept of one (merged) round: those with the most groups
RECENT = 20  # last rounds, of which each is kept by itself
MAX_GROUPS = 65535
Groups = dict[int, int]  # by the number of the peer


class Edges:
    """Counts the groups that a node took from each peer, which is named by its number."""

    def __init__(self, most: int = MAX_FRAMES) -> None:
        self.most, self.stride = most, 1
        self.recent: dict[int, Groups] = {}  # by round
        self._peers, self._groups = array("I"), array("H")  # `PER_FRAME` places for every frame

    def add(self, played: int, taken: Mapping[int, int]) -> None:
        """Add what a node took in a round, or in one stage of it."""
        if not taken:
            return
        while played // self.stride >= self.most:
            self._merge()
        frame = played // self.stride
        if (missing := (frame + 1) * PER_FRAME - len(self._peers)) > 0:
            self._peers.frombytes(bytes(missing * self._peers.itemsize))
            self._groups.frombytes(bytes(missing * self._groups.itemsize))
        self._put(self._peers, self._groups, frame, most_of(self.frame(frame), taken))
        self.recent[played] = most_of(self.recent.get(played, {}), taken)
        if len(self.recent) > RECENT:
            del self.recent[min(self.recent)]

    def frame(self, number: int, stride: int | None = None) -> Groups:
        """Return what was taken in a frame of `stride` rounds, a multiple of the own stride."""
        step, found = (stride or self.stride) // self.stride, Groups()
        for place in range(number * step * PER_FRAME, min((number + 1) * step * PER_FRAME, len(self._peers))):
            if groups := self._groups[place]:
                found[self._peers[place]] = found.get(self._peers[place], 0) + groups
        return found

    def copy(self) -> "Edges":
        """Copy what `frame` reads."""
        other = Edges(self.most)
        other.stride, other._peers, other._groups = self.stride, self._peers[:], self._groups[:]
        return other

    def _merge(self) -> None:
        frames = -(-len(self._peers) // (2 * PER_FRAME))
        peers, groups = array("I", bytes(frames * PER_FRAME * 4)), array("H", bytes(frames * PER_FRAME * 2))
        for number in range(frames):
            self._put(peers, groups, number, most_of(self.frame(number, 2 * self.stride), {}))
        self.stride, self._peers, self._groups = 2 * self.stride, peers, groups

    @staticmethod
    def _put(peers: "array[int]", groups: "array[int]", frame: int, taken: Groups) -> None:
        for place, (peer, count) in enumerate(taken.items(), frame * PER_FRAME):
            peers[place], groups[place] = peer, count


def most_of(known: Mapping[int, int], more: Mapping[int, int]) -> Groups:
    """Add two counts, and keep the peers with the most groups."""
    whole = {**known, **{peer: known.get(peer, 0) + groups for peer, groups in more.items()}}
    if len(whole) > PER_FRAME:
        whole = dict(nlargest(PER_FRAME, whole.items(), key=lambda item: item[1]))
    return {peer: min(groups, MAX_GROUPS) for peer, groups in whole.items() if groups > 0}
