"""`rl-swarm` below a cell: the same command, which saves and stops when the pipe from its kernel closes, however that ends."""

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
