"""Every node of `up` gets GPUs of its own, in turn, and sees no other."""

import multiprocessing
import os
import threading
from pathlib import Path

import pytest

from rl_swarm.config.settings import Settings
from rl_swarm.node import swarm
from rl_swarm.node.swarm import SwarmProcesses, gpu_environ, gpus_of, nodes_sharing, visible_gpus


@pytest.mark.parametrize(
    ("nodes", "count", "each", "expected"),
    [
        (4, 1, 1, [[0], [0], [0], [0]]),
        (3, 4, 1, [[0], [1], [2]]),
        (5, 2, 1, [[0], [1], [0], [1], [0]]),
        (2, 4, 2, [[0, 1], [2, 3]]),
        (3, 3, 2, [[0, 1], [2, 0], [1, 2]]),
        (1, 2, 4, [[0, 1]]),  # the node will say that there are too few
    ],
)
def test_nodes_take_gpus_in_turn_and_share_when_they_run_out(nodes, count, each, expected):
    assert [gpus_of(node, count, each) for node in range(nodes)] == expected


@pytest.mark.parametrize(
    ("nodes", "count", "each", "expected"),
    [
        (4, 0, 1, [4, 4, 4, 4]),  # no GPU: they share the machine
        (4, 1, 1, [4, 4, 4, 4]),
        (3, 4, 1, [1, 1, 1]),
        (5, 2, 1, [3, 2, 3, 2, 3]),
        (3, 3, 2, [2, 2, 2]),
    ],
)
def test_a_node_knows_how_many_use_its_busiest_gpu(nodes, count, each, expected):
    assert [nodes_sharing(node, nodes, count, each) for node in range(nodes)] == expected


def test_gpus_keep_the_names_that_the_user_gave_them():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-af01,5"}) == ["3", "GPU-af01", "5"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []
    assert gpu_environ(1, ["3", "GPU-af01", "5"], 1) == {"CUDA_VISIBLE_DEVICES": "GPU-af01"}
    assert gpu_environ(1, ["3", "4", "5"], 2) == {"CUDA_VISIBLE_DEVICES": "5,3"}
    assert gpu_environ(1, [], 1) == {}


def test_gpus_are_counted_when_none_are_named(tmp_path: Path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: a)\n  MIG 1g\nGPU 1: H200 (UUID: b)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert visible_gpus({}) == ["0", "1"]
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert visible_gpus({}) == []


def test_a_node_is_started_with_its_gpus_and_a_swarm_on_the_cpu_without(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    monkeypatch.setattr(swarm, "uses_gpu", lambda settings: not settings.cpu_only)
    apart = [(None, {"a": 3}), (None, {"b": 3}), (None, {"c": 3})]
    for cpu_only, expected in ((False, [("6", {"a": 2, "c": 2}), ("7", {"b": 1})]), (True, apart)):
        settings = Settings.of(cpu_only=cpu_only)
        made = SwarmProcesses(tmp_path, settings, {name: settings for name in "abc"})
        coordinator, *workers = made.children
        assert coordinator.environ == {} and coordinator.role == "coordinator"
        assert [
            (child.environ.get("CUDA_VISIBLE_DEVICES"), {n: s.model.nodes_per_device for n, s in child.members.items()})
            for child in workers
        ] == expected


def test_nodes_in_one_process_save_memory_unless_the_user_said_how(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(swarm, "uses_gpu", lambda settings: True)
    _, workers = SwarmProcesses(tmp_path, Settings(), {name: Settings() for name in "ab"}).children
    assert "CUBLAS_WORKSPACE_CONFIG" in workers.environ
    assert "PYTORCH_CUDA_ALLOC_CONF" not in workers.environ, "the process inherits the user's"
    _, alone = SwarmProcesses(tmp_path, Settings(), {"a": Settings()}).children
    assert set(alone.environ) == {"CUDA_VISIBLE_DEVICES"}


def test_a_child_has_its_environment_before_it_does_anything(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    seen = []
    monkeypatch.setattr(swarm, "join", lambda *args: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    monkeypatch.setattr(swarm.signal, "signal", lambda *args: None)
    settings = Settings.of(cpu_only=True)
    ours, theirs = multiprocessing.Pipe()
    before = threading.active_count()
    swarm._child_main("worker", {"node": settings}, tmp_path, gpu_environ(1, ["6", "7"], 1), theirs)
    assert seen == ["7"] and threading.active_count() == before + 1
    ours.send_bytes(b"")  # the watching thread ends without ending this process
