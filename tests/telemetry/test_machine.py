"""What a node says about the machine it runs on."""

import subprocess
import sys
import time

import pytest
import torch

from rl_swarm.learning.devices import gpu_ids, hardware
from rl_swarm.telemetry.machine import LoadMeter, gpus_of

CPU = torch.device("cpu")


def test_the_processor_is_busy_when_this_process_is() -> None:
    load = LoadMeter(gpu_ids([CPU]))
    time.sleep(0.2)
    rest = load.read()
    began = time.process_time()
    while time.process_time() - began < 0.2:
        pass
    busy = load.read()
    assert rest["processor"] < busy["processor"] and busy["memory"] > 1 << 20
    assert not {"gpu", "gpu_memory"} & busy.keys()


def test_a_machine_is_told_in_words() -> None:
    told = hardware([CPU])
    assert "gpu" not in told and int(told["cores"]) >= 1 and told["memory"].endswith(" GiB")
    assert all(value and len(value) <= 200 for value in told.values())


def test_a_gpu_without_the_driver_of_nvidia_has_no_figures() -> None:
    pynvml = pytest.importorskip("pynvml")  # a dependency on Linux only
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert gpus_of([torch.device("cuda", 0)]) == []
    else:
        pytest.skip("there is a driver")


def test_how_busy_a_machine_is_can_be_asked_without_torch_and_nvml() -> None:
    loaded = "import sys; from rl_swarm.telemetry import machine; machine.LoadMeter().read(); print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert not {"torch", "pynvml"} & set(told.stdout.split())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU here")
def test_how_busy_a_gpu_is_is_told() -> None:
    """As NVML samples it: at rest first, then under work that lasts for many samples."""
    device = torch.device("cuda", 0)
    matrix = torch.ones(4096, 4096, device=device)
    assert "GiB" in hardware([device])["gpu"] and len(gpus_of(gpu_ids([device]))) == 1
    load = LoadMeter(gpu_ids([device]))
    time.sleep(2)
    load.read()
    time.sleep(2)
    rest = load.read()
    ended = time.monotonic() + 3
    while time.monotonic() < ended:
        (matrix @ matrix).sum().item()
    busy = load.read()
    assert rest["gpu"] < 0.2 < 0.6 < busy["gpu"] <= 1, (rest, busy)
    assert busy["gpu_memory"] > matrix.nbytes and busy["processor"] > 0.2
