"""Checks whether this machine's clock agrees with those of others.

Rounds go by the clock, and peers refuse notices of another time than now, without an answer. So a node that joins asks
some peers for the time. The median counts: one peer that lies changes nothing.
"""

import logging
import random
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

from rl_swarm.network.p2p.engine import WHAT_TIME, PeerEngine

log = logging.getLogger(__name__)

ASKED = 5  # peers
ANSWER_SECONDS = 3.0
LAST_SECOND = 1e11  # since 1970 that is believed to be a time
OFF_SECONDS = 10.0  # by which a clock may differ without a warning


@dataclass(frozen=True)
class Comparison:
    ahead: float  # seconds by which this machine's clock is ahead
    peers: int  # whose clocks it was compared with

    @property
    def agrees(self) -> bool:
        return abs(self.ahead) <= OFF_SECONDS

    def __str__(self) -> str:
        if self.agrees:
            return f"the clock agrees with {_clocks(self.peers)} to {abs(self.ahead):.1f} s"
        return (
            f"this machine's clock is {abs(self.ahead):.0f} s {'ahead of' if self.ahead > 0 else 'behind'} "
            f"{_clocks(self.peers)}{'; one of the two is wrong' if self.peers == 1 else ''}. Rounds begin at the wrong "
            "time, and peers may refuse this node's notices. Set the clock by the network: "
            "`sudo timedatectl set-ntp true`, and `timedatectl` shows whether it worked."
        )


def _clocks(peers: int) -> str:
    return "that of the only peer that was asked" if peers == 1 else f"those of {peers} peers"


def compared(engine: PeerEngine) -> Comparison | None:
    """Compare this machine's clock with those of some connected peers; None where no peer tells the time."""
    try:
        peers = sorted({address.rpartition("/")[2] for address in engine.peers()})
    except OSError:
        return None
    ahead = []
    for peer in random.sample(peers, min(len(peers), ASKED)):
        with suppress(OSError, ValueError):
            before = engine.clock()
            theirs = float(engine.ask(peer, WHAT_TIME, 32, ANSWER_SECONDS) or b"")
            if 0 < theirs < LAST_SECOND:
                ahead.append((before + engine.clock()) / 2 - theirs)
    if not ahead:
        return None
    # Of two, the one that is closer: the other may lie.
    return Comparison(min(ahead, key=abs) if len(ahead) < 3 else median(ahead), len(ahead))


def warn(engine: PeerEngine) -> None:
    """Warn once if the clocks disagree, as soon as a peer can be asked."""
    if engine.clock_compared or (found := compared(engine)) is None:
        return
    engine.clock_compared = True
    if not found.agrees:
        log.warning("%s", found)
