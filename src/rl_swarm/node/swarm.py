"""Runs many nodes on one machine: starts them, restarts the ones that die, stops them all.

On a CPU the children are forked from a server process that has imported torch once (`processes.py`). With a GPU each
starts afresh, and the nodes that share a GPU share a process too. A child that dies is started again, and so is the
fork server.
"""

import faulthandler
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from rl_swarm import environments
from rl_swarm.errors import UserError
from rl_swarm.learning.settings import ModelSettings
from rl_swarm.node.processes import ChildProcess, context_for, obey_parent
from rl_swarm.node.settings import NodeSettings
from rl_swarm.node.worker import coordinate, join, join_together
from rl_swarm.protocol.identity import Identity
from rl_swarm.telemetry.logs import start_logging

log = logging.getLogger(__name__)

GRACE_SECONDS = 20.0  # to finish a step and save, after being told to stop
QUICK_SECONDS = 30.0  # a child that ends this soon after its start did not get anywhere
# So many quick ends in a row, by its own fault or by a signal, are no accident.
MAX_FAILURES, MAX_KILLS = 3, 30
FATAL = 78  # exit code of a child that cannot work as configured: not restarted

Role = Literal["coordinator", "worker"]


class SwarmError(UserError):
    """Reports a child that cannot work; the message is the child's own."""


# For a process of several nodes. Every thread and stream has a workspace of cuBLAS: of 8 MiB, not 32. Every stream has
# blocks of memory of its own: they grow by pages, so that little is lost between them.
SHARED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@dataclass
class NodeProcess:
    name: str
    role: Role
    members: dict[str, NodeSettings]  # by their names
    environ: dict[str, str] = field(default_factory=dict)
    process: ChildProcess | None = None
    started: float = 0.0
    quick_ends: int = 0  # in a row
    done: bool = False


class SwarmProcesses:
    """Runs a coordinator and its nodes, each in its own process."""

    def __init__(self, address: Path, coordinator: NodeSettings, workers: dict[str, NodeSettings]) -> None:
        self.address = address
        self.children = [NodeProcess("coordinator", "coordinator", {"coordinator": coordinator})]
        gpus = visible_gpus(os.environ) if uses_gpu(coordinator.model) else []
        for number, (name, settings) in enumerate(workers.items()):
            each = settings.model.devices_per_node
            sharing = settings.model.nodes_per_device or nodes_sharing(number, len(workers), len(gpus), each)
            settings = settings.changed(nodes_per_device=sharing)
            child = NodeProcess(name, "worker", {name: settings}, gpu_environ(number, gpus, each))
            others = [c for c in self.children if c.environ and c.environ | child.environ == c.environ and each == 1]
            if others:
                others[0].members[name] = settings
                others[0].environ.update({k: v for k, v in SHARED.items() if k not in os.environ})
                others[0].name = f"a process of {len(others[0].members)} nodes"
            else:
                self.children.append(child)
        self.restarts = 0
        self.context = context_for(uses_gpu(coordinator.model))

    def start(self, stop: threading.Event) -> None:
        """Start the children one after the other until told to stop."""
        for child in self.children:
            if not stop.is_set():
                self._start(child)

    def tend(self) -> bool:
        """Restart children that have died; return False once all of them are done."""
        self._adopt([child for child in self.children if child.process and child.process.is_orphan()])
        for child in self.children:
            code = child.process.exit_code() if child.process and not child.done else None
            if code == 0:
                child.done = True
            elif code == FATAL:
                assert child.process is not None
                raise SwarmError(child.process.message() or f"{child.name} cannot work; logs/swarm.log says why.")
            elif code is not None:
                self._restart(child, code)
        return not all(child.done for child in self.children)

    def stop(self) -> None:
        """Tell the children to stop, give them time to save, and end those that do not."""
        self._end(self.children)

    def _adopt(self, orphans: Sequence[NodeProcess]) -> None:
        """Replace children whose fork server has died, since their end could not be seen any more. They save first."""
        if not orphans:
            return
        log.warning("the server that nodes are forked from has died; %d are started again", len(orphans))
        self._end(orphans)
        for child in orphans:
            self.restarts += 1
            self._start(child)

    def _end(self, children: Sequence[NodeProcess]) -> None:
        running = [child.process for child in children if child.process is not None]
        deadline = time.monotonic() + GRACE_SECONDS
        try:
            for process in running:
                process.signal(signal.SIGTERM)
            for process in running:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:  # also when a second Ctrl-C does not wait for that
            for process in running:
                process.signal(signal.SIGKILL)
            for process in running:
                process.join(GRACE_SECONDS)

    def _start(self, child: NodeProcess) -> None:
        arguments = (child.role, child.members, self.address, child.environ)
        child.process = ChildProcess(self.context, child.name, _child_main, *arguments)
        child.started = time.monotonic()

    def _restart(self, child: NodeProcess, code: int) -> None:
        quick = time.monotonic() - child.started < QUICK_SECONDS
        child.quick_ends = child.quick_ends + 1 if quick else 0
        if child.quick_ends >= (MAX_KILLS if code < 0 else MAX_FAILURES):
            raise UserError(
                f"{child.name} ended {child.quick_ends} times soon after its start (last exit code {code}). "
                f"{self.address / 'logs' / 'swarm.log'} says why."
            )
        self.restarts += 1
        log.warning("%s ended with exit code %d and is started again", child.name, code)
        self._start(child)


def uses_gpu(settings: ModelSettings) -> bool:
    """Tell whether nodes may use a GPU, without importing torch."""
    if settings.cpu_only or settings.device == "cpu":
        return False
    return sys.platform == "darwin" or shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that nodes may use, as CUDA_VISIBLE_DEVICES names them; none where that is unknown."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        names = [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",")]
        return [name for name in names if name not in ("", "-1")]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]


def gpus_of(node: int, count: int, each: int) -> list[int]:
    """Choose `each` of `count` GPUs for the node of this number (from 0), in turn; nodes share when they run out."""
    return [(node * each + k) % count for k in range(min(each, count))]


def nodes_sharing(node: int, nodes: int, count: int, each: int) -> int:
    """Count the nodes that use the busiest of this node's GPUs; without GPUs, all share the machine."""
    if count == 0:
        return nodes
    used = Counter(gpu for other in range(nodes) for gpu in gpus_of(other, count, each))
    return max(used[gpu] for gpu in gpus_of(node, count, each))


def gpu_environ(node: int, gpus: Sequence[str], each: int) -> dict[str, str]:
    """Return the variables that show a node only its own GPUs: to its torch they are cuda:0, cuda:1 and so on."""
    if not gpus:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[k] for k in gpus_of(node, len(gpus), each))}


def _child_main(
    role: Role, members: dict[str, NodeSettings], address: Path, environ: dict[str, str], pipe: Connection
) -> None:
    os.environ.update(environ)
    stop = obey_parent(pipe)
    name, settings = next(iter(members.items()))
    private = start_logging(settings.telemetry, settings.storage, address, name, terminal=False)
    faulthandler.enable(private.open("a"))  # where a library brings the process down
    try:
        if role == "coordinator":
            coordinate(address, settings, stop)
        elif len(members) == 1:
            join(address, settings, stop)
        else:
            join_together(address, members, stop)
    except UserError as error:
        log.error("%s", error)
        pipe.send_bytes(str(error).encode())
        os._exit(FATAL)
    except Exception:
        log.exception("%s failed", name)
        os._exit(1)


def worker_settings(settings: NodeSettings) -> dict[str, NodeSettings]:
    """Make one set of settings per node: own key, share of the cores, repository and role; one owner for all."""
    threads = settings.model.threads or max(1, (os.cpu_count() or 1) // settings.swarm.nodes)
    base = Path(settings.network.identity_path).absolute()
    owner = Identity.load_or_create(base).peer_id
    roles = environments.named(settings.task.environment).assign_roles(settings.swarm.nodes)
    workers = {}
    for number in range(1, settings.swarm.nodes + 1):
        first = number == 1 and settings.swarm.network == "folder"  # among peers the coordinator is one of its own
        key = base if first else base.with_name(f"{base.stem}-{number}{base.suffix}")
        node = Identity.load_or_create(key).node
        shared = settings.checkpoint.hub_repo is not None and settings.swarm.nodes > 1
        repo = f"{settings.checkpoint.hub_repo}-{node}" if shared else settings.checkpoint.hub_repo
        workers[node] = settings.changed(
            node_id=node, identity_path=str(key), threads=threads, hub_repo=repo, owner=owner, role=roles[number - 1]
        )
    return workers
