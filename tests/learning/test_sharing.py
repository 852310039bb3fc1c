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

from rl_swarm.errors import UserError
from rl_swarm.learning import memory
from rl_swarm.learning.batches import TrainingGroup
from rl_swarm.learning.memory import COMMON_CARD, DESKS, GIB, plan
from rl_swarm.learning.parallel import batcher as meeting
from rl_swarm.learning.parallel.batcher import DynamicBatcher
from rl_swarm.learning.parallel.sharing import Sharing
from rl_swarm.learning.sizes import ModelShape
from rl_swarm.learning.trainer import Trainer
from rl_swarm.node import worker
from rl_swarm.settings import Settings

SMOLLM2 = ModelShape(30, 576, 1536, 9, 3, 64, 49152)
GPT2 = ModelShape(12, 768, 3072, 12, 12, 64, 50257, gated=False)


@pytest.fixture
def one_gpu(tmp_path):
    """The environment of a machine that seems to have one GPU; torch, which does not find it, takes the CPU."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'GPU 0: a card (UUID: a)'\n")
    program.chmod(0o755)
    return {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.slow
def test_nodes_in_one_process_learn_what_nodes_in_processes_of_their_own_do(tmp_path: Path, one_gpu) -> None:
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
        assert f" {node}: round 2" in log, "every line says who wrote it"


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
    """What nodes said when they joined."""
    from rl_swarm.telemetry.journal import read_lines

    found = []
    for path in address.glob("logs/*/training_events.jsonl"):
        found += [line for line in read_lines(path)[0] if line["event"] == "joined"]
    return found


def test_when_a_node_fails_the_others_of_its_process_stop_and_the_failure_is_told(monkeypatch, tmp_path):
    stopped = []

    def join(address, settings, stop, sharing):
        assert sharing.nodes == 3
        if settings.node_id == "b":
            raise UserError("no disk")
        assert stop.wait(120)
        stopped.append(threading.current_thread().name)

    monkeypatch.setattr(worker, "join", join)
    with pytest.raises(UserError, match="no disk"):
        worker.join_together(tmp_path, {n: Settings(node_id=n) for n in "abc"}, threading.Event())
    assert sorted(stopped) == ["a", "c"]


def groups(seed):
    return [TrainingGroup([5, 6, seed], [[8, 9, 7], [10]], [1.0, -1.0], None)]


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])  # with and without a fast path
def test_updates_at_a_shared_desk_are_those_of_a_trainer_of_its_own(kind):
    settings = Settings(learning_rate=0.01)
    models = [small_model(kind, seed=seed) for seed in range(4)]
    own = [Trainer(small_model(kind, seed=seed), PAD, settings) for seed in range(4)]
    sharing = Sharing(4)
    shared = [
        sharing.admit(m, PAD, settings, plan(ModelShape.of(m.config), 8 * GIB, settings, "cpu", 4)) for m in models
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
            assert theirs.grad is None, "gradients belong to the desk"
    (desks,) = sharing.desks.values()
    assert desks.qsize() == DESKS == 2


def test_nodes_with_another_loss_or_another_model_have_desks_of_their_own():
    sharing, given = Sharing(3), [Settings(), Settings(temperature=0.5), Settings()]
    models = [small_model("llama"), small_model("llama"), small_model("gpt_neox")]
    for model, settings in zip(models, given, strict=True):
        alone = Trainer(copy.deepcopy(model), PAD, settings).update(groups(1))
        trainer = sharing.admit(model, PAD, settings, plan(ModelShape.of(model.config), 8 * GIB, settings, "cpu", 3))
        assert trainer.update(groups(1)).grad_norm == pytest.approx(alone.grad_norm)
    assert len(sharing.desks) == 3


def test_a_desk_is_given_back_when_memory_runs_out_and_the_update_is_done_in_pieces(monkeypatch, caplog):
    settings = Settings(learning_rate=0.01)
    sharing = Sharing(2)
    model = small_model()
    trainer = sharing.admit(model, PAD, settings, plan(ModelShape.of(model.config), 8 * GIB, settings, "cpu", 2))
    expected = Trainer(small_model(), PAD, settings)
    expected.batch_tokens = 3
    real, calls = Trainer._accumulate, []

    def accumulate(self, given, tokens):
        calls.append(sum(len(g.completions) for g in given))
        if len(calls) == 1:
            raise torch.OutOfMemoryError("full")
        real(self, given, tokens)

    monkeypatch.setattr(Trainer, "_accumulate", accumulate)
    trainer.update(groups(1))
    (desks,) = sharing.desks.values()
    assert calls == [2, 1, 1] and desks.qsize() == 2
    assert "now hold at most" in caplog.text
    monkeypatch.setattr(Trainer, "_accumulate", real)
    expected.update(groups(1))
    for mine, theirs in zip(expected.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("shape", "tokens"), [(SMOLLM2, 4096), (GPT2, 6144)])
def test_eight_nodes_of_a_small_model_are_planned_into_a_common_card(shape, tokens):
    settings = Settings(model="gpt2", local_groups=8, external_groups=0)
    found = plan(shape, 140 * GIB, settings, "cuda", 8)
    assert found.fits and found.needed < COMMON_CARD
    assert found.needed > 8 * (memory.keeping(shape, settings) + memory.SEAT)
    assert (found.nodes, found.desks, found.sequences, found.batch_tokens) == (8, 1, 64, tokens)
    assert "8 nodes need together" in str(found)
    assert "64 sequences at once of each, 1 in training" in str(found)
    one = plan(shape, 140 * GIB, settings, "cuda")
    assert found.needed < 5 * one.needed
    huge = ModelShape(24, 896, 4864, 14, 2, 64, 151936)
    assert plan(huge, 140 * GIB, settings, "cuda", 8).needed > memory.COMMON_CARD, "where there is more, it is used"
    assert plan(huge, 140 * GIB, settings, "cuda", 8).desks == DESKS
    assert not plan(huge, 30 * GIB, settings, "cuda", 8).fits


@pytest.fixture
def long_pause(monkeypatch):
    """Who waits when nobody is to be waited for does not come back in time."""
    monkeypatch.setattr(meeting, "LEAST_PAUSE", 3600)
    monkeypatch.setattr(meeting, "MAX_PAUSE", 3600)


class Kitchen:
    """Serves everybody twice what they order, and keeps a book."""

    def __init__(self):
        self.book, self.open = [], threading.Event()
        self.open.set()
        self.meeting = DynamicBatcher(self.serve)
        self.got = {}

    def serve(self, kind, orders):
        assert self.open.wait(120)
        self.book.append((kind, sorted(orders)))
        if 13 in orders:
            raise torch.OutOfMemoryError("full")
        return [2 * order for order in orders]

    def ask(self, who, kind, order):
        try:
            self.got[order] = self.meeting.ask(who, kind, order)
        except torch.OutOfMemoryError as error:
            self.got[order] = error

    def guests(self, *orders):
        """Threads that ask, each for itself."""
        threads = [threading.Thread(target=self.ask, args=order, daemon=True) for order in orders]
        for thread in threads:
            thread.start()
        return threads

    def until_waiting(self, count):
        until(lambda: len(self.meeting.waiting) == count)


def finished(threads):
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


def test_one_serves_all_who_are_there_and_alone_nobody_waits(long_pause):
    kitchen = Kitchen()
    assert [kitchen.meeting.ask("a", "soup", order) for order in (1, 2)] == [2, 4]
    kitchen.meeting.members.update("abc")
    finished(kitchen.guests(("a", "soup", 3), ("b", "soup", 4), ("c", "soup", 5)))
    assert kitchen.book == [("soup", [1]), ("soup", [2]), ("soup", [3, 4, 5])]
    assert kitchen.got == {3: 6, 4: 8, 5: 10}
    with kitchen.meeting.left("c"):
        pass
    finished(kitchen.guests(("a", "soup", 6), ("b", "soup", 7)))
    assert kitchen.book[-1] == ("soup", [6, 7])


def test_who_comes_meanwhile_is_served_next_with_those_who_want_the_same():
    kitchen = Kitchen()
    kitchen.open.clear()
    threads = kitchen.guests(("a", "soup", 1))
    until(lambda: kitchen.meeting.busy and not kitchen.meeting.waiting)
    threads += kitchen.guests(("b", "soup", 2), ("c", "fish", 3), ("d", "soup", 4), ("a", "soup", 5))
    threads += kitchen.guests(("b", "soup", 6))
    kitchen.until_waiting(5)
    kitchen.open.set()
    finished(threads)
    assert kitchen.got == {order: 2 * order for order in range(1, 7)}
    assert kitchen.book[0] == ("soup", [1]) and ("fish", [3]) in kitchen.book
    assert sorted(len(orders) for _, orders in kitchen.book) == [1, 1, 1, 3], "nobody is served twice at once"


def test_results_are_handed_out_as_they_are_made_and_the_last_to_whoever_made_them(long_pause):
    kitchen, tasted = Kitchen(), threading.Semaphore(0)

    def courses(kind, orders):
        for order in orders:
            yield 2 * order
            assert tasted.acquire(timeout=240)
        raise torch.OutOfMemoryError("full")  # when all have what they want

    kitchen.meeting = DynamicBatcher(courses)
    kitchen.meeting.members.update("abc")
    threads = kitchen.guests(("a", "soup", 1), ("b", "soup", 2), ("c", "soup", 3))
    for count in (1, 2):
        until(lambda count=count: len(kitchen.got) == count)
        tasted.release()
    tasted.release()
    finished(threads)
    assert kitchen.got == {1: 2, 2: 4, 3: 6}


def test_an_error_reaches_everybody_of_the_party_and_nobody_else(long_pause):
    kitchen = Kitchen()
    kitchen.meeting.members.update("abc")
    finished(kitchen.guests(("a", "soup", 12), ("b", "soup", 13), ("c", "soup", 14)))
    errors = [kitchen.got[order] for order in (12, 13, 14)]
    assert all(isinstance(error, torch.OutOfMemoryError) and str(error) == "full" for error in errors)
    assert len(set(map(id, errors))) == 3, "each has a traceback of its own"
    finished(kitchen.guests(("a", "soup", 1), ("b", "soup", 2), ("c", "soup", 3)))
    assert kitchen.book[-1] == ("soup", [1, 2, 3]) and kitchen.got[2] == 4
