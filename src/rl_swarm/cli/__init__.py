"""Defines the commands.

Importing this loads little, so that Ctrl-C is handled from the first moments on; each command imports what it needs.
"""

import difflib
import os
import select
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from rl_swarm.commands import program as program
from rl_swarm.commands import quoted as quoted
from rl_swarm.errors import FAILED, INTERRUPTED, STOPPED, USAGE, UsageError, UserError
from rl_swarm.protocol.untrusted import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rl_swarm.config.resolve import Resolved


def parse_assignments(sets: "Sequence[str] | None") -> dict[str, str]:
    """Parse every `--set name=value`."""
    found = {}
    for assignment in sets or []:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise UsageError(f"--set {assignment}: write it as --set name=value.")
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


class StopRequest(threading.Event):
    """Is set when a command is told to stop: by a signal, or on the page."""

    exit_code = INTERRUPTED


def catch_signals() -> StopRequest:
    """Return an event that the first Ctrl-C, SIGTERM or end of the terminal sets; a second Ctrl-C or SIGTERM ends the
    process."""
    stop = StopRequest()

    def handle(signum: int, frame: object) -> None:
        if signum == signal.SIGTERM and not stop.is_set():
            stop.exit_code = STOPPED + signum
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


def end_if_stopped(stop: StopRequest) -> None:
    """End a command that was told to stop, with the exit code that says so."""
    if stop.is_set():
        sys.exit(stop.exit_code)


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
    """Run the command line, and end with the exit code that docs/commands.md lists."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from rl_swarm.cli.app import app

    try:
        try:
            code = app(standalone_mode=False)
        finally:
            sys.stdout.flush()  # an error can still be reported here
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(FAILED)
    except Exception as error:
        code, message = _exit_code(error), _message(error)
        if code is None:
            raise
        if message:
            print(printable(message if message.startswith("Usage: ") else f"rl-swarm: {message}"), file=sys.stderr)
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code if isinstance(code, int) else 0)


def _exit_code(error: Exception) -> int | None:
    """Return the exit code for an error that is told in one line; None for one that a traceback explains."""
    import typer

    if isinstance(error, UserError):
        return error.exit_code
    if isinstance(error, typer.Abort):  # Ctrl-C at a question
        return INTERRUPTED
    if _is_usage(error):
        return USAGE
    if isinstance(error, OSError) and error.filename is not None:  # about a file of the user
        return FAILED
    return None


def _message(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    if not _is_usage(error):
        return str(error)
    context: Any = getattr(error, "ctx", None)
    told: str = error.format_message()  # type: ignore[attr-defined]
    if type(error).__name__ == "NoArgsIsHelpError":
        return told
    if type(error).__name__ == "NoSuchOption":
        option, known = (
            getattr(error, "option_name", ""),
            [name for each in context.command.params for name in each.opts],
        )
        close = difflib.get_close_matches(option, known, n=1)
        told = f"There is no option {option}." + (f" Did you mean {close[0]}?" if close else "")
    words: list[str] = []
    while context is not None and context.parent is not None:
        words.insert(0, context.info_name)
        context = context.parent
    command = " ".join(words)
    told = " ".join(told.split())
    full_stop = "" if told.endswith((".", "?")) else "."
    return f"{told}{full_stop} `{program()} help{' ' * bool(command)}{command}` explains it."


def _is_usage(error: Exception) -> bool:
    """Tell whether the library that reads the command line refused it; its classes have moved between packages."""
    return any(kind.__name__ == "ClickException" for kind in type(error).__mro__)
