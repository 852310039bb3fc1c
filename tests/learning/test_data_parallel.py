"""A node on two devices learns what it learns on one, and its workers never outlive it."""

import dataclasses
import os
import signal
import subprocess
import sys

import psutil
import pytest
import torch
from processes import until
from small_models import save_small

from rl_swarm.config.settings import Settings
from rl_swarm.errors import ConfigError
from rl_swarm.learning import checkpoints
from rl_swarm.learning.batches import TrainingGroup
from rl_swarm.learning.parallel.data_parallel import DataParallelError, DataParallelPolicy, check_devices, partition
from rl_swarm.learning.policy import Policy
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.rollouts import Completion, Group

PROMPTS = ["What is 2 plus 2?", "What is 3 plus 4?", "What is 1 plus 1?", "And 9 minus 7, then?", "Hi"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = save_small(tmp_path_factory.mktemp("model"))
    return Settings.of(model=str(folder), max_new_tokens=12, learning_rate=1e-3, cpu_only=True, devices_per_node=2)


@pytest.fixture
def load():
    """Makes policies of several ranks, and ends their workers after the test."""
    made = []

    def make(settings, path=None):
        policy = DataParallelPolicy.load(settings, "Answer well.", path)
        made.append(policy)
        return policy

    yield make
    for policy in made:
        policy.close()


def single(settings):
    return Policy.load(settings.changed(devices_per_node=1), "Answer well.")


def groups_of(policy, seed=0):
    """Own answers with the sampler's log-probabilities, and a peer's without."""
    answered = zip(PROMPTS, policy.sample(PROMPTS, 4, seed), strict=True)
    own = [
        Group("me", Question("chain_sum", n, n, prompt, "4"), tuple(found), (1.0, 0.0, 0.5, 0.0), False)
        for n, (prompt, found) in enumerate(answered)
    ]
    words = tuple(Completion(text, True) for text in ("<answer>4</answer>", "seven and more", "7"))
    return [*own, Group("peer", Question("chain_sum", 9, 9, PROMPTS[0], "4"), words, (1.0, 0.0, 0.0), True)]


def same(update, other):
    for name, value in dataclasses.asdict(update).items():
        assert getattr(other, name) == pytest.approx(value, rel=1e-4, abs=2e-5), name


def close(one, other):
    """Nearly all weights are close: Adam divides by the gradient's size, so rounding moves weights with tiny ones."""
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    apart = torch.cat([((a - b).abs() - 1e-4 * b.abs()).flatten() for a, b in pairs])
    assert (apart > 1e-5).float().mean() < 1e-3, apart.max()


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_tokens": 64, "kl_weight": 0.1},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"lora_rank": 4, "learning_rate": 1e-4}, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_learn_what_one_device_learns(settings, load, changes):
    settings = settings.changed(**changes)
    alone, policy = single(settings), load(settings)
    for number in range(3):
        groups = groups_of(alone, number)
        one, both = alone.learn(groups), policy.learn(groups)
        assert one.tokens > 50 and one.grad_norm > 0
        same(one, both)
        close(alone, policy)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_learn_what_one_learns(settings, load):
    settings = settings.changed(cpu_only=False, device="cuda")
    alone, policy = single(settings), load(settings)
    groups = groups_of(alone)
    one, both = alone.learn(groups), policy.learn(groups)
    assert both.grad_norm == pytest.approx(one.grad_norm, rel=1e-2)
    assert both.loss == pytest.approx(one.loss, abs=1e-3)
    policy.workers[0].process.kill()
    with pytest.raises(DataParallelError, match="worker 1"):
        policy.learn(groups)


def test_a_question_is_answered_with_the_draws_of_one_device(settings, load):
    alone, policy = single(settings), load(settings)
    alone.batch = 3 * 4  # three questions at once, as many as each of the two gets
    expected, found = (policy.sample(PROMPTS, 4, seed=5) for policy in (alone, policy))
    assert len({c.text for group in expected for c in group}) > 5
    assert [[c.tokens for c in group] for group in found] == [[c.tokens for c in group] for group in expected]
    for group, other in zip(found, expected, strict=True):
        for a, b in zip(group, other, strict=True):
            assert (a.text, a.ended) == (b.text, b.ended)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    assert policy.sample([], 4, 0) == []
    texts = [[g[0].text for g in p.sample(PROMPTS[:1], 1, 0, greedy=True)] for p in (alone, policy)]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_rank_without_completions_takes_the_same_step(settings, load):
    alone, policy = single(settings), load(settings.changed(devices_per_node=3))
    words = (Completion("4", True), Completion("7", True))
    group = Group("peer", Question("t", 0, 0, "Hi", "4"), words, (1.0, 0.0), True)
    training = [alone._tokens(group)]
    assert [len(partition(training, rank, 3)) for rank in range(3)] == [1, 0, 1]
    same(alone.learn([group]), policy.learn([group]))
    close(alone, policy)
    assert policy.learn([dataclasses.replace(group, rewards=(1.0, 1.0))]).tokens == 0


def test_all_ranks_resume_from_a_checkpoint(settings, load, tmp_path):
    """A worker gets the weights and moments of rank 0, wherever those came from."""
    alone = single(settings)
    alone.learn(groups_of(alone))
    place = checkpoints.Place("swarm", "me", "m", 0, 0, 1)
    folder = checkpoints.Checkpoints(tmp_path, Identity.generate(), "node").save(alone, place)
    policy = load(settings, folder)
    checkpoints.restore_optimizer(policy, folder)
    groups = groups_of(alone, 1)
    same(alone.learn(groups), policy.learn(groups))
    close(alone, policy)
    pid = policy.workers[0].process.pid
    policy.close()
    assert not psutil.pid_exists(pid)


def test_when_memory_runs_out_on_one_device_all_ranks_take_smaller_batches(settings, load, monkeypatch):
    alone, policy = single(settings), load(settings)
    policy.start()
    accumulate, calls = policy.trainer._accumulate, []

    def short_of_memory(*args):
        calls.append(args)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no more")
        return accumulate(*args)

    monkeypatch.setattr(policy.trainer, "_accumulate", short_of_memory)
    groups = groups_of(alone)
    same(alone.learn(groups), policy.learn(groups))
    close(alone, policy)
    assert 0 < policy.trainer.batch_tokens <= policy.plan.batch_tokens // 2


def test_a_killed_worker_raises_an_error_at_once(settings, load):
    policy = load(settings)
    groups = groups_of(policy)
    policy.workers[0].process.kill()
    with pytest.raises(DataParallelError, match="worker 1 ended with exit code -9"):
        policy.learn(groups)
    with pytest.raises(DataParallelError, match="worker 1"):
        policy.sample(PROMPTS, 4, 0)


@pytest.mark.slow
def test_a_worker_killed_during_an_update_raises_an_error(settings, load, monkeypatch):
    policy = load(settings)
    groups = groups_of(policy)
    pid = policy.workers[0].process.pid
    os.kill(pid, signal.SIGSTOP)  # it will not get to adding up
    accumulate = policy.trainer._accumulate

    def and_kill(*args):
        os.kill(pid, signal.SIGKILL)
        return accumulate(*args)

    monkeypatch.setattr(policy.trainer, "_accumulate", and_kill)
    with pytest.raises(DataParallelError, match="worker 1 ended with exit code -9"):
        policy.learn(groups)


def test_the_error_of_a_worker_is_reported(settings, load, tmp_path):
    folder = save_small(tmp_path / "model")
    policy = load(settings.changed(model=str(folder)))
    (folder / "config.json").unlink()
    with pytest.raises(
        DataParallelError, match=r"worker 1 failed: (ModelError|NoSuchModel): MODEL_NAME=.* there is no config.json"
    ):
        policy.sample(PROMPTS, 1, 0)


@pytest.mark.slow
def test_weights_that_differ_are_noticed(settings, load):
    policy = load(settings)
    groups = groups_of(policy)
    with torch.no_grad():
        next(policy.model.parameters())[0, 0] += 1e-3
    with pytest.raises(DataParallelError, match="other weights"):
        policy.learn(groups)


@pytest.mark.slow
def test_helpers_end_with_their_leader_however_it_ends(settings):
    script = (
        "import sys, time; from rl_swarm.config.settings import Settings\n"
        "from rl_swarm.learning.parallel.data_parallel import DataParallelLeader\n"
        f"given = Settings.of(model={settings.model.model!r}, cpu_only=True, devices_per_node=3)\n"
        "policy = DataParallelLeader.load(given, '')\n"
        "policy.start(); print(policy.folder.name, *[h.process.pid for h in policy.workers], flush=True)\n"
        "time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        folder, *pids = process.stdout.readline().split()
        workers = [psutil.Process(int(pid)) for pid in pids]
        assert len(workers) == 2 and os.path.isdir(folder)
        for worker in workers:
            worker.terminate()  # a signal to the process group: rank 0 decides
        process.kill()
        process.wait(120)
        until(lambda: not any(h.is_running() and h.status() != "zombie" for h in workers))
        assert not os.path.exists(folder)
    finally:
        process.kill()
        process.wait()


def test_too_many_devices_are_refused_with_the_reason():
    check_devices(2, 2)
    with pytest.raises(ConfigError, match=r"devices_per_node=4, but this node sees 2 GPUs. Use devices_per_node=2"):
        check_devices(4, 2)


def test_parts_are_complete_and_even():
    generator = torch.Generator().manual_seed(0)

    def tokens(most):
        return torch.randint(1, 40, (int(torch.randint(1, most, (), generator=generator)),)).tolist()

    groups = []
    for _ in range(6):
        completions = [tokens(30) for _ in range(5)]
        logprobs = [[-float(token) for token in ids] for ids in completions]
        groups.append(TrainingGroup(tokens(20), completions, [float(len(ids)) for ids in completions], logprobs))
    parts = [partition(groups, rank, 4) for rank in range(4)]
    assert [ids for part in parts for g in part for ids in g.completions] == [
        ids for g in groups for ids in g.completions
    ]
    sizes = [sum(len(ids) for g in part for ids in g.completions) for part in parts]
    assert max(sizes) - min(sizes) <= 60
    assert sum(len(part) for part in parts) <= len(groups) + 3  # prompts computed twice
    for group in (g for part in parts for g in part):
        assert group.advantages == [float(len(ids)) for ids in group.completions]
        assert group.logprobs == [[-float(token) for token in ids] for ids in group.completions]
    assert partition(groups, 0, 1) == groups
