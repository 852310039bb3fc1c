"""Nodes that share a GPU share a process: they learn what separate processes would, and stop and resume alike."""

import copy
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest
import torch
from processes import WHOLE, family, metrics, run, start, state, until
from small_models import PAD, small_model

from rl_swarm.config.settings import Settings
from rl_swarm.errors import UserError
from rl_swarm.learning import memory
from rl_swarm.learning.batches import TrainingGroup
from rl_swarm.learning.memory import CONSUMER_GPU, GIB, MAX_TRAINING_SLOTS, plan
from rl_swarm.learning.parallel import batcher
from rl_swarm.learning.parallel.batcher import DynamicBatcher
from rl_swarm.learning.parallel.shared_device import SharedDevice
from rl_swarm.learning.sizes import ModelShape
from rl_swarm.learning.trainer import Trainer
from rl_swarm.node import worker

SMOLLM2 = ModelShape(30, 576, 1536, 9, 3, 64, 49152)
GPT2 = ModelShape(12, 768, 3072, 12, 12, 64, 50257, gated=False)


@pytest.fixture
def one_gpu(tmp_path):
    """The environment of a machine whose `nvidia-smi` lists one GPU; torch does not see it and takes the CPU."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'GPU 0: a card (UUID: a)'\n")
    program.chmod(0o755)
    return {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.slow
def test_nodes_in_one_process_learn_the_same_as_in_separate_processes(tmp_path: Path, one_gpu) -> None:
    for name, environ in (("shared", one_gpu), ("apart", {})):
        code, output = run(
            tmp_path, "up", "--run", name, "--nodes", "2", "--rounds", "3", "--seed", "7", *WHOLE, **environ
        )
        assert code == 0, output
    assert metrics(tmp_path / "shared") == metrics(tmp_path / "apart")
    code, output = run(tmp_path, "validate", "shared", "--rounds", "3", "--nodes", "2")
    assert code == 0, output
    log = (tmp_path / "shared" / "logs" / "swarm.log").read_text()
    for node in metrics(tmp_path / "shared"):
        assert f" {node}: round 2" in log, "every line names its node"


@pytest.mark.slow
def test_ctrl_c_stops_all_nodes_of_a_process_and_they_resume(tmp_path: Path, one_gpu) -> None:
    address = tmp_path / "r"
    process = start(tmp_path, "up", "--run", "r", "--nodes", "2", "--rounds", "12", *WHOLE, **one_gpu)
    until(lambda: state(address)["round"] >= 1, 150)
    children = family(process)
    pids = {line["pid"] for line in joined(address)}
    assert len(pids) == 1, "both are one process"
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 130 and "--resume r" in output
    _, alive = psutil.wait_procs(children, timeout=240)
    assert not alive
    stopped_at = state(address)["round"]
    assert stopped_at < 11

    code, output = run(tmp_path, "up", "--resume", "r", **one_gpu)
    assert code == 0, output
    for lines in metrics(address).values():
        assert {line["round"] for line in lines if line["kind"] == "round"} == set(range(12))


def joined(address):
    """The `joined` events of all nodes."""
    from rl_swarm.telemetry.journal import read_lines

    found = []
    for path in address.glob("logs/*/training_events.jsonl"):
        found += [line for line in read_lines(path)[0] if line["event"] == "joined"]
    return found


def test_when_a_node_fails_the_others_of_its_process_stop_and_the_failure_is_reported(monkeypatch, tmp_path):
    stopped = []

    def join(address, settings, stop, shared):
        assert shared.nodes == 3
        if settings.network.node_id == "b":
            raise UserError("no disk")
        assert stop.wait(120)
        stopped.append(threading.current_thread().name)

    monkeypatch.setattr(worker, "join", join)
    with pytest.raises(UserError, match="no disk"):
        worker.join_together(tmp_path, {n: Settings.of(node_id=n) for n in "abc"}, threading.Event())
    assert sorted(stopped) == ["a", "c"]


def groups(seed):
    return [TrainingGroup([5, 6, seed], [[8, 9, 7], [10]], [1.0, -1.0], None)]


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])  # with and without a fast path
def test_updates_in_a_shared_slot_equal_those_of_a_trainer_of_its_own(kind):
    settings = Settings.of(learning_rate=0.01)
    models = [small_model(kind, seed=seed) for seed in range(4)]
    own = [Trainer(small_model(kind, seed=seed), PAD, settings.learning) for seed in range(4)]
    device = SharedDevice(4)
    shared = [
        device.make_trainer(m, PAD, settings.learning, plan(ModelShape.of(m.config), 8 * GIB, settings, "cpu", 4))
        for m in models
    ]

    def work(number):
        for turn in range(3):
            shared[number].update(groups(turn + number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, trainer in enumerate(own):
        for turn in range(3):
            trainer.update(groups(turn + number))
        for mine, theirs in zip(trainer.model.parameters(), models[number].parameters(), strict=True):
            assert torch.equal(mine, theirs)
            assert theirs.grad is None, "gradients belong to the slot"
    (slots,) = device.slots.values()
    assert slots.qsize() == MAX_TRAINING_SLOTS == 2


def test_nodes_with_another_loss_or_another_model_have_slots_of_their_own():
    device, settings = SharedDevice(3), Settings()
    models = [small_model("llama"), small_model("llama"), small_model("gpt_neox")]
    for model, temperature in zip(models, (1.0, 0.5, 1.0), strict=True):
        alone = Trainer(copy.deepcopy(model), PAD, settings.learning, temperature).update(groups(1))
        room = plan(ModelShape.of(model.config), 8 * GIB, settings, "cpu", 3)
        trainer = device.make_trainer(model, PAD, settings.learning, room, temperature)
        assert trainer.update(groups(1)).grad_norm == pytest.approx(alone.grad_norm)
    assert len(device.slots) == 3


def test_a_slot_is_freed_when_memory_runs_out_and_the_update_is_made_in_smaller_batches(monkeypatch, caplog):
    settings = Settings.of(learning_rate=0.01)
    device = SharedDevice(2)
    model = small_model()
    trainer = device.make_trainer(
        model, PAD, settings.learning, plan(ModelShape.of(model.config), 8 * GIB, settings, "cpu", 2)
    )
    expected = Trainer(small_model(), PAD, settings.learning)
    expected.batch_tokens = 3
    real, calls = Trainer._accumulate, []

    def accumulate(self, given, tokens):
        calls.append(sum(len(g.completions) for g in given))
        if len(calls) == 1:
            raise torch.OutOfMemoryError("full")
        real(self, given, tokens)

    monkeypatch.setattr(Trainer, "_accumulate", accumulate)
    trainer.update(groups(1))
    (slots,) = device.slots.values()
    assert calls == [2, 1, 1] and slots.qsize() == 2
    assert "now hold at most" in caplog.text
    monkeypatch.setattr(Trainer, "_accumulate", real)
    expected.update(groups(1))
    for mine, theirs in zip(expected.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("shape", "tokens"), [(SMOLLM2, 4096), (GPT2, 6144)])
def test_eight_nodes_of_a_small_model_fit_into_a_consumer_gpu(shape, tokens):
    settings = Settings.of(model="gpt2", local_groups=8, external_groups=0)
    found = plan(shape, 140 * GIB, settings, "cuda", 8)
    assert found.fits and found.needed < CONSUMER_GPU
    assert found.needed > 8 * (memory.resident_bytes(shape, settings.learning) + memory.NODE_OVERHEAD)
    assert (found.nodes, found.training_slots, found.sequences, found.batch_tokens) == (8, 1, 64, tokens)
    assert "8 nodes need together" in str(found)
    assert "64 sequences at once of each, 1 in training" in str(found)
    one = plan(shape, 140 * GIB, settings, "cuda")
    assert found.needed < 5 * one.needed
    huge = ModelShape(24, 896, 4864, 14, 2, 64, 151936)
    assert plan(huge, 140 * GIB, settings, "cuda", 8).needed > memory.CONSUMER_GPU, (
        "more memory is used where there is more"
    )
    assert plan(huge, 140 * GIB, settings, "cuda", 8).training_slots == MAX_TRAINING_SLOTS
    assert not plan(huge, 30 * GIB, settings, "cuda", 8).fits


@pytest.fixture
def long_pause(monkeypatch):
    """A thread that waits although all members have asked does not return in time."""
    monkeypatch.setattr(batcher, "MIN_PAUSE", 3600)
    monkeypatch.setattr(batcher, "MAX_PAUSE", 3600)


class Doubling:
    """Answers every order with its double, and records the batches."""

    def __init__(self):
        self.batches, self.allowed = [], threading.Event()
        self.allowed.set()
        self.batcher = DynamicBatcher(self.serve)
        self.results = {}

    def serve(self, kind, orders):
        assert self.allowed.wait(120)
        self.batches.append((kind, sorted(orders)))
        if 13 in orders:
            raise torch.OutOfMemoryError("full")
        return [2 * order for order in orders]

    def ask(self, member, kind, order):
        try:
            self.results[order] = self.batcher.submit(member, kind, order)
        except torch.OutOfMemoryError as error:
            self.results[order] = error

    def threads_of(self, *orders):
        """Start a thread per order."""
        threads = [threading.Thread(target=self.ask, args=order, daemon=True) for order in orders]
        for thread in threads:
            thread.start()
        return threads

    def until_waiting(self, count):
        until(lambda: len(self.batcher.waiting) == count)


def finished(threads):
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


def test_one_thread_runs_the_batch_of_all_members_and_a_single_member_does_not_wait(long_pause):
    server = Doubling()
    assert [server.batcher.submit("a", "x", order) for order in (1, 2)] == [2, 4]
    server.batcher.members.update("abc")
    finished(server.threads_of(("a", "x", 3), ("b", "x", 4), ("c", "x", 5)))
    assert server.batches == [("x", [1]), ("x", [2]), ("x", [3, 4, 5])]
    assert server.results == {3: 6, 4: 8, 5: 10}
    with server.batcher.removing("c"):
        pass
    finished(server.threads_of(("a", "x", 6), ("b", "x", 7)))
    assert server.batches[-1] == ("x", [6, 7])


def test_requests_that_arrive_meanwhile_form_the_next_batches_by_kind():
    server = Doubling()
    server.allowed.clear()
    threads = server.threads_of(("a", "x", 1))
    until(lambda: server.batcher.busy and not server.batcher.waiting)
    threads += server.threads_of(("b", "x", 2), ("c", "y", 3), ("d", "x", 4), ("a", "x", 5))
    threads += server.threads_of(("b", "x", 6))
    server.until_waiting(5)
    server.allowed.set()
    finished(threads)
    assert server.results == {order: 2 * order for order in range(1, 7)}
    assert server.batches[0] == ("x", [1]) and ("y", [3]) in server.batches
    assert sorted(len(orders) for _, orders in server.batches) == [1, 1, 1, 3], "no member is twice in a batch"


def test_results_are_handed_out_as_they_are_made(long_pause):
    server, received = Doubling(), threading.Semaphore(0)

    def one_by_one(kind, orders):
        for order in orders:
            yield 2 * order
            assert received.acquire(timeout=240)
        raise torch.OutOfMemoryError("full")  # when all results are handed out

    server.batcher = DynamicBatcher(one_by_one)
    server.batcher.members.update("abc")
    threads = server.threads_of(("a", "x", 1), ("b", "x", 2), ("c", "x", 3))
    for count in (1, 2):
        until(lambda count=count: len(server.results) == count)
        received.release()
    received.release()
    finished(threads)
    assert server.results == {1: 2, 2: 4, 3: 6}


def test_an_error_reaches_all_threads_of_its_batch_and_no_others(long_pause):
    server = Doubling()
    server.batcher.members.update("abc")
    finished(server.threads_of(("a", "x", 12), ("b", "x", 13), ("c", "x", 14)))
    errors = [server.results[order] for order in (12, 13, 14)]
    assert all(isinstance(error, torch.OutOfMemoryError) and str(error) == "full" for error in errors)
    assert len(set(map(id, errors))) == 3, "each has a traceback of its own"
    finished(server.threads_of(("a", "x", 1), ("b", "x", 2), ("c", "x", 3)))
    assert server.batches[-1] == ("x", [1, 2, 3]) and server.results[2] == 4
