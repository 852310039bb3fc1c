"""Runs `rl-swarm bootnode`: a peer that is always online, so that peers find each other."""

from pathlib import Path

from rich.console import Console

from rl_swarm.cli import catch_signals, end_if_stopped, program
from rl_swarm.config.settings import Settings
from rl_swarm.network.address import known_addresses, peer_url
from rl_swarm.network.p2p import time_offset
from rl_swarm.network.p2p.joining import engine_of
from rl_swarm.protocol.identity import Identity
from rl_swarm.telemetry.logs import start_logging

HERE = Path("runs") / "bootnode"
COMPARE_SECONDS = 60.0  # between comparisons of its clock with other peers'


def bootnode(settings: Settings) -> None:
    """Listen until Ctrl-C. A bootnode knows no swarm, trains nothing, and stores its share of the DHT alone."""
    known = known_addresses(settings.network.p2p_initial_peers) if settings.network.p2p_initial_peers else []
    start_logging(settings.telemetry, settings.storage, HERE, "bootnode", terminal=True)
    stop = catch_signals()
    identity = Identity.load_or_create(Path(settings.network.identity_path))
    with engine_of(identity, known, settings.network, HERE) as engine:
        console = Console(highlight=False, markup=False)
        console.print("Peers join by an address that they can reach:   (Ctrl-C stops it)")
        for address in engine.addresses:
            console.print(f"  {program()} join {peer_url(address)}", soft_wrap=True)
        while not stop.wait(COMPARE_SECONDS):
            time_offset.warn(engine)
    end_if_stopped(stop)
