"""Writes the manifest of a swarm that is founded here."""

import msgspec

from rl_swarm import environments
from rl_swarm.node.settings import NodeSettings
from rl_swarm.protocol.manifest import Manifest, swarm_name


def new_manifest(settings: NodeSettings, name: str, owner: str, created: float, stages: int) -> Manifest:
    environment = environments.named(settings.task.environment)
    return Manifest(
        peer_id=owner,
        name=swarm_name(name),
        created=created,
        seed=settings.sampling.seed,
        environment=settings.task.environment,
        tasks=list(environments.task_list(settings.task, settings.model.model)),
        partial_rewards=settings.task.partial_rewards,
        versions=environments.versions(settings.task.environment),
        rounds=settings.swarm.rounds,
        stages=stages,
        round_end=settings.swarm.round_end,
        round_interval=settings.swarm.round_interval,
        peer_timeout=settings.swarm.peer_timeout,
        admission=settings.swarm.admission,
        same_questions=environment.shared or msgspec.UNSET,
    )
