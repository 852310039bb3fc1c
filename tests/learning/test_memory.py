"""Memory is planned from what is available, and the memory of a node does not grow with time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_models import FAST, KINDS, small_model
from transformers import AutoConfig

from rl_swarm.config.resolve import SettingsLayer, resolve
from rl_swarm.config.settings import Settings
from rl_swarm.errors import ConfigError
from rl_swarm.learning import devices, memory
from rl_swarm.learning.devices import CATALOGUE, TINY
from rl_swarm.learning.memory import (
    GIB,
    available,
    cgroups,
    micro_batch_bytes,
    plan,
    processes_on_device,
    resident_bytes,
    sampling_bytes,
    training_slot_bytes,
)
from rl_swarm.learning.policy import Policy
from rl_swarm.learning.settings import ModelSettings
from rl_swarm.learning.sizes import ModelShape

BY_NAME = {card.name: card.shape for card in CATALOGUE}
SHAPE = BY_NAME["Qwen/Qwen2.5-0.5B-Instruct"]
REAL = Settings.of(model="a-model")
DEVICES = ("cpu", "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BY_NAME)
def test_more_memory_never_means_smaller_sizes_and_none_is_ever_zero(name, device):
    before, most = (0, 0), memory.max_batch_tokens(BY_NAME[name], REAL.learning, device)
    for gib in (0, 1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 141, 1000):
        found = plan(BY_NAME[name], gib * GIB, REAL, device)
        assert found.batch_tokens >= 64
        assert found.sequences >= REAL.sampling.generations and found.sequences % REAL.sampling.generations == 0
        assert found.sequences <= 512 and found.batch_tokens <= most
        assert found.batch_tokens >= before[0] and found.sequences >= before[1]
        assert found.needed <= 0.9 * gib * GIB if found.fits else found.sequences == REAL.sampling.generations
        before = (found.batch_tokens, found.sequences)
    assert before == (most, 512) and memory.MAX_TOKENS <= most <= 2 * memory.MAX_TOKENS


@pytest.mark.parametrize("device", DEVICES)
def test_a_plan_honours_the_settings(device):
    enough = 1000 * GIB
    assert plan(SHAPE, 0, Settings.of(model="a", batch_tokens=700), device).batch_tokens == 700
    assert plan(SHAPE, enough, Settings.of(model="a", batch_tokens=9000), device).batch_tokens == 9000
    assert plan(SHAPE, enough, Settings.of(model="a", generations=24), device).sequences == 504
    assert plan(SHAPE, 0, Settings.of(model="a", generations=256), device).sequences == 256

    def needed(free=enough, **changes):
        return plan(SHAPE, free, Settings.of(model="a", **changes), device).needed

    assert needed() - needed(lora_rank=16) > 11 * SHAPE.parameters  # gradients and moments
    assert needed(kl_weight=0.1) - needed() == 4 * SHAPE.parameters
    assert needed(0, max_new_tokens=64) < needed(0)
    assert needed(0, generations=4) < needed(0, generations=256)
    assert needed(batch_tokens=512) < needed()


def test_a_plan_that_does_not_fit_says_so_and_what_would_help():
    assert plan(SHAPE, 24 * GIB, REAL, "cuda").fits
    found = plan(SHAPE, 4 * GIB, REAL, "cuda")
    assert not found.fits
    assert "4.0 GiB available" in str(found) and "lora_rank" in str(found)
    assert "micro-batches of 4096 tokens, 512 sequences at once" in str(plan(SHAPE, 80 * GIB, REAL, "cuda"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_sizes_of_every_family_are_read_from_its_configuration(kind):
    model = small_model(kind, vocabulary=3000)
    shape = ModelShape.of(model.config)
    assert shape.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.09)
    assert shape.packed == (kind in FAST)
    assert plan(shape, GIB, Settings(), "cpu").needed > memory.BASE


def test_the_catalogue_has_the_published_sizes():
    assert ModelShape.of(AutoConfig.from_pretrained(TINY)) == BY_NAME["tiny"]
    published = {
        "smollm2-135m": 134_515_008,
        "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
        "Qwen/Qwen3-0.6B": 596_049_920,
        "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
        "Qwen/Qwen3-1.7B": 1_720_574_976,
    }
    for name, parameters in published.items():
        assert BY_NAME[name].parameters == pytest.approx(parameters, rel=1e-3)


def test_the_documented_table_is_the_one_in_the_code():
    text = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text()
    assert devices.memory_table() in text, "replace it by what `python -m rl_swarm.learning.devices` prints"


def test_trained_parameters_of_lora_are_counted_as_peft_counts_them():
    pytest.importorskip("peft")
    from rl_swarm.learning import lora

    for kind in ("llama", "qwen3", "gemma3"):
        model = small_model(kind)
        lora.adapt(model, 4, 0)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert ModelShape.of(model.config).trained(4) == trained


def test_bytes_follow_the_tokens():
    for device in DEVICES:
        at = [micro_batch_bytes(SHAPE, REAL.learning, device, tokens) for tokens in (1000, 2000, 3000)]
        assert at[1] - at[0] == at[2] - at[1] > 0
        assert sampling_bytes(SHAPE, REAL, device, 64) == pytest.approx(8 * sampling_bytes(SHAPE, REAL, device, 8))
    assert resident_bytes(SHAPE, REAL.learning) + training_slot_bytes(SHAPE, REAL.learning) == 20 * SHAPE.parameters


def test_batch_tokens_is_planned_unless_it_is_given(monkeypatch):
    for given in (1, 63):
        with pytest.raises(ConfigError, match=f"batch_tokens={given} .*at least 64"):
            resolve([SettingsLayer("test", {"batch_tokens": given})])
    settings = Settings.of(model="tiny", cpu_only=True)
    policy = Policy.load(settings, "")
    assert (policy.trainer.batch_tokens, policy.batch) == (4096, 512)
    monkeypatch.setattr(memory, "available", lambda device, nodes: int(0.72 * GIB))
    policy = Policy.load(settings, "")
    assert policy.plan.fits and 64 <= policy.trainer.batch_tokens < 4096 and policy.batch < 512
    few = Settings.of(model="tiny", cpu_only=True, batch_tokens=300)
    assert Policy.load(few, "").trainer.batch_tokens == 300


def test_nodes_that_share_a_machine_share_its_memory():
    cpu = torch.device("cpu")
    alone = available(cpu)
    assert 0 < alone <= devices.total_memory(cpu)
    assert 0 < available(cpu, 8) <= devices.total_memory(cpu) / 8
    assert processes_on_device(ModelSettings(nodes_per_device=3, devices_per_node=2), cpu) == 6
    assert processes_on_device(ModelSettings(nodes_per_device=3, devices_per_node=2), torch.device("cuda")) == 3
    assert processes_on_device(ModelSettings(), cpu) == 1


@pytest.mark.parametrize(
    ("free", "held", "fraction", "nodes", "expected"),
    [(70, 5, 1.0, 1, 75), (70, 5, 1.0, 2, 40), (10, 5, 1.0, 2, 15), (70, 5, 0.25, 1, 20)],
)
def test_on_a_gpu_a_node_has_its_share_of_free_memory(monkeypatch, free, held, fraction, nodes, expected):
    answers = {
        "current_device": lambda: 0,
        "mem_get_info": lambda index: (free * GIB, 80 * GIB),
        "memory_reserved": lambda index: held * GIB,
        "get_per_process_memory_fraction": lambda index: fraction,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer, raising=False)
    assert available(torch.device("cuda"), nodes) == expected * GIB
    assert available(torch.device("cuda", 1), nodes) == expected * GIB


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_limits_of_control_groups_are_found(tmp_path: Path):
    root, listing = tmp_path / "cgroup", tmp_path / "listing"
    assert list(cgroups(root, listing)) == []
    write(listing, "0::/pod/box\n")
    write(root / "pod/box/memory.max", "max\n")
    write(root / "pod/memory.max", "8000\n")
    write(root / "pod/memory.current", "3000\n")
    write(root / "pod/memory.stat", "anon 1000\ninactive_file 500\n")
    assert list(cgroups(root, listing)) == [(8000, 2500)]
    write(root / "pod/box/memory.max", "2000")
    assert list(cgroups(root, listing)) == [(2000, 0), (8000, 2500)]

    write(listing, "9:name=systemd:/\n5:cpu,memory:/docker/abc\n0::/\n")
    write(root / "memory/memory.limit_in_bytes", "9223372036854771712")  # none
    write(root / "memory/docker/abc/memory.limit_in_bytes", "6000")
    write(root / "memory/docker/abc/memory.usage_in_bytes", "100")
    assert list(cgroups(root, listing)) == [(6000, 100)]


COMMON = """
import random, torch
torch.set_num_threads(1)
from rl_swarm.config.settings import Settings
from rl_swarm.learning.batches import TrainingGroup
from rl_swarm.learning.policy import Policy

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

def groups(count, completion):
    draw = random.Random(0)
    def ids(length):
        return [draw.randrange(300) for _ in range(length)]
    return [
        TrainingGroup(ids(16), [ids(completion) for _ in range(8)], [1.0, -1.0] * 4, None) for _ in range(count)
    ]
"""


def output_of(program: str) -> list[float]:
    source = Path(devices.__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(
        [sys.executable, "-c", COMMON + program], capture_output=True, text=True, env=environ, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.split()]


linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")


@linux
def test_the_estimate_of_a_training_step_is_within_a_factor_of_two():
    grown, tokens = output_of("""
policy = Policy.load(Settings.of(model="tiny", cpu_only=True, batch_tokens=100_000), "")
policy.trainer.update(groups(1, 24))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before, large = status("VmRSS"), groups(16, 24)
policy.trainer.update(large)
print(status("VmHWM") - before, sum(group.size for group in large))
""")
    estimate = micro_batch_bytes(BY_NAME["tiny"], Settings.of(model="tiny").learning, "cpu", int(tokens))
    assert grown / 2 < estimate < grown * 2


@linux
@pytest.mark.slow
def test_two_hundred_rounds_need_no_more_memory_than_forty():
    after_40, after_200 = output_of("""
settings = Settings.of(model="tiny", cpu_only=True, max_new_tokens=8)
policy = Policy.load(settings, "")
for number in range(200):
    policy.sample(["What is 2 + 2?", "What is 13 - 4?", "And now?"][: number % 3 + 1], 4, seed=number)
    policy.trainer.update(groups(1 + number % 2, 4 + number % 5))
    if number in (39, 199):
        print(status("VmRSS"))
""")
    assert after_200 - after_40 < max(15 << 20, 0.05 * after_40)
