"""Writes the manifest of a swarm that is founded here."""

import msgspec

from rl_swarm import environments
from rl_swarm.protocol.manifest import Manifest, swarm_name
from rl_swarm.settings import Settings


def new_manifest(settings: Settings, name: str, owner: str, created: float, stages: int) -> Manifest:
    environment = environments.named(settings.environment)
    return Manifest(
        peer_id=owner,
        name=swarm_name(name),
        created=created,
        seed=settings.seed,
        environment=settings.environment,
        tasks=list(environments.task_list(settings)),
        partial_rewards=settings.partial_rewards,
        versions=environments.versions(settings.environment),
        rounds=settings.rounds,
        stages=stages,
        round_end=settings.round_end,
        round_interval=settings.round_interval,
        peer_timeout=settings.peer_timeout,
        admission=settings.admission,
        shared=environment.shared or msgspec.UNSET,
    )
