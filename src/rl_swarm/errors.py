"""Defines the errors that a user can mend, and the exit code of each kind."""

import difflib
from collections.abc import Iterable

FAILED = 1  # what was asked for did not work, or is not so
USAGE = 2  # the command line or a setting cannot be used as it is written
STOPPED = 128  # and the signal's number: 130 after Ctrl-C, 143 after SIGTERM
INTERRUPTED = STOPPED + 2


class UserError(Exception):
    """Its message names the setting or file, the value, and what would work. Shown without a traceback."""

    exit_code = FAILED

    def _render_traceback_(self) -> list[str]:
        """What Jupyter shows of it."""
        return [f"rl-swarm: {self}"]


class UsageError(UserError):
    """Reports arguments that contradict each other or cannot be read."""

    exit_code = USAGE


class ConfigError(UsageError):
    """A setting that cannot be used. The message names it, its value, its source and what would work."""


class ModelError(UserError):
    """A model that cannot be loaded; the message says what would work."""


class NoSuchModel(ModelError):
    """Reports a name that is no model's."""

    exit_code = USAGE


def suggestion(given: object, known: Iterable[str]) -> str:
    """Return the question which of the known names was meant; nothing where none is near."""
    close = difflib.get_close_matches(str(given).lower(), list(known), n=1, cutoff=0.7)
    return f" Did you mean `{close[0]}`?" if close else ""
