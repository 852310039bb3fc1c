"""Defines the settings of a node: its swarm, what it shares, how it is evaluated and what it saves."""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from rl_swarm.learning.settings import PolicySettings
from rl_swarm.network.settings import NetworkSettings
from rl_swarm.protocol.manifest import Admission, RoundEnd
from rl_swarm.sections import Section, setting, settings_of
from rl_swarm.storage.settings import StorageSettings
from rl_swarm.telemetry.settings import TelemetrySettings

# As the hub has it, with room for a node's name behind it.
HUB_REPO = re.compile(r"(?!.*(--|\.\.))(?!.*\.git$)\w([\w.-]{0,40}\w)?/\w([\w.-]{0,48}\w)?", re.ASCII)


class SwarmSettings(Section, frozen=True, kw_only=True):
    heading: ClassVar[str] = "The swarm"

    nodes: Annotated[int, setting("nodes of a swarm that is started here", ge=1, le=64)] = 4
    network: Annotated[
        Literal["folder", "p2p"], setting("how the nodes of a new swarm find each other", "SWARM_NETWORK")
    ] = "folder"
    admission: Annotated[
        Admission,
        setting("who may take part in a new swarm: any peer (`open`), or those that its owner invites or allows"),
    ] = "open"
    rounds: Annotated[int, setting("rounds of a run", "MAX_ROUNDS", ge=1)] = 2000
    round_end: Annotated[
        RoundEnd,
        setting(
            "`interval`: after round_interval; `everyone`: when all have submitted; `deadline`: that, "
            "but at the latest after round_interval; `lockstep`: everyone, and nodes wait for each "
            "other's rollouts (reproducible)"
        ),
    ] = "interval"
    round_interval: Annotated[float, setting("seconds per round", "COORDINATOR_ROUND_INTERVAL", gt=0, le=1_000_000)] = (
        60.0
    )
    peer_timeout: Annotated[
        float, setting("seconds without a heartbeat after which no node waits for a peer", gt=0, le=1_000_000)
    ] = 120.0
    test_mode: Annotated[bool, setting("3 rounds, 4 samples, 4 generations", "TEST_MODE")] = False
    connect_to_testnet: Annotated[
        bool, setting("join a chain swarm; there is no chain network in this version", "CONNECT_TO_TESTNET")
    ] = False


class SharingSettings(Section, frozen=True, kw_only=True):
    heading: ClassVar[str] = "The exchange of rollouts"

    strategy: Annotated[
        str,
        setting(
            "which external groups are trained on, and how: `frugal`, `alone`, `sapo`, `uniform`, "
            "`top`, `top-signal`, `capped`, `gated`, `adaptive`, or a class of yours as "
            "`module:Class`; it may bring settings of its own"
        ),
    ] = "frugal"
    publish_frequency: Annotated[
        Literal["generation", "stage", "round"],
        setting("how often rollouts are published", "ROLLOUT_PUBLISH_FREQUENCY"),
    ] = "stage"
    share_logprobs: Annotated[bool, setting("publish token ids and log-probabilities beside the text")] = False
    fetch_max_peers: Annotated[int, setting("peers asked per round at most", ge=1)] = 10
    max_rollout_age: Annotated[
        int, setting("age, in rounds, up to which external rollouts are accepted (0 in lock-step)", ge=0, le=100)
    ] = 2
    max_source_share: Annotated[
        float,
        setting(
            "largest share of the external groups from one peer, or from all peers of one invitation; "
            "an equal share where that is more",
            gt=0,
            le=1,
        ),
    ] = 0.5
    check_likelihood: Annotated[
        bool,
        setting(
            "leave out external rollouts that are unlikely under this node's model; turn it off in a "
            "swarm of different models"
        ),
    ] = True
    likelihood_threshold: Annotated[
        float,
        setting(
            "negative log-likelihood, in nats above the average, that a span of an external text may reach",
            gt=0,
            le=1e6,
        ),
    ] = 20.0
    likelihood_allowance: Annotated[
        float, setting("allowance per token, in nats, subtracted before summing over a span", ge=0, le=100)
    ] = 0.5
    max_peer_failures: Annotated[
        int,
        setting(
            "failures after which a peer is not asked; each earlier failure halves how often it is asked", ge=1, le=64
        ),
    ] = 4
    ban_rounds: Annotated[int, setting("rounds for which such a peer is not asked", ge=0)] = 50


class EvaluationSettings(Section, frozen=True, kw_only=True):
    heading: ClassVar[str] = "Held-out scores"

    held_out_questions: Annotated[int, setting("questions of the held-out set, never trained on", ge=1, le=10000)] = 200
    held_out_samples: Annotated[int, setting("sampled answers per held-out question", ge=1, le=64)] = 2
    held_out_every: Annotated[
        int, setting("rounds between held-out scores; 0: only at the start and the end", ge=0)
    ] = 50


class CheckpointSettings(Section, frozen=True, kw_only=True):
    heading: ClassVar[str] = "Checkpoints and the hub"

    checkpoint_every: Annotated[int, setting("rounds between checkpoints; 0: only when stopping", ge=0)] = 20
    keep_checkpoints: Annotated[int, setting("checkpoints kept per node", ge=1)] = 2
    hub_repo: Annotated[
        str | None,
        setting(
            "`owner/name` on the hub that the trained model is pushed to, with `hf_token`; several "
            "nodes of `up` each append their name",
            "HUB_REPO",
        ),
    ] = None
    hub_every: Annotated[
        int, setting("rounds between pushes to `hub_repo`; 0: only when the run has finished", ge=0)
    ] = 0


class NodeSettings(PolicySettings, frozen=True, kw_only=True):
    """Holds the sections that a node works with."""

    swarm: SwarmSettings = SwarmSettings()
    sharing: SharingSettings = SharingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    network: NetworkSettings = NetworkSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    storage: StorageSettings = StorageSettings()
    telemetry: TelemetrySettings = TelemetrySettings()


def public_settings(values: Mapping[str, object]) -> dict[str, object]:
    """Keep the settings that others may see: numbers and choices. Free text may be a secret or a path."""
    choices = {known.name for known in settings_of(NodeSettings) if known.is_choice}
    choices |= {"environment", "role"}
    return {name: v for name, v in values.items() if name in choices or isinstance(v, int | float)}
