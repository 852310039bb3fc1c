"""The commands. Importing this loads no torch; each command imports what it needs."""

import os
import sys

from rl_swarm.errors import UserError


def program() -> str:
    """How the user calls this program, for the commands that it suggests."""
    return os.environ.get("RL_SWARM_PROGRAM", "rl-swarm")


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
