"""Spreads one node over several devices: the node's process leads, and a helper process serves each other device.

Everyone has the whole model. The leader hands out questions to answer and groups to learn from. In an
update everyone computes the gradient of its share, the gradients are added up, and everyone takes the
same step, so the copies stay equal to the last bit; that is checked after every step.

Commands and answers travel over a pipe per helper, and only tensors through torch.distributed, on
loopback. The pipe is also what a helper lives by: when the leader ends, however it ends, the pipe closes
and the helper ends too. A helper that ends early makes the leader fail with its last words.
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
from rl_swarm.learning import trainer
from rl_swarm.learning.batches import TrainingGroup, part_of
from rl_swarm.learning.devices import out_of_memory, pick_device
from rl_swarm.learning.parallel.sharing import Sharing
from rl_swarm.learning.policy import Policy
from rl_swarm.learning.settings import PolicySettings
from rl_swarm.learning.trainer import Trainer, Update
from rl_swarm.protocol.rollouts import Completion, Group

log = logging.getLogger(__name__)

START_SECONDS = 600.0  # to import torch and load the model
PATIENCE_SECONDS = 600.0  # that one waits for another after its own share is done
LAST_WORDS_SECONDS = 5.0
# Of an update: sums over completions, which add up over the shares.
UPDATE_METRICS = trainer.UPDATE_METRICS[:-1]  # the last is counted apart


class TeamError(RuntimeError):
    """A helper that failed. Started again, the node goes on from its last checkpoint."""


class Start(msgspec.Struct, frozen=True):
    settings: PolicySettings
    system_prompt: str
    rank: int
    threads: int


class SampleTask(msgspec.Struct, frozen=True, tag=True):
    prompts: list[str]
    count: int
    seed: int
    greedy: bool


class Learn(msgspec.Struct, frozen=True, tag=True):
    groups: list[Group]


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    completions: list[list[Completion]] = []
    checksum: int = 0
    error: str = ""


class TeamTrainer(Trainer):
    """A trainer that computes the gradient of its share of the completions, and takes the step of all."""

    watch: Callable[[], None] = staticmethod(lambda: None)  # raises when waiting is in vain

    def _make_moments(self) -> None:
        """Leave it to `_gradients`, where all learn of it when one has no memory."""

    def _gradients(self, groups: Sequence[TrainingGroup], tokens: int) -> torch.Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        exhausted = torch.zeros(1, device=self.model.device)
        self.figures.zero_()
        try:
            super()._make_moments()
            mine = share(groups, rank, size)
            if mine:
                super()._gradients(mine, tokens)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            exhausted += 1
        figures = torch.cat([self.figures, exhausted])
        self._add_up([figures])
        if figures[-1] > 0:
            raise torch.OutOfMemoryError("a device of the team ran out of memory")
        for parameter in self.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._add_up([p.grad for p in self.parameters() if p.grad is not None])
        return figures[:-1]

    def _add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            while not work.is_completed():
                self.watch()
                time.sleep(0.0002)
            work.wait()

    def take_over(self) -> None:
        """Everyone gets the leader's weights and Adam's moments."""
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
        """Of the trained weights' bits: equal ones give the same number, on any device."""
        return sum(int(p.detach().view(torch.int32).sum(dtype=torch.int64)) for p in self.parameters())


class DataParallelMember(Policy):
    """A policy with a part in a team."""

    trainer_class = TeamTrainer
    trainer: TeamTrainer

    def meet(self, rank: int, folder: str) -> None:
        """Finds all others through a file in the folder, and takes over what the leader has."""
        size = self.settings.model.devices_per_node
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo0" if sys.platform == "darwin" else "lo")
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=dist.FileStore(os.path.join(folder, "store"), size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=PATIENCE_SECONDS),
            device_id=self.device if self.device.type == "cuda" else None,
        )
        self.trainer.take_over()


@dataclass
class Helper:
    rank: int
    process: "subprocess.Popen[bytes]"
    pipe: Connection
    stderr: IO[bytes]


class DataParallelLeader(DataParallelMember):
    """The policy of a node with several devices."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.helpers: list[Helper] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.trainer.watch = self._watch

    @classmethod
    def load(
        cls,
        settings: PolicySettings,
        system_prompt: str,
        path: Path | None = None,
        sharing: Sharing | None = None,
    ) -> "DataParallelLeader":
        device, wanted = pick_device(settings.model), settings.model.devices_per_node
        if device.type == "cuda":
            check_devices(wanted, torch.cuda.device_count())
            torch.cuda.set_device(0)
        elif device.type != "cpu":
            check_devices(wanted, 1)
        policy = super().load(settings, system_prompt, path, sharing)
        assert isinstance(policy, cls)
        return policy

    def start(self) -> None:
        """Starts the helpers. They get the weights and moments that this policy has now."""
        if self.helpers:
            return
        self.folder = tempfile.TemporaryDirectory(prefix="rl-swarm-team-")
        threads = torch.get_num_threads()  # the same for all: sums depend on it
        for rank in range(1, self.settings.model.devices_per_node):
            self.helpers.append(_start_helper(rank, self.folder.name))
            self._send(self.helpers[-1], Start(self.settings.part(PolicySettings), self.system_prompt, rank, threads))
        for helper in self.helpers:
            self._receive(helper, START_SECONDS)
        with self._blaming():
            self.meet(0, self.folder.name)
        for helper in self.helpers:
            self._receive(helper)
        log.info("%d devices share the work", self.settings.model.devices_per_node)

    def sample(self, prompts: Sequence[str], count: int, seed: int, greedy: bool = False) -> list[list[Completion]]:
        """As one device does it that takes so many questions at once as each has here, with the same draws."""
        self.start()
        each = -(-len(prompts) // (len(self.helpers) + 1))
        asked = []
        for helper in self.helpers:
            first = helper.rank * each
            if part := list(prompts[first : first + each]):
                self._send(helper, SampleTask(part, count, seed + first, greedy))
                asked.append(helper)
        done = super().sample(prompts[:each], count, seed, greedy)
        for helper in asked:
            done += self._receive(helper).completions
        return done

    def learn(self, groups: Sequence[Group]) -> Update:
        self.start()
        for helper in self.helpers:
            self._send(helper, Learn(list(groups)))
        with self._blaming():
            update = super().learn(groups)
        checksum = self.trainer.checksum()
        for helper in self.helpers:
            if self._receive(helper).checksum != checksum:
                raise TeamError(f"helper {helper.rank} has other weights than its leader after the same update")
        return update

    def close(self) -> None:
        for helper in self.helpers:
            helper.pipe.close()
        for helper in self.helpers:
            helper.process.kill()
            helper.process.wait()
            helper.stderr.close()
        self.helpers.clear()
        if dist.is_initialized() and self.device.type == "cpu":  # NCCL might wait for those who are gone
            dist.destroy_process_group()
        if self.folder is not None:
            self.folder.cleanup()

    def _send(self, helper: Helper, message: Start | SampleTask | Learn) -> None:
        with self._blaming():
            helper.pipe.send_bytes(msgspec.msgpack.encode(message))

    def _receive(self, helper: Helper, seconds: float = PATIENCE_SECONDS) -> Reply:
        """The helper's answer; any other helper that fails meanwhile ends the waiting too."""
        deadline = time.monotonic() + seconds
        while not helper.pipe.poll(0.1):
            self._watch()
            if time.monotonic() > deadline:
                raise TeamError(f"helper {helper.rank} has not answered for {seconds:.0f} s")
        with self._blaming():
            reply = msgspec.msgpack.decode(helper.pipe.recv_bytes(), type=Reply)
        if reply.error:
            raise TeamError(f"helper {helper.rank} failed: {reply.error}")
        return reply

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """A connection that broke is told as what broke it: the helper at its other end."""
        try:
            yield
        except TeamError:
            raise
        except (RuntimeError, EOFError, OSError) as error:
            self._watch(LAST_WORDS_SECONDS)
            if isinstance(error, RuntimeError):
                raise
            raise TeamError(f"a helper lives, but its pipe is closed: {error}") from error

    def _watch(self, seconds: float = 0.0) -> None:
        """Raises if a helper has ended, or does within this time."""
        deadline = time.monotonic() + seconds
        while True:
            for helper in self.helpers:
                if helper.process.poll() is not None:
                    raise TeamError(f"helper {helper.rank} {_last_words(helper)}")
            if time.monotonic() >= deadline:
                return
            time.sleep(0.05)


def check_devices(wanted: int, found: int) -> None:
    if wanted > found:
        raise ConfigError(
            f"devices_per_node={wanted}, but this node sees {found} GPU{'s' * (found != 1)}. "
            f"Use devices_per_node={found}, or CPU_ONLY=True."
        )


def share(groups: Sequence[TrainingGroup], rank: int, size: int) -> list[TrainingGroup]:
    """The part of a rank, so that all have about the same number of tokens.

    All completions lie end to end and are cut into stretches, so at most one prompt per cut is computed twice.
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
            mine.append(part_of(group, picked[0], picked[-1] + 1))
    return mine


def _start_helper(rank: int, folder: str) -> Helper:
    ours, theirs = Pipe()
    stderr = tempfile.TemporaryFile()  # noqa: SIM115 it is open as long as the helper lives
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
    return Helper(rank, process, ours, stderr)


def _last_words(helper: Helper) -> str:
    with suppress(EOFError, OSError):
        while helper.pipe.poll():
            if words := msgspec.msgpack.decode(helper.pipe.recv_bytes(), type=Reply).error:
                return f"failed: {words}"
    helper.stderr.seek(0)
    lines = helper.stderr.read().decode(errors="replace").strip().splitlines()
    return f"ended with exit code {helper.process.returncode} ({lines[-1] if lines else 'no message'})"


def _help(pipe: Connection, folder: str) -> None:
    """The life of a helper: do what the leader says until its pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a signal to all processes is for the leader to handle
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, folder, commands), daemon=True).start()

    def reply(message: Reply) -> None:
        pipe.send_bytes(msgspec.msgpack.encode(message))

    try:
        start = msgspec.msgpack.decode(commands.get(), type=Start)
        torch.set_num_threads(start.threads)
        if pick_device(start.settings.model).type == "cuda":
            torch.cuda.set_device(start.rank)
        policy = DataParallelMember.load(start.settings, start.system_prompt)
        assert isinstance(policy, DataParallelMember)
        reply(Reply())
        policy.meet(start.rank, folder)
        reply(Reply())
        while True:
            command = msgspec.msgpack.decode(commands.get(), type=SampleTask | Learn)
            if isinstance(command, SampleTask):
                made = policy.sample(command.prompts, command.count, command.seed, command.greedy)
                reply(Reply(completions=made))
            else:
                policy.learn(command.groups)
                reply(Reply(checksum=policy.trainer.checksum()))
    except Exception as error:  # noqa: BLE001 the leader raises it
        where = traceback.extract_tb(error.__traceback__)[-1]
        reply(Reply(error=f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"))
        os._exit(1)


def _listen(pipe: Connection, folder: str, commands: "queue.SimpleQueue[bytes]") -> None:
    """Takes in commands, also while the helper works, so that the end of the leader is noticed at once."""
    while True:
        try:
            commands.put(pipe.recv_bytes())
        except (EOFError, OSError):
            shutil.rmtree(folder, ignore_errors=True)  # the leader may have had no time to
            os._exit(0)


if __name__ == "__main__":
    _help(Connection(int(sys.argv[1])), sys.argv[2])
