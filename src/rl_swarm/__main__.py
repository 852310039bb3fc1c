"""Starts the program; from here on Ctrl-C ends it without a traceback, however much is still to be imported."""

import sys


def main() -> None:
    try:
        from rl_swarm.cli import main as command
    except KeyboardInterrupt:
        sys.stderr.write("\nrl-swarm: stopped before anything was started\n")
        raise SystemExit(130) from None
    command()


if __name__ == "__main__":
    main()
