"""Runs programs where the kernel offers no isolation: in Monty, an interpreter without access to the system.

`python -m rl_swarm.scoring.sandbox.monty monty SECONDS WALL`, started by `sandbox`. Monty (the extra `monty`) supports
a part of Python: no `yield`, few modules, no files. Untrusted values are converted to Python's in this process and not
in the node. Messages to the node are those of `fork_server`.
"""

import json
import math
import signal
import socket
import sys
import time
from typing import Any

from rl_swarm.scoring.sandbox.fork_server import MAX_OUTPUT, MEMORY, STATUS, describe_error
from rl_swarm.scoring.sandbox.literals import write

WALL_FACTOR = 5  # of the limit: Monty measures wall-clock time and not processor time


def run(pool: Any, request: str, seconds: float, until: float) -> list[str]:
    """Return a line for the code, and one for every call that begins in time."""
    limits = {"max_feed_duration_secs": WALL_FACTOR * seconds, "max_memory": MEMORY}
    lines: list[str] = []
    with pool.checkout(limits=limits, os_policy={"sleep": "zero", "random_start": {"seed": 0}}) as session:
        for text in request.split("\0"):
            if time.monotonic() > until:
                break
            try:
                value = session.feed_run(text, print_callback=lambda stream, printed: None)
                lines.append("=" + write(value) if lines else "=")
            except Exception as error:  # noqa: BLE001 the program or the interpreter may raise anything
                lines.append("!" + describe_error(error).removeprefix("MontyRuntimeError: "))
                if len(lines) == 1:
                    break
    return lines


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the node; this process ends with its socket
    control = socket.socket(fileno=0)
    try:
        from pydantic_monty import Monty
    except ImportError:
        control.send(json.dumps({"error": "pydantic-monty is not installed"}).encode() + b"\n")
        return
    seconds, wall = float(sys.argv[2]), float(sys.argv[3])
    with Monty(max_processes=1, request_timeout=2 * WALL_FACTOR * seconds) as pool:
        ready = run(pool, "def f(x): return x + 1\0f(1)", seconds, math.inf)
        status: dict[str, object] = {"denied": {}} if ready == ["=", "=2"] else {"error": str(ready)}
        control.send(json.dumps(status).encode() + b"\n")
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return
            began = time.monotonic()
            with socket.socket(fileno=descriptors[0]) as channel:
                request = b""
                while part := channel.recv(1 << 18):
                    request += part
                lines = run(pool, request.decode(errors="replace"), seconds, began + wall)
                text = "".join(line + "\n" for line in lines)
                channel.send(text.encode(errors="backslashreplace")[:MAX_OUTPUT])
            took = time.monotonic() - began
            control.send(STATUS.pack(0, took > wall, int(took), 0, 0, 0))


if __name__ == "__main__":
    main()
