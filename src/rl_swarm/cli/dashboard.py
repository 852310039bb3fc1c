"""Serves `rl-swarm watch`, in a browser or a terminal, and the dashboard of `up`."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rl_swarm.cli import catch_signals, end_if_stopped
from rl_swarm.config.resolve import user_network
from rl_swarm.config.settings import Settings
from rl_swarm.errors import UserError
from rl_swarm.experiment.arms import is_experiment
from rl_swarm.monitor.run_reader import open_view
from rl_swarm.web import server
from rl_swarm.web.settings import WebSettings

if TYPE_CHECKING:
    from rich.console import Console


def watch(address: str, settings: Settings) -> None:
    """Serve the swarm or experiment at an address, on whatever network, until Ctrl-C."""
    if not server.is_installed():
        raise UserError(server.MISSING)
    stop = catch_signals()
    if is_experiment(address):
        with server.bound(settings.web.web_host, settings.web.web_port) as listening:
            print(f"{address} is at {server.url_of(listening)}   (Ctrl-C stops it)", flush=True)
            server.serve_experiment(Path(address), listening, stop, settings.web.web_token)
        end_if_stopped(stop)
        return
    with (
        open_view(address, lambda: settings.network) as view,
        server.bound(settings.web.web_host, settings.web.web_port) as listening,
    ):
        name = view.manifest.name if view.manifest else address
        print(f"{name} is at {server.url_of(listening)}   (Ctrl-C stops it)", flush=True)
        server.serve(view, listening, stop, settings.web.web_token)
    end_if_stopped(stop)


def watch_here(address: str) -> None:
    """Show the swarm or experiment in the terminal, until it has finished or Ctrl-C."""
    from rich.console import Console

    from rl_swarm.cli.live import watch
    from rl_swarm.experiment import drawing as experiment_drawing

    stop = catch_signals()
    if is_experiment(address):
        experiment_drawing.watch(Path(address), Console(highlight=False), stop)
        end_if_stopped(stop)
        return
    with open_view(address, user_network) as view:
        watch(view, Console(highlight=False), stop)
    end_if_stopped(stop)


@contextmanager
def dashboard_of_run(
    root: Path, settings: WebSettings, private_log: Path, console: "Console", interrupted: threading.Event
) -> Iterator[None]:
    """Serve the dashboard of a run, if the settings want it and its packages are installed. A user with the token can
    stop the run there."""
    if not settings.web:
        yield
    elif not server.is_installed():
        say(console, f"{server.MISSING} (--no-web: do without)")
        yield
    else:
        with server.dashboard_process(
            root, settings.web_host, settings.web_port, settings.web_token, private_log, interrupted
        ) as url:
            say(console, f"Watch it at {url}")
            yield


def say(console: "Console", text: str) -> None:
    """Print a line as it is, even if a name in it looks like markup."""
    console.print(text, markup=False, soft_wrap=True)
