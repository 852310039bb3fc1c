"""Names the commands that a message or the page suggests."""

import os
import shlex


def program() -> str:
    """Return the name the user calls this program by."""
    return os.environ.get("RL_SWARM_PROGRAM", "rl-swarm")


def quoted(path: object) -> str:
    """Quote a path for a shell."""
    return shlex.quote(str(path))
