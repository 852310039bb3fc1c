"""Puts the sections of all parts together, and defines what presets change."""

from rl_swarm.node.settings import NodeSettings
from rl_swarm.sections import Setting, settings_of
from rl_swarm.web.settings import WebSettings


class Settings(NodeSettings, frozen=True, kw_only=True):
    """Holds all that a user can set."""

    web: WebSettings = WebSettings()


# What `rl-swarm up` changes: a swarm for one machine that is done within minutes.
UP_PRESET: dict[str, object] = {
    "rounds": 60,
    "held_out_every": 30,
    "local_groups": 4,
    "external_groups": 4,
    "groups_per_update": 2,  # more and smaller steps: twice as fast as one a round
    "round_end": "lockstep",
    "peer_timeout": 60.0,
    "poll_interval": 0.02,
    "negative_scale": 1.0,  # all nodes are one's own
}
PRESET = "preset of"  # how the source of such values begins
TEST_MODE: dict[str, object] = {"rounds": 3, "local_groups": 4, "generations": 4}


def all_settings() -> tuple[Setting, ...]:
    """List every setting."""
    return settings_of(Settings)
