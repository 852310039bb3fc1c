"""The commands. Importing this loads no torch; each command imports what it needs."""

import os
import signal
import sys
import threading

from rl_swarm.errors import UserError


def program() -> str:
    """How the user calls this program, for the commands that it suggests."""
    return os.environ.get("RL_SWARM_PROGRAM", "rl-swarm")


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
