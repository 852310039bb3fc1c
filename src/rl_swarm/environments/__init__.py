"""Finds environments: those of this package, and those that other installed packages register.

A package registers one as an entry point, `name = "module:Class"` in the group `rl_swarm.environments`. Only what is
installed here can run: a manifest names an environment and brings no code.
"""

import importlib
import importlib.metadata
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

from rl_swarm.environments.presets import PRESETS
from rl_swarm.environments.settings import TaskSettings
from rl_swarm.errors import UsageError, suggestion
from rl_swarm.protocol.manifest import ENVIRONMENT_NAME, Manifest
from rl_swarm.protocol.tasks import Task

if TYPE_CHECKING:
    from rl_swarm.environments.base import Environment

GROUP = "rl_swarm.environments"
# Registered in pyproject.toml like any other; here too, so that no other package can take their names.
BUILT_IN = ("coding", "debate", "reasoning")


class NoEnvironment(UsageError):
    """Reports an environment that is not installed or cannot be used; the message says what would work."""


@lru_cache(maxsize=1)
def _registered() -> dict[str, importlib.metadata.EntryPoint]:
    found = {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
    return {name: point for name, point in found.items() if ENVIRONMENT_NAME.fullmatch(name) and name not in BUILT_IN}


def installed() -> list[str]:
    return sorted({*BUILT_IN, *_registered()})


def _built_in(name: str) -> "type[Environment]":
    if name == "coding":
        from rl_swarm.environments.coding.environment import Coding

        return Coding
    if name == "debate":
        from rl_swarm.environments.debate import Debate

        return Debate
    from rl_swarm.environments.reasoning import Reasoning

    return Reasoning


@lru_cache
def named(name: str) -> "type[Environment]":
    """Return the environment that is installed under this name."""
    from rl_swarm.environments.base import Environment

    if not ENVIRONMENT_NAME.fullmatch(name):
        raise NoEnvironment(f"{name[:80]!r} is no name of an environment: up to 32 small letters, digits, - and _.")
    if name in BUILT_IN:
        return _built_in(name)
    where = _registered()[name].value if name in _registered() else None
    if where is None:
        raise NoEnvironment(
            f"There is no environment {name!r} here: no installed package registers the entry point {name!r} in the "
            f"group {GROUP}. Installed: {', '.join(installed())}.{suggestion(name, installed())}"
        )
    module, _, attribute = where.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise NoEnvironment(f"The environment {name!r} ({where}) cannot be imported: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise NoEnvironment(
            f"The environment {name!r} ({where}) is not a subclass of rl_swarm.environments.base.Environment."
        )
    return found


def task_list(settings: TaskSettings, model: str) -> tuple[Task, ...]:
    """Return the tasks that the setting `tasks` names; `auto` depends on the model."""
    if not isinstance(settings.tasks, str):
        return tuple(settings.tasks)
    if settings.tasks == "auto":
        return tuple(named(settings.environment).preset(model))
    if settings.tasks in PRESETS:
        return PRESETS[settings.tasks]
    return tuple(Task(name.strip()) for name in settings.tasks.split(",") if name.strip())


def roles() -> dict[str, list[str]]:
    """Return the roles of all installed environments that have more than one."""
    found = {}
    for name in installed():
        with suppress(NoEnvironment):  # a node that plays it is told
            found[name] = list(named(name).roles)
    return {name: theirs for name, theirs in found.items() if len(theirs) > 1}


def versions(name: str) -> dict[str, str]:
    """Return the versions of the packages that the questions of an environment depend on."""
    point = None if name in BUILT_IN else _registered().get(name)
    package = {point.dist.name: point.dist.version} if point is not None and point.dist is not None else {}
    return {**package, **named(name).versions()}


def made(manifest: Manifest) -> "Environment":
    """Make the environment of a swarm."""
    kind = of_swarm(manifest)
    return kind(manifest.tasks, manifest.partial_rewards)


def of_swarm(manifest: Manifest) -> "type[Environment]":
    """Return the class of a swarm's environment. The packages that its manifest names are shown, never fetched."""
    try:
        kind = named(manifest.environment)
    except NoEnvironment as error:
        package = ", ".join(f"{package} {version}" for package, version in manifest.versions.items())
        raise NoEnvironment(
            f"This swarm plays {manifest.environment!r}. {error} Its founder had {package or 'no package to name'}: "
            "look at it before you install it."
        ) from error
    if manifest.stages != kind.stages:
        raise NoEnvironment(
            f"This swarm plays {manifest.environment!r} in {manifest.stages} stages, and the version that is installed "
            f"here has {kind.stages}. The manifest names {manifest.versions}; here it is "
            f"{versions(manifest.environment)}."
        )
    return kind
