"""Checks settings before a run has a folder or a process. Loads no torch."""

import os
import shutil
import sys

from rl_swarm import environments
from rl_swarm.environments import task_list
from rl_swarm.environments.presets import PRESETS
from rl_swarm.errors import ConfigError
from rl_swarm.learning import lookup
from rl_swarm.learning.settings import ModelSettings
from rl_swarm.node.settings import NodeSettings

GPU_SIGNS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # of NVIDIA, AMD, and Windows' own Linux


def check(settings: NodeSettings) -> None:
    """Raise if a node could not work with these settings, as far as that shows without loading a model."""
    check_device(settings.model)
    lookup.check(settings.model.model, settings.model.hf_token)
    check_tasks(settings)


def check_tasks(settings: NodeSettings) -> None:
    """Make the tasks that the user named. Those of a preset are known to work."""
    if settings.task.tasks == "auto" or (isinstance(settings.task.tasks, str) and settings.task.tasks in PRESETS):
        return
    environments.named(settings.task.environment)(
        task_list(settings.task, settings.model.model), settings.task.partial_rewards
    ).close()


def check_device(settings: ModelSettings) -> None:
    if settings.device == "cuda" and not _has_gpu():
        raise ConfigError("device='cuda', but this machine has no CUDA GPU. Use --device auto or cpu.")
    if settings.device == "mps" and sys.platform != "darwin":
        raise ConfigError("device='mps', but this machine has no Apple GPU. Use --device auto or cpu.")


def _has_gpu() -> bool:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return not hidden and (shutil.which("nvidia-smi") is not None or any(map(os.path.exists, GPU_SIGNS)))
