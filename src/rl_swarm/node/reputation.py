"""Decides how often a peer is asked, by how its rollouts fared here, and how much of a batch may come from where.

Only what a peer signed counts against it: a file that somebody else spoilt does not. Nothing of this travels,
since what one node says about another is not believed either. It lies in the node's own signed checkpoints, so that
nobody is trusted anew because the node was restarted.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import zip_longest

from rl_swarm.learning.checkpoints import MAX_KEPT, KeptReputation


class PeerReputation:
    """A peer that failed is asked half as often with every failure, then for some rounds not at all.

    Rollouts that pass take a failure back. After the rounds without, the next failure leads to as many again.
    """

    def __init__(self, patience: int, ban_rounds: int) -> None:
        self.patience, self.ban_rounds = patience, ban_rounds
        self.failures: Counter[str] = Counter()
        self.asked_again: dict[str, int] = {}  # the round from which a peer is asked again

    def kept(self, round: int) -> KeptReputation:
        """What matters from this round on."""
        known = {peer: (n, self.asked_again.get(peer, 0)) for peer, n in self.failures.items()}
        bad = [(peer, (n, again)) for peer, (n, again) in known.items() if n or again > round]
        return dict(sorted(bad, key=lambda item: (-item[1][1], -item[1][0], item[0]))[:MAX_KEPT])

    def restore(self, kept: KeptReputation) -> None:
        self.failures.update({peer: failures for peer, (failures, _) in kept.items()})
        self.asked_again.update({peer: again for peer, (_, again) in kept.items()})

    def asks(self, peer_id: str, round: int, rng: random.Random) -> bool:
        """Whether to ask this peer in this round."""
        chance = 0.5 ** self.failures[peer_id]
        return round >= self.asked_again.get(peer_id, 0) and (chance == 1 or rng.random() < chance)

    def note(self, peer_id: str, failed: bool, round: int) -> bool:
        """What came of asking; True if the peer is now not asked for a while."""
        if not failed:
            self.failures[peer_id] = max(0, self.failures[peer_id] - 1)
            return False
        self.failures[peer_id] += 1
        if self.failures[peer_id] < self.patience:
            return False
        self.failures[peer_id] = max(0, self.patience - 1)
        self.asked_again[peer_id] = round + 1 + self.ban_rounds
        return True


def in_turn(peers: Iterable[str], sources: Mapping[str, str], rng: random.Random) -> list[str]:
    """Peers in the order in which they are asked: by chance, but one of every source before a second of any, so that
    a source does not get more for having more names."""
    by_source: dict[str, list[str]] = {}
    for peer_id in peers:
        by_source.setdefault(sources.get(peer_id, peer_id), []).append(peer_id)
    order = list(by_source.values())
    rng.shuffle(order)
    for of_source in order:
        rng.shuffle(of_source)
    return [peer_id for turn in zip_longest(*order) for peer_id in turn if peer_id is not None]


def most_of_one(wanted: int, share: float, sources: int) -> int:
    """How many of the wanted groups one source may contribute: its share, or an even part where that is more."""
    return math.ceil(wanted * max(share, 1 / max(sources, 1)))
