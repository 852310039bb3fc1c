"""NVIDIA's multi-process service: lets nodes compute on one GPU at the same time instead of in turn.

Without it the driver gives the GPU to one process after the other, and small models leave it idle most of that
time. It is started for a swarm's own processes, ends with the swarm, and is done without where it is missing.
"""

import ctypes
import logging
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

CONTROL = "nvidia-cuda-mps-control"
START_SECONDS = 10.0


class SharedGpu:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.folder: Path | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> dict[str, str]:
        """The variables with which a process takes part; none if there is no such service here."""
        running = "CUDA_MPS_PIPE_DIRECTORY" in self.environ or Path("/tmp/nvidia-mps/control").exists()
        if running or sys.platform != "linux" or shutil.which(CONTROL) is None:
            return {}
        self.folder = Path(tempfile.mkdtemp(prefix="rl-swarm-mps-"))
        variables = {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.folder),
            "CUDA_MPS_LOG_DIRECTORY": str(self.folder),
        }
        self.process = subprocess.Popen(
            [CONTROL, "-f"],
            env={**self.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=_end_with_parent,
            start_new_session=True,  # Ctrl-C is for the nodes, which still need the GPU to save
        )
        deadline = time.monotonic() + START_SECONDS
        while not (self.folder / "control").exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                log.warning("%s did not start: nodes take turns at the GPU", CONTROL)
                self.stop()
                return {}
            time.sleep(0.05)
        return variables

    def stop(self) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self._ask("quit")
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    def _ask(self, command: str) -> None:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": str(self.folder)}
        try:
            subprocess.run(
                [CONTROL], input=f"{command}\n".encode(), env={**self.environ, **variables}, timeout=5,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            log.warning("%s does not answer", CONTROL)


def _end_with_parent() -> None:
    """The kernel ends the service when the swarm is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
