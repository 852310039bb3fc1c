"""Defines the settings of tasks: which environment, what it asks, and the role of this process in it."""

from typing import Annotated, ClassVar

from rl_swarm.protocol.manifest import EnvironmentName
from rl_swarm.protocol.tasks import Task
from rl_swarm.protocol.wire import Name
from rl_swarm.sections import Section, setting

ROLES = ("worker", "coordinator")  # in every swarm; environments may have others


class TaskSettings(Section, frozen=True, kw_only=True):
    heading: ClassVar[str] = "Tasks and roles"

    environment: Annotated[
        EnvironmentName,
        setting(
            "where questions come from and how they are scored: `reasoning`, or any other that is "
            "installed (docs/environments.md)"
        ),
    ] = "reasoning"
    tasks: Annotated[
        str | list[Task],
        setting(
            "a preset (`tiny`, `sapo`), comma-separated tasks of the environment, or in YAML a list "
            "of name, weight, config; `auto` is what the environment has: in reasoning `tiny` for the "
            "bundled model and `sapo` for any other"
        ),
    ] = "auto"
    role: Annotated[
        Name,
        setting(
            "role of this process in the swarm: `worker`, `coordinator`, or a role of the swarm's environment",
            "NODE_ROLE",
        ),
    ] = "worker"
    partial_rewards: Annotated[bool, setting("pay the task's fractional scores instead of 0 or 1")] = False
    data_path: Annotated[
        str, setting("the folder with the files that a swarm's tasks name (docs/coding.md)", "DATA_PATH")
    ] = "data"
    evaluator_model: Annotated[
        str | None,
        setting(
            "where programs must not be run: the model that predicts their verdicts (`coder`, a "
            "directory, a hub name); see docs/coding.md",
            "GUESS_WITH",
        ),
    ] = None
