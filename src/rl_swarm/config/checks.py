"""Checks that settings fit each other and what is installed here."""

import re

from rl_swarm import environments
from rl_swarm.config.settings import Settings
from rl_swarm.environments.presets import PRESETS
from rl_swarm.environments.settings import ROLES
from rl_swarm.errors import ConfigError
from rl_swarm.node.settings import HUB_REPO
from rl_swarm.telemetry.settings import SINKS
from rl_swarm.web.settings import SHORTEST_TOKEN


def check_role(role: str, origin: str) -> None:
    """Whether some environment here has this role; which of them is played, the swarm says."""
    found = {"every swarm": ROLES, **environments.roles()}
    if not any(role in roles for roles in found.values()):
        known = (f"in {name} {', '.join(f'`{one}`' for one in roles)}" for name, roles in found.items())
        raise ConfigError(f"role={role!r} ({origin}) cannot be used. What can: {'; '.join(known)}.")


def check(settings: Settings) -> None:
    try:
        environments.named(settings.task.environment)
    except environments.NoEnvironment as error:
        raise ConfigError(f"environment={settings.task.environment!r}: {error}") from error
    try:
        named = environments.task_list(settings.task, settings.model.model)
    except ValueError as error:
        raise ConfigError(
            f"tasks={settings.task.tasks!r}: {error}. Several are separated by commas, such as gcd,chain_sum."
        ) from error
    if not named:
        raise ConfigError(f"tasks={settings.task.tasks!r} names no task. Use a preset: {', '.join(PRESETS)}.")
    if settings.swarm.connect_to_testnet:
        raise ConfigError("CONNECT_TO_TESTNET=True: this version has no chain network. Unset it to use a folder swarm.")
    if settings.checkpoint.hub_repo is not None and not HUB_REPO.fullmatch(settings.checkpoint.hub_repo):
        raise ConfigError(
            f"HUB_REPO={settings.checkpoint.hub_repo!r} (hub_repo) is no repository of the hub. Write it as "
            "owner/name, for example HUB_REPO=ada/my-model: letters, digits, single `.`, `_`, `-` in between, the name "
            "at most 50 characters."
        )
    for name, text in (("P2P_LISTEN", settings.network.p2p_listen), ("P2P_ANNOUNCE", settings.network.p2p_announce)):
        for part in (text or "").split(","):
            if part.strip() and not part.strip().startswith("/"):
                raise ConfigError(
                    f"{name}={text} is no multiaddress; one looks like /ip4/0.0.0.0/tcp/31000. Several are separated "
                    "by commas."
                )
    token = settings.web.web_token
    if token is not None and not re.fullmatch(f"[!-~]{{{SHORTEST_TOKEN},}}", token):
        raise ConfigError(
            f"SWARM_WEB_TOKEN (web_token): use at least {SHORTEST_TOKEN} letters, digits and signs without spaces, for "
            "example what `openssl rand -hex 16` prints."
        )
    for name in settings.telemetry.sinks():
        if name not in SINKS:
            raise ConfigError(
                f"METRICS_SINKS={settings.telemetry.metrics_sinks!r} (metrics_sinks): there is no {name!r}. "
                f"What can be used, comma-separated: {', '.join(SINKS)}."
            )
    if settings.learning.local_groups + settings.learning.external_groups == 0:
        raise ConfigError(
            "local_groups=0 and external_groups=0: a round would have nothing to learn from. Set one above 0."
        )
    if settings.model.cpu_only and settings.model.device not in ("auto", "cpu"):
        raise ConfigError(
            f"CPU_ONLY=True and device={settings.model.device!r} contradict each other. Drop one of them."
        )
    if 0 < settings.learning.batch_tokens < 64:
        raise ConfigError(
            f"batch_tokens={settings.learning.batch_tokens} is too small for a micro-batch. Use at least 64, or 0: as "
            "many as memory has room for."
        )
    if settings.learning.external_correction == "capped" and not settings.sharing.share_logprobs:
        raise ConfigError("external_correction='capped' needs share_logprobs=true on every node of the swarm.")
