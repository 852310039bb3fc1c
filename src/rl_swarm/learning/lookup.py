"""Checks early, without torch, whether a model of a given name exists."""

import difflib
import os

from rl_swarm.errors import ModelError, NoSuchModel
from rl_swarm.learning import smollm2
from rl_swarm.learning.settings import BUNDLED

HUB_SECONDS = 10.0  # for the hub to answer
OFFLINE_NAMES = (*BUNDLED, smollm2.NAME, "auto")


def check(name: str, token: str | None = None) -> None:
    """Raise `ModelError` unless the name is a model of this package, a directory, or a model on the hub."""
    if name in OFFLINE_NAMES:
        return
    if os.path.isdir(directory := os.path.expanduser(name)):
        _check_directory(name, directory)
        return
    if os.path.isfile(directory):
        raise NoSuchModel(
            f"MODEL_NAME={name} is a file. A model is a directory, a name here, or owner/name on the hub."
        )
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise NoSuchModel(f"MODEL_NAME={name}: there is no such directory.")
    if "/" not in name and (close := difflib.get_close_matches(name.lower(), OFFLINE_NAMES, n=1)):
        raise NoSuchModel(
            f"MODEL_NAME={name}: there is no such model. Did you mean `{close[0]}`? A model of the hub is written as "
            "owner/name, a directory with a slash."
        )
    _ask_hub(name, token)


def _check_directory(name: str, directory: str) -> None:
    if os.path.exists(os.path.join(directory, "config.json")):
        return
    run = os.path.exists(os.path.join(directory, "manifest.json"))
    raise NoSuchModel(
        f"MODEL_NAME={name}: there is no config.json, so this is no directory of a model. "
        + (
            "It is a run: give one of its checkpoints, checkpoints/round_<number>/<node>."
            if run
            else "It must hold config.json, model.safetensors and tokenizer.json."
        )
    )


def _ask_hub(name: str, token: str | None) -> None:
    """Ask the hub once; the library that loads models would retry for every file."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    remedy = f"Bundled models are {', '.join(f'`{bundled}`' for bundled in BUNDLED)}: MODEL_NAME=tiny."
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
        HfApi(token=token).model_info(name, timeout=HUB_SECONDS)
    except GatedRepoError:
        return  # the loader explains what to do
    except HFValidationError as error:
        raise NoSuchModel(f"MODEL_NAME={name} is no name of a model. {remedy}") from error
    except RepositoryNotFoundError as error:
        raise NoSuchModel(
            f"MODEL_NAME={name}: the hub has no such model, or shows it only to those who may see it (HF_TOKEN). "
            f"{remedy}"
        ) from error
    except Exception as error:  # whatever the library raises, there is no answer
        reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise ModelError(
            f"MODEL_NAME={name} is not on this machine, and the hub cannot be asked for it: {reason}. If the hub "
            f"cannot be reached from here, give a directory. {remedy}"
        ) from error
