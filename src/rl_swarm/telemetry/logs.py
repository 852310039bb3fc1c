"""Log lines: to the terminal when there is one to write to, and always to `logs/swarm.log`."""

import logging
import sys
import threading
from pathlib import Path

from rl_swarm.config import Settings
from rl_swarm.errors import UserError


def start_logging(settings: Settings, folder: Path, who: str, terminal: bool) -> None:
    """Sets up the package's loggers for this process. Several processes append to one file, line by line.

    A line names the thread that wrote it: a process of several nodes has one for each.
    """
    threading.current_thread().name = who
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(folder / "swarm.log", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{folder.absolute() / 'swarm.log'} cannot be written: {error.strerror or error}. Start in a directory that can "
            "be written."
        ) from error
    logging.raiseExceptions = False  # a log line that cannot be written is no reason to cover the terminal
    level = logging.DEBUG if settings.debug else getattr(logging, settings.log_level.upper())
    root = logging.getLogger("rl_swarm")
    root.setLevel(level)
    root.propagate = False
    root.handlers.clear()
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(threadName)s: %(message)s"))
    root.addHandler(file)
    if terminal:
        screen = logging.StreamHandler(sys.stderr)
        screen.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        root.addHandler(screen)
