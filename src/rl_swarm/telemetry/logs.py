"""Writes log lines: to the terminal when there is one, and always to `logs/swarm.log`.

The file in the swarm's folder is a copy of a private one (`storage/private.py`). Whatever replaces the copy costs a
few of its lines and nothing else.
"""

import logging
import sys
import threading
import time
from pathlib import Path

from rl_swarm.protocol.untrusted import printable
from rl_swarm.storage.files import LocalFiles
from rl_swarm.storage.private import log_file
from rl_swarm.storage.settings import StorageSettings
from rl_swarm.storage.shared_log import MAX_LOG
from rl_swarm.telemetry.settings import TelemetrySettings

SWARM_LOG = "logs/swarm.log"
REPAIR_SECONDS = 30.0  # between two attempts to replace a damaged copy
MAX_COPIED = 4 << 20  # bytes of the private log that a new copy begins with


class LineFormatter(logging.Formatter):
    """Escapes control characters: a line may quote a peer."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class SwarmLog(logging.FileHandler):
    """Writes to a private file, and copies every line to the swarm's folder. Several processes append to both."""

    def __init__(self, private: Path, files: LocalFiles) -> None:
        super().__init__(private, encoding="utf-8")
        self.files, self._repair_at = files, 0.0
        self._left = 0  # bytes of the copy when this process wrote to it last

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        try:
            self.files.append(SWARM_LOG, f"{self.format(record)}{self.terminator}".encode())
            size = self.files.stat(SWARM_LOG).st_size
        except OSError:
            self._repair()
            return
        if size < self._left // 2 or size > MAX_LOG:  # cut, or another file; what another process repaired is longer
            self._repair()
        else:
            self._left = size

    def _repair(self) -> None:
        if time.monotonic() < self._repair_at:
            return
        self._repair_at = time.monotonic() + REPAIR_SECONDS
        try:
            self.files.write(SWARM_LOG, Path(self.baseFilename).read_bytes()[-MAX_COPIED:])
            self._left = 0
        except OSError:  # the private log has all lines
            return


def start_logging(
    settings: TelemetrySettings, storage: StorageSettings, root: Path | LocalFiles, who: str, terminal: bool
) -> Path:
    """Set up the package's loggers for this process, and return the private log file behind `logs/swarm.log`.

    A line names the thread that wrote it: a process of several nodes has one for each.
    """
    threading.current_thread().name = who
    # A plain path may be the user's current directory, where nothing is repaired.
    files = root if isinstance(root, LocalFiles) else LocalFiles(root, repair=False)
    private = log_file(storage, files.root)
    logging.raiseExceptions = False  # a log line that cannot be written must not fill the terminal
    level = logging.DEBUG if settings.debug else getattr(logging, settings.log_level.upper())
    package = logging.getLogger("rl_swarm")
    package.setLevel(level)
    package.propagate = False
    package.handlers.clear()
    file = SwarmLog(private, files)
    file.setFormatter(LineFormatter("%(asctime)s %(levelname)-7s %(threadName)s: %(message)s"))
    package.addHandler(file)
    if terminal:
        screen = logging.StreamHandler(sys.stderr)
        screen.setFormatter(LineFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
        package.addHandler(screen)
    return private
