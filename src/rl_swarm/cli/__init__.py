"""Defines the commands.

Importing this loads little, so that Ctrl-C is handled from the first moments on; each command imports what it needs.
"""

import os
import select
import signal
import sys
import threading
from typing import TYPE_CHECKING

from rl_swarm.commands import program as program
from rl_swarm.commands import quoted as quoted
from rl_swarm.errors import UserError
from rl_swarm.protocol.untrusted import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rl_swarm.config.resolve import Resolved

INTERRUPTED = 130  # exit code of a command that was told to stop


def parse_assignments(sets: "Sequence[str] | None") -> dict[str, str]:
    """Parse every `--set name=value`."""
    found = {}
    for assignment in sets or []:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise UserError(f"--set {assignment}: write it as --set name=value.")
        found[name] = value
    return found


def resolve_settings(
    command: str,
    preset: "Mapping[str, object]",
    config_file: "Path | None",
    sets: "Sequence[str] | None",
    **flags: object,
) -> "Resolved":
    """Resolve the settings of a command: its flags and `--set` win over everything else."""
    from rl_swarm.cli.flags import NAMES
    from rl_swarm.config import resolve as config

    given, other = {name: value for name, value in flags.items() if value is not None}, parse_assignments(sets)
    renamed = {name: f"flag {flag.replace('/', ' or ')}" for name, flag in NAMES.items()}
    origins = {**renamed, **{name: f"--set {name}" for name in other}}
    return config.load(preset, config_file, {**given, **other}, command=command, origins=origins)


def catch_signals() -> threading.Event:
    """Return an event that the first Ctrl-C, SIGTERM or end of the terminal sets; a second Ctrl-C or SIGTERM ends the
    process."""
    stop = threading.Event()

    def handle(signum: int, frame: object) -> None:
        if signum == signal.SIGHUP:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a shell and the kernel may both send it
            _let_go_of_terminal()
        elif stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` has it
        signal.signal(signal.SIGHUP, handle)
    return stop


def _let_go_of_terminal() -> None:
    """Send output nowhere once the terminal is gone: an error while writing would keep the command from saving."""
    for stream in (sys.__stdout__, sys.__stderr__):
        try:
            written = stream.fileno() if stream else -1
            poll = select.poll()
            poll.register(written, 0)
            if written >= 0 and poll.poll(0):  # an error or a hang-up, which are always reported
                os.dup2(os.open(os.devnull, os.O_WRONLY), written)
        except (OSError, ValueError):
            continue


def _leave(signum: int, frame: object) -> None:
    """End a command that has not begun anything yet, even amid its imports, where an exception could get lost."""
    os.write(2, b"\nrl-swarm: stopped before anything was started\n")
    os._exit(INTERRUPTED)


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from rl_swarm.cli.app import app

    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # an error can still be reported here
    except UserError as error:
        print(f"rl-swarm: {printable(str(error))}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except OSError as error:
        if error.filename is None:  # not about a file of the user
            raise
        print(printable(f"rl-swarm: {error.filename}: {error.strerror}"), file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
