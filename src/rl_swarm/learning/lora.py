"""Adapts a model by LoRA: trains small matrices beside frozen weights, which needs less memory.

A linear map W becomes W + scale * B A, with A and B of a small rank; so do the experts of a mixture, which are one
parameter of three dimensions. peft puts them onto the model's own modules, in place, so everything that calls those
modules (transformers, `decoder`) computes with them. A checkpoint holds the ordinary model with the adapters merged.
A folder in it holds the adapters alone, as peft writes them; a node resumes from these without rounding. They are not
beside the model, because transformers would merge them a second time.
"""

import copy
import hashlib
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_swarm.errors import ConfigError
from rl_swarm.learning.checkpoints import CheckpointError

log = logging.getLogger(__name__)

FOLDER, FILE = "adapter", "adapter_model.safetensors"  # below a checkpoint; peft's name
PREFIX = "base_model.model."  # of the names in the file
SHAPES = "rl_swarm_shapes"  # an attribute of an adapted model: the shapes of its weights before
SCALE = 2.0  # for every rank, so that one learning rate fits all
BASE = "base"  # in the file: a digest of a frozen weight


def adapt(model: Any, rank: int, seed: int) -> None:
    """Add adapters that are zero to every linear map but the head, and freeze all other weights."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            f"lora_rank={rank} needs peft, which is not installed. Run `{sys.executable} -m pip install peft`, "
            "or set lora_rank=0 to train all weights."
        ) from error
    config = LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules="all-linear")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about GPT-2's transposed weights, which peft takes care of
        torch.manual_seed(seed)
        setattr(model, SHAPES, {name: tuple(value.shape) for name, value in model.state_dict().items()})
        try:
            inject_adapter_in_model(config, model)
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"lora_rank={rank}: peft has no adapters for models of type {model.config.model_type!r}: {reason} "
                "Set lora_rank=0 to train all weights, or use a model of another type."
            ) from error
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    log.info("LoRA of rank %d: %s of %s parameters are trained", rank, f"{trained:,}", f"{total:,}")


def is_adapted(module: Any) -> bool:
    """Return whether this linear map, or any in this model, has an adapter."""
    return any(hasattr(part, "lora_A") for part in module.modules())


def merged_weight(linear: Any) -> Tensor:
    """Return the weight of a linear map with its adapter merged, in the layout of the plain map."""
    if not hasattr(linear, "lora_A"):
        plain: Tensor = linear.weight
        return plain
    merged: Tensor = _base(linear) + linear.get_delta_weight("default")
    return merged


def _base(adapted: Any) -> Tensor:
    """Return the frozen weight below an adapter; several adapted parameters of a module are nested."""
    name = _parameter(adapted)
    while hasattr(adapted, "lora_A"):
        adapted = adapted.base_layer
    weight: Tensor = getattr(adapted, name)
    return weight


def _parameter(adapted: Any) -> str:
    name: str = getattr(adapted, "parameter_name", "weight")
    return name


def _plain(name: str) -> str:
    """Return the name that a weight has without adapters."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


@torch.no_grad()
def merged_state(model: Any) -> dict[str, Tensor]:
    """Return the state of the plain model with adapters merged. Weights without adapters are not copied."""
    state = {_plain(name): value for name, value in model.state_dict().items() if ".lora_" not in name}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            state[f"{_plain(name)}.{_parameter(module)}"] = merged_weight(module).cpu()
    found = {name: tuple(value.shape) for name, value in state.items()}
    if wrong := sorted(name for name, _ in found.items() ^ getattr(model, SHAPES).items()):
        raise CheckpointError(
            f"The adapters cannot be added to the model: {wrong[0]} and {len(wrong) - 1} other weights would not be as "
            "in the model without them. Set lora_rank=0 to train all weights."
        )
    return state


def save_adapters(model: Any, folder: Path, name: str) -> None:
    """Write the adapters as peft does; `name` is that of the base model."""
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    config = copy.copy(model.peft_config["default"])
    config.base_model_name_or_path, config.inference_mode = name, True
    config.save_pretrained(target)
    save_file(_adapters(model), target / FILE, {"format": "pt", BASE: _digest(model)})


def load_adapters(model: Any, folder: Path) -> None:
    """Load the adapters of a checkpoint; model and checkpoint must have the same rank, or none."""
    file = folder / FOLDER / FILE
    there, here = file.exists(), is_adapted(model)
    if there and not here:
        raise ConfigError(f"lora_rank=0, but {folder} was made with LoRA. Set lora_rank as it was then.")
    if here and not there:
        raise ConfigError(f"lora_rank is above 0, but {folder} was made without LoRA. Set lora_rank=0.")
    if not here:
        return
    try:
        with safe_open(file, "pt") as opened:
            base = (opened.metadata() or {}).get(BASE)
        saved = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be used: {error}") from error
    ours = _adapters(model)
    if base != _digest(model) or saved.keys() != ours.keys():
        raise ConfigError(f"The adapters in {folder} belong to another model than MODEL_NAME names.")
    for name, value in saved.items():
        if value.shape != ours[name].shape:
            ranks = [len(t) if ".lora_A." in name else t.shape[1] for t in (ours[name], value)]
            raise ConfigError(f"lora_rank={ranks[0]}, but {folder} was made with lora_rank={ranks[1]}.")
        ours[name].copy_(value)


def _adapters(model: Any) -> dict[str, Tensor]:
    """Return the weights of the adapters, not copies, by the names that peft gives them in a file."""
    return {
        PREFIX + name.replace(".default.", "."): value.detach()
        for name, value in model.named_parameters()
        if ".lora_" in name
    }


def _digest(model: Any) -> str:
    """Return a digest of the first weight that has an adapter, which differs between models of one shape."""
    first = next(module for module in model.modules() if hasattr(module, "lora_A"))
    weight = _base(first).detach().cpu().contiguous()
    return hashlib.sha256(weight.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
