"""Executes cells and notebooks with a real kernel."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import psutil
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def executed(name: str, cwd: Path, seconds: int = 600, **parameters: object) -> Any:
    """Run all cells of a notebook and return it. `parameters` are set after the cell that is tagged so."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), f"{name} is kept without outputs"
    (place,) = [k for k, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    lines = [f"{parameter} = {value!r}" for parameter, value in parameters.items()]
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell("\n".join(lines)))
    NotebookClient(
        notebook, timeout=seconds, kernel_name="python3", resources={"metadata": {"path": str(cwd)}}
    ).execute()
    return notebook


def output(notebook: Any, cell: str) -> list[Any]:
    (found,) = [c for c in notebook.cells if c.id == cell]
    return list(found.outputs)


class Kernel:
    """Runs cells that can be interrupted."""

    def __init__(self, manager: KernelManager) -> None:
        self.manager = manager
        self.client = manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=240)

    @property
    def family(self) -> list[psutil.Process]:
        """Return the processes that its cells have started."""
        return psutil.Process(self.manager.provisioner.pid).children(recursive=True)

    def start(self, code: str) -> str:
        return self.client.execute(code)

    def finish(self, cell: str, seconds: float = 400) -> list[dict[str, Any]]:
        """Return everything that a cell put out until it ended, as messages."""
        messages = []
        deadline = time.monotonic() + seconds
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") != cell:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return messages
            if message["msg_type"] not in ("status", "execute_input"):
                messages.append(message)

    def run(self, code: str) -> list[dict[str, Any]]:
        return self.finish(self.start(code))


@contextmanager
def kernel(cwd: Path) -> Iterator[Kernel]:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(cwd))
    try:
        yield Kernel(manager)
    finally:
        manager.shutdown_kernel(now=True)
