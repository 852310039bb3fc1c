"""The commands. Importing this loads no torch; each command imports what it needs."""

import sys

from rl_swarm.errors import UserError


def main() -> None:
    from rl_swarm.cli.app import app

    try:
        app()
    except UserError as error:
        print(f"rl-swarm: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
