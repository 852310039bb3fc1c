"""Serves `rl-swarm watch`, in a browser or a terminal, and the dashboard of `up`."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rl_swarm.cli import catch_signals
from rl_swarm.config.resolve import user_network
from rl_swarm.config.settings import Settings
from rl_swarm.errors import UserError
from rl_swarm.experiment.arms import is_experiment
from rl_swarm.monitor.run_reader import looked_at
from rl_swarm.web import server
from rl_swarm.web.settings import WebSettings

if TYPE_CHECKING:
    from rich.console import Console


def watch(address: str, settings: Settings) -> None:
    """Serves the swarm at an address, whatever network it is on, or an experiment, until Ctrl-C."""
    if not server.is_installed():
        raise UserError(server.MISSING)
    stop = catch_signals()
    if is_experiment(address):
        with server.bound(settings.web.web_host, settings.web.web_port) as listening:
            print(f"{address} is at {server.url_of(listening)}   (Ctrl-C stops it)", flush=True)
            server.serve_experiment(Path(address), listening, stop, settings.web.web_token)
        return
    with (
        looked_at(address, lambda: settings.network) as view,
        server.bound(settings.web.web_host, settings.web.web_port) as listening,
    ):
        name = view.manifest.name if view.manifest else address
        print(f"{name} is at {server.url_of(listening)}   (Ctrl-C stops it)", flush=True)
        server.serve(view, listening, stop, settings.web.web_token)


def watch_here(address: str) -> None:
    """Shows the swarm or experiment in the terminal, until it has finished or Ctrl-C."""
    from rich.console import Console

    from rl_swarm.cli.live import watch
    from rl_swarm.experiment import drawing as standing

    stop = catch_signals()
    if is_experiment(address):
        standing.watch(Path(address), Console(highlight=False), stop)
        return
    with looked_at(address, user_network) as view:
        watch(view, Console(highlight=False), stop)


@contextmanager
def beside(
    root: Path, settings: WebSettings, private_log: Path, console: "Console", interrupted: threading.Event
) -> Iterator[None]:
    """The dashboard of a run, where it is wanted and can be had. With a token the run can be interrupted there."""
    if not settings.web:
        yield
    elif not server.is_installed():
        say(console, f"{server.MISSING} (--no-web: do without)")
        yield
    else:
        with server.beside(
            root, settings.web_host, settings.web_port, settings.web_token, private_log, interrupted
        ) as url:
            say(console, f"Watch it at {url}")
            yield


def say(console: "Console", text: str) -> None:
    """Prints a line as it is, whatever names stand in it."""
    console.print(text, markup=False, soft_wrap=True)
