"""Which environments there are: those of this package, and those that other installed packages register.

A package registers one as an entry point, `name = "module:Class"` in the group `rl_swarm.environments`. Only what is
installed here can run: a manifest names an environment and brings no code.
"""

import importlib
import importlib.metadata
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from rl_swarm.errors import UserError

if TYPE_CHECKING:
    from rl_swarm.environments.base import Environment

GROUP = "rl_swarm.environments"
# Registered in pyproject.toml like any other; here too, so that no other package can take their names.
BUILT_IN = {
    "reasoning": "rl_swarm.environments.reasoning:Reasoning",
}
NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")


class NoEnvironment(UserError):
    """An environment that is not installed or cannot be used; the message says what would work."""


@lru_cache(maxsize=1)
def _registered() -> dict[str, importlib.metadata.EntryPoint]:
    found = {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
    return {name: point for name, point in found.items() if NAME.fullmatch(name) and name not in BUILT_IN}


def installed() -> list[str]:
    return sorted({*BUILT_IN, *_registered()})


@lru_cache
def named(name: str) -> "type[Environment]":
    """The environment that is installed under this name."""
    from rl_swarm.environments.base import Environment

    if not NAME.fullmatch(name):
        raise NoEnvironment(
            f"{name[:80]!r} is no name of an environment: up to 32 small letters, digits, - and _."
        )
    where = BUILT_IN.get(name) or (_registered()[name].value if name in _registered() else None)
    if where is None:
        raise NoEnvironment(
            f"There is no environment {name!r} here: no installed package registers the entry point {name!r} in the group "
            f"{GROUP}. Installed: {', '.join(installed())}."
        )
    module, _, attribute = where.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise NoEnvironment(f"The environment {name!r} ({where}) cannot be imported: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise NoEnvironment(
            f"The environment {name!r} ({where}) is no class made from rl_swarm.environments.base.Environment."
        )
    return found
