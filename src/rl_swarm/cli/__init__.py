"""The commands. Importing this loads no torch; each command imports what it needs."""

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_swarm import config
from rl_swarm.config import Resolved
from rl_swarm.errors import UserError

# Options that are not called as their setting is.
OPTIONS = {
    "environment": "flag --env",
    "web_host": "flag --host",
    "web_port": "flag --port",
    "web": "flag --web or --no-web",
}


def program() -> str:
    """How the user calls this program, for the commands that it suggests."""
    return os.environ.get("RL_SWARM_PROGRAM", "rl-swarm")


def assigned(sets: Sequence[str] | None) -> dict[str, str]:
    """What `--set name=value` says, as often as it was given."""
    found = {}
    for assignment in sets or []:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise UserError(f"--set {assignment}: write it as --set name=value.")
        found[name] = value
    return found


def settled(
    command: str,
    preset: Mapping[str, object],
    config_file: Path | None,
    sets: Sequence[str] | None,
    **flags: object,
) -> Resolved:
    """The settings of a command: those flags that were given, and `--set`, above everything else."""
    given, other = {name: value for name, value in flags.items() if value is not None}, assigned(sets)
    origins = {**OPTIONS, **{name: f"--set {name}" for name in other}}
    return config.load(preset, config_file, {**given, **other}, command=command, origins=origins)


def catch_signals() -> threading.Event:
    """Set by the first Ctrl-C or SIGTERM; the second one ends the process."""
    stop = threading.Event()

    def handle(signum: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    return stop


def main() -> None:
    from rl_swarm.cli.app import app

    try:
        app()
    except UserError as error:
        print(f"rl-swarm: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if "://" not in str(error.filename):  # of this machine, and not foreseen
            raise
        print(f"rl-swarm: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
