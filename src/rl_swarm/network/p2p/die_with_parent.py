"""Runs a program that ends when its parent ends: `python die_with_parent.py PROGRAM ARGUMENTS`.

Signals to the parent's process group (Ctrl-C, `timeout`) do not reach it: the parent still needs it to end well. The
kernel sends the signal on Linux; elsewhere the program outlives a parent that was killed by force.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    os.setsid()
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call above
            sys.exit(1)
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
