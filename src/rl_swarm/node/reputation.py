"""Decides how often a peer is asked, by how its rollouts fared here, and how much of a batch one source may fill.

A peer answers only for what it signed itself. Nodes do not share reputations, since they would have to believe each
other. A node keeps its own in its signed checkpoints, so that a restart forgives nobody.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import zip_longest

from rl_swarm.learning.checkpoints import MAX_KEPT, KeptReputation


class PeerReputation:
    """Halves the chance that a peer is asked with each failure, and then bans the peer for some rounds.

    Rollouts that pass take a failure back. After a ban the next failure leads to another one.
    """

    def __init__(self, patience: int, ban_rounds: int) -> None:
        self.patience, self.ban_rounds = patience, ban_rounds
        self.failures: Counter[str] = Counter()
        self.banned_until: dict[str, int] = {}  # the round from which a peer is asked again

    def snapshot(self, round: int) -> KeptReputation:
        """Return what a checkpoint has to keep, from this round on."""
        known = {peer: (n, self.banned_until.get(peer, 0)) for peer, n in self.failures.items()}
        bad = [(peer, (n, until)) for peer, (n, until) in known.items() if n or until > round]
        return dict(sorted(bad, key=lambda item: (-item[1][1], -item[1][0], item[0]))[:MAX_KEPT])

    def restore(self, kept: KeptReputation) -> None:
        self.failures.update({peer: failures for peer, (failures, _) in kept.items()})
        self.banned_until.update({peer: until for peer, (_, until) in kept.items()})

    def should_ask(self, peer_id: str, round: int, rng: random.Random) -> bool:
        """Draw whether to ask this peer in this round."""
        chance = 0.5 ** self.failures[peer_id]
        return round >= self.banned_until.get(peer_id, 0) and (chance == 1 or rng.random() < chance)

    def record(self, peer_id: str, failed: bool, round: int) -> bool:
        """Record whether a peer's rollouts failed; return True if that bans the peer."""
        if not failed:
            self.failures[peer_id] = max(0, self.failures[peer_id] - 1)
            return False
        self.failures[peer_id] += 1
        if self.failures[peer_id] < self.patience:
            return False
        self.failures[peer_id] = max(0, self.patience - 1)
        self.banned_until[peer_id] = round + 1 + self.ban_rounds
        return True


def source_by_source(peers: Iterable[str], sources: Mapping[str, str], rng: random.Random) -> list[str]:
    """Shuffle the peers, with one of every source before a second of any: more names do not give a source more."""
    by_source: dict[str, list[str]] = {}
    for peer_id in peers:
        by_source.setdefault(sources.get(peer_id, peer_id), []).append(peer_id)
    order = list(by_source.values())
    rng.shuffle(order)
    for of_source in order:
        rng.shuffle(of_source)
    return [peer_id for turn in zip_longest(*order) for peer_id in turn if peer_id is not None]


def max_groups_per_source(wanted: int, share: float, sources: int) -> int:
    """Return how many of the wanted groups one source may give: its share, or an even part where that is more."""
    return math.ceil(wanted * max(share, 1 / max(sources, 1)))
