"""Spreads one node over several devices: data parallelism with a worker process for every device but the first.

Every rank has the whole model. Rank 0, the node's process, hands out questions to answer and groups to train on. In
an update each rank computes the gradient of its part of the groups, gradients are all-reduced, and all ranks take the
same step. So the copies stay equal to the last bit, which a checksum verifies after every step.

Commands and replies travel over a pipe per worker, and only tensors through torch.distributed, on loopback. When rank
0 ends, however it ends, the pipe closes and the worker ends too. When a worker ends early, rank 0 fails with the
worker's error.
"""

import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import msgspec
import torch
import torch.distributed as dist

from rl_swarm.errors import ConfigError
from rl_swarm.learning.batches import TrainingGroup, subgroup
from rl_swarm.learning.devices import out_of_memory, pick_device
from rl_swarm.learning.parallel.shared_device import SharedDevice
from rl_swarm.learning.policy import Policy
from rl_swarm.learning.settings import PolicySettings
from rl_swarm.learning.trainer import Trainer, Update
from rl_swarm.protocol.rollouts import Completion, Group

log = logging.getLogger(__name__)

START_SECONDS = 600.0  # to import torch and load the model
REPLY_SECONDS = 600.0  # that a rank waits for another after its own work
EXIT_SECONDS = 5.0  # that a failing worker may take to end


class DataParallelError(RuntimeError):
    """Raised when a worker fails. After a restart the node resumes from its last checkpoint."""


class WorkerSetup(msgspec.Struct, frozen=True):
    settings: PolicySettings
    system_prompt: str
    rank: int
    threads: int


class SampleTask(msgspec.Struct, frozen=True, tag=True):
    prompts: list[str]
    count: int
    seed: int
    greedy: bool


class TrainTask(msgspec.Struct, frozen=True, tag=True):
    groups: list[Group]


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    completions: list[list[Completion]] = []
    checksum: int = 0
    error: str = ""


class DataParallelTrainer(Trainer):
    """Computes the gradient of its part of the completions, and takes the common step."""

    check_peers: Callable[[], None] = staticmethod(lambda: None)  # raises when another rank has failed

    def _make_moments(self) -> None:
        """Leave it to `_gradients`, where all ranks learn of it when one runs out of memory."""

    def _gradients(self, groups: Sequence[TrainingGroup], tokens: int) -> torch.Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        exhausted = torch.zeros(1, device=self.model.device)
        self.metrics.zero_()
        try:
            super()._make_moments()
            mine = partition(groups, rank, size)
            if mine:
                super()._gradients(mine, tokens)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            exhausted += 1
        metrics = torch.cat([self.metrics, exhausted])
        self._all_reduce([metrics])
        if metrics[-1] > 0:
            raise torch.OutOfMemoryError("one of the node's devices ran out of memory")
        for parameter in self.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._all_reduce([p.grad for p in self.parameters() if p.grad is not None])
        return metrics[:-1]

    def _all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            while not work.is_completed():
                self.check_peers()
                time.sleep(0.0002)
            work.wait()

    def broadcast_state(self) -> None:
        """Give all ranks the weights and Adam's moments of rank 0."""
        for weight in self.model.parameters():
            dist.broadcast(weight.detach(), 0)
        known = torch.tensor([bool(self.optimizer.state.get(p)) for p in self.parameters()])
        known = known.to(self.model.device, torch.uint8)
        dist.broadcast(known, 0)
        for parameter, is_known in zip(self.parameters(), known.tolist(), strict=True):
            if is_known:
                state = self.optimizer.state[parameter]
                state.setdefault("step", torch.zeros((), device=parameter.device))
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(parameter))
                for name in ("step", "exp_avg", "exp_avg_sq"):
                    dist.broadcast(state[name], 0)

    def checksum(self) -> int:
        """Return a checksum of the bits of the trained weights, the same on any device."""
        return sum(int(p.detach().view(torch.int32).sum(dtype=torch.int64)) for p in self.parameters())


class DataParallelRank(Policy):
    """Samples and trains on one rank."""

    trainer_class = DataParallelTrainer
    trainer: DataParallelTrainer

    def join_group(self, rank: int, folder: str) -> None:
        """Join the process group through a file in the folder, and take over the state of rank 0."""
        size = self.settings.model.devices_per_node
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo0" if sys.platform == "darwin" else "lo")
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=dist.FileStore(os.path.join(folder, "store"), size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=REPLY_SECONDS),
            device_id=self.device if self.device.type == "cuda" else None,
        )
        self.trainer.broadcast_state()


@dataclass
class WorkerProcess:
    rank: int
    process: "subprocess.Popen[bytes]"
    pipe: Connection
    stderr: IO[bytes]


class DataParallelPolicy(DataParallelRank):
    """Samples and trains on several devices: runs as rank 0, and starts a worker for every other rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.workers: list[WorkerProcess] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.trainer.check_peers = self._check_workers

    @classmethod
    def load(
        cls, settings: PolicySettings, system_prompt: str, path: Path | None = None, shared: SharedDevice | None = None
    ) -> "DataParallelPolicy":
        device, wanted = pick_device(settings.model), settings.model.devices_per_node
        if device.type == "cuda":
            check_devices(wanted, torch.cuda.device_count())
            torch.cuda.set_device(0)
        elif device.type != "cpu":
            check_devices(wanted, 1)
        policy = super().load(settings, system_prompt, path, shared)
        assert isinstance(policy, cls)
        return policy

    def start(self) -> None:
        """Start the workers with the weights and moments that this policy has now."""
        if self.workers:
            return
        self.folder = tempfile.TemporaryDirectory(prefix="rl-swarm-ranks-")
        threads = torch.get_num_threads()  # equal in all ranks: sums depend on it
        settings = self.settings.part(PolicySettings)  # a worker knows no other sections
        for rank in range(1, self.settings.model.devices_per_node):
            self.workers.append(_start_worker(rank, self.folder.name))
            self._send(self.workers[-1], WorkerSetup(settings, self.system_prompt, rank, threads))
        for worker in self.workers:
            self._receive(worker, START_SECONDS)
        with self._naming_failed_worker():
            self.join_group(0, self.folder.name)
        for worker in self.workers:
            self._receive(worker)
        log.info("%d devices partition the work", self.settings.model.devices_per_node)

    def sample(self, prompts: Sequence[str], count: int, seed: int, greedy: bool = False) -> list[list[Completion]]:
        """Sample a part of the prompts on each rank, with the draws that one device makes for that part."""
        self.start()
        each = -(-len(prompts) // (len(self.workers) + 1))
        asked = []
        for worker in self.workers:
            first = worker.rank * each
            if part := list(prompts[first : first + each]):
                self._send(worker, SampleTask(part, count, seed + first, greedy))
                asked.append(worker)
        done = super().sample(prompts[:each], count, seed, greedy)
        for worker in asked:
            done += self._receive(worker).completions
        return done

    def learn(self, groups: Sequence[Group]) -> Update:
        self.start()
        for worker in self.workers:
            self._send(worker, TrainTask(list(groups)))
        with self._naming_failed_worker():
            update = super().learn(groups)
        checksum = self.trainer.checksum()
        for worker in self.workers:
            if self._receive(worker).checksum != checksum:
                raise DataParallelError(f"worker {worker.rank} has other weights than rank 0 after the same update")
        return update

    def close(self) -> None:
        for worker in self.workers:
            worker.pipe.close()
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()
            worker.stderr.close()
        self.workers.clear()
        if dist.is_initialized() and self.device.type == "cpu":  # NCCL might wait for workers that have ended
            dist.destroy_process_group()
        if self.folder is not None:
            self.folder.cleanup()

    def _send(self, worker: WorkerProcess, message: WorkerSetup | SampleTask | TrainTask) -> None:
        with self._naming_failed_worker():
            worker.pipe.send_bytes(msgspec.msgpack.encode(message))

    def _receive(self, worker: WorkerProcess, seconds: float = REPLY_SECONDS) -> Reply:
        """Return the worker's reply; raise if any worker fails meanwhile."""
        deadline = time.monotonic() + seconds
        while not worker.pipe.poll(0.1):
            self._check_workers()
            if time.monotonic() > deadline:
                raise DataParallelError(f"worker {worker.rank} has not answered for {seconds:.0f} s")
        with self._naming_failed_worker():
            reply = msgspec.msgpack.decode(worker.pipe.recv_bytes(), type=Reply)
        if reply.error:
            raise DataParallelError(f"worker {worker.rank} failed: {reply.error}")
        return reply

    @contextmanager
    def _naming_failed_worker(self) -> Iterator[None]:
        """Raise the failure of a worker in place of the broken connection that it left."""
        try:
            yield
        except DataParallelError:
            raise
        except (RuntimeError, EOFError, OSError) as error:
            self._check_workers(EXIT_SECONDS)
            if isinstance(error, RuntimeError):
                raise
            raise DataParallelError(f"a worker runs, but its pipe is closed: {error}") from error

    def _check_workers(self, seconds: float = 0.0) -> None:
        """Raise if a worker has ended or ends within this time."""
        deadline = time.monotonic() + seconds
        while True:
            for worker in self.workers:
                if worker.process.poll() is not None:
                    raise DataParallelError(f"worker {worker.rank} {_exit_reason(worker)}")
            if time.monotonic() >= deadline:
                return
            time.sleep(0.05)


def check_devices(wanted: int, found: int) -> None:
    if wanted > found:
        raise ConfigError(
            f"devices_per_node={wanted}, but this node sees {found} GPU{'s' * (found != 1)}. "
            f"Use devices_per_node={found}, or CPU_ONLY=True."
        )


def partition(groups: Sequence[TrainingGroup], rank: int, size: int) -> list[TrainingGroup]:
    """Return the completions of a rank, so that all ranks have about the same number of tokens.

    Each rank gets a contiguous range of completions, so at most one prompt per cut is computed twice.
    """

    def cost(group: TrainingGroup, ids: Sequence[int]) -> float:
        return len(ids) + len(group.prompt) / len(group.completions)

    total = sum(cost(group, ids) for group in groups for ids in group.completions)
    mine, before = [], 0.0
    for group in groups:
        picked = []
        for number, ids in enumerate(group.completions):
            middle = before + cost(group, ids) / 2
            before += cost(group, ids)
            if int(middle * size / total) == rank:
                picked.append(number)
        if picked:
            mine.append(subgroup(group, picked[0], picked[-1] + 1))
    return mine


def _start_worker(rank: int, folder: str) -> WorkerProcess:
    ours, theirs = Pipe()
    stderr = tempfile.TemporaryFile()  # noqa: SIM115 open as long as the worker runs
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-m", "rl_swarm.learning.parallel.data_parallel", str(theirs.fileno()), folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        pass_fds=[theirs.fileno()],
        env=environment,
    )
    theirs.close()
    return WorkerProcess(rank, process, ours, stderr)


def _exit_reason(worker: WorkerProcess) -> str:
    with suppress(EOFError, OSError):
        while worker.pipe.poll():
            if error := msgspec.msgpack.decode(worker.pipe.recv_bytes(), type=Reply).error:
                return f"failed: {error}"
    worker.stderr.seek(0)
    lines = worker.stderr.read().decode(errors="replace").strip().splitlines()
    return f"ended with exit code {worker.process.returncode} ({lines[-1] if lines else 'no message'})"


def _worker_main(pipe: Connection, folder: str) -> None:
    """Run commands of rank 0 until its pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles signals to the process group
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, folder, commands), daemon=True).start()

    def reply(message: Reply) -> None:
        pipe.send_bytes(msgspec.msgpack.encode(message))

    try:
        start = msgspec.msgpack.decode(commands.get(), type=WorkerSetup)
        torch.set_num_threads(start.threads)
        if pick_device(start.settings.model).type == "cuda":
            torch.cuda.set_device(start.rank)
        policy = DataParallelRank.load(start.settings, start.system_prompt)
        assert isinstance(policy, DataParallelRank)
        reply(Reply())
        policy.join_group(start.rank, folder)
        reply(Reply())
        while True:
            command = msgspec.msgpack.decode(commands.get(), type=SampleTask | TrainTask)
            if isinstance(command, SampleTask):
                made = policy.sample(command.prompts, command.count, command.seed, command.greedy)
                reply(Reply(completions=made))
            else:
                policy.learn(command.groups)
                reply(Reply(checksum=policy.trainer.checksum()))
    except Exception as error:  # noqa: BLE001 rank 0 raises it
        where = traceback.extract_tb(error.__traceback__)[-1]
        reply(Reply(error=f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"))
        os._exit(1)


def _listen(pipe: Connection, folder: str, commands: "queue.SimpleQueue[bytes]") -> None:
    """Receive commands in a thread of its own, so that the end of rank 0 is noticed at once."""
    while True:
        try:
            commands.put(pipe.recv_bytes())
        except (EOFError, OSError):
            shutil.rmtree(folder, ignore_errors=True)  # rank 0 may have been killed
            os._exit(0)


if __name__ == "__main__":
    _worker_main(Connection(int(sys.argv[1])), sys.argv[2])
