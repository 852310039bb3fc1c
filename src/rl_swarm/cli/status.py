"""Shows a swarm once, as text or for programs: `rl-swarm status`."""

import json
from dataclasses import asdict

from rich.console import Console

from rl_swarm.cli.live import print_once
from rl_swarm.config.resolve import user_network
from rl_swarm.monitor.headline import headline
from rl_swarm.monitor.run_reader import open_view


def status(address: str, every: bool, as_json: bool) -> None:
    """Print the state of a swarm; `every` lists all nodes of a large one."""
    with open_view(address, user_network) as view:
        if not as_json:
            print_once(view, Console(highlight=False), every)
            return
        view.refresh()
        told = headline(view.active(), view.phase in ("finished", "stopped", "crashed"))
        example = asdict(told.example) if told.example else None
        print(json.dumps({**view.as_dict(), "headline": told.sentence, "example": example}, indent=2))
