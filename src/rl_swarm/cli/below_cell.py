"""Runs `rl-swarm` below a notebook's cell; it saves and stops when the pipe from the kernel closes."""

import os
import signal
import threading

from rl_swarm.cli import main


def _stop_with_kernel() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_stop_with_kernel, daemon=True).start()
    main()
