"""Defines an arm: how many groups a node takes from where, by which strategy, and how it trains on them.

Written `I/J`: own and external groups per round. `4/0x2` makes two updates on the same groups, which costs as much
training as 4/4 while most groups carry signal. `1/7@1` makes an update on every group, one after the other.
`4/0-pooled` is one learner that has the questions of all nodes to itself.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from rl_swarm import environments
from rl_swarm.environments import task_list
from rl_swarm.errors import UsageError, UserError
from rl_swarm.node import strategies
from rl_swarm.node.settings import NodeSettings
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.wire import MAX_BYTES, UNREADABLE
from rl_swarm.storage.files import LocalFiles

PRESETS: dict[str, tuple[str, ...]] = {
    "paper": ("8/0", "6/2", "4/4", "2/6"),  # at a fixed batch
    "gpt2": ("4/0", "3/1", "2/2", "1/3"),  # the series of five nodes
    "budget": ("4/0", "4/4", "4/12", "8/0", "8/8"),  # at a fixed number of generated answers
    "controls": ("4/0x2", "4/0-pooled"),
}
CONFIGURATION = re.compile(r"(\d{1,3})/(\d{1,3})(?:x(\d{1,2}))?(?:@(\d{1,3}))?(-pooled)?")
# What all nodes of an experiment have, unless the user says otherwise.
PRESET: dict[str, object] = {
    "nodes": 8,
    "rounds": 2000,
    "round_end": "lockstep",
    "negative_scale": 1.0,  # all nodes are the user's own
    "checkpoint_every": 50,
    "keep_checkpoints": 2,
    "threads": 1,
}
GIVEN_BY_ARM = ("seed", "rounds", "nodes", "local_groups", "external_groups", "strategy", "epochs", "groups_per_update")
HARMLESS = ("checkpoint_every", "keep_checkpoints")  # may change when a run resumes
# Settings of the machine or of other commands: no part of a run, even if their environment variables are set.
ELSEWHERE = (
    "gdrive_path", "experiment_name", "role", "node_id", "identity_path", "admission", "invitation", "owner",
    "test_mode",
    "hub_repo", "hub_every", "network", "p2p_initial_peers", "p2p_listen", "p2p_announce", "p2p_relay",
    "cleanup_rollouts", "keep_rollout_rounds", "archive_rollouts",
    "web", "web_host", "web_port", "web_token", "log_level", "debug", "metrics_sinks", "hf_token",
    "connect_to_testnet", "round_interval", "private_path",
)  # fmt: skip
RUNS, TUNING = "runs", "tuning"  # folders of an experiment
FILE = "arm.json"  # in a run's folder
PACKED = ".jsonl.xz"  # suffix of a packed experiment

# In a shared folder any member may have written the arm of a run.
Groups = Annotated[int, Meta(ge=0, le=1024)]


# Puts settings together from presets by their names, later ones winning, and from what the user gave; checks them.
Resolve = Callable[[Mapping[str, Mapping[str, object]], Mapping[str, object]], NodeSettings]


class Arm(msgspec.Struct, frozen=True):
    local_groups: Groups
    external_groups: Groups
    strategy: Annotated[str, Meta(pattern=r"^[\w.:-]{1,128}\Z")] = "sapo"
    epochs: Annotated[int, Meta(ge=1, le=64)] = 1
    pooled: bool = False
    groups_per_update: Groups = 0  # 0: one update on all groups of a round

    @property
    def configuration(self) -> str:
        often = f"x{self.epochs}" if self.epochs > 1 else ""
        steps = f"@{self.groups_per_update}" if self.groups_per_update else ""
        return f"{self.local_groups}/{self.external_groups}{often}{steps}{'-pooled' if self.pooled else ''}"

    @property
    def label(self) -> str:
        return f"{self.configuration} {self.strategy}" if self.external_groups else self.configuration

    @property
    def is_plain(self) -> bool:
        """Return whether nodes train alone, in the plain way: a base for comparisons."""
        return not self.external_groups and not self.is_special

    @property
    def place(self) -> tuple[object, ...]:
        """Return its place in a table: arms without sharing first, then by how much they share."""
        return (self.external_groups > 0, self.is_special, -self.local_groups, self.external_groups, self.strategy)

    @property
    def is_special(self) -> bool:
        return self.pooled or self.epochs > 1 or self.groups_per_update > 0

    @property
    def slug(self) -> str:
        """Return the label as part of a file's name."""
        return re.sub(r"[^A-Za-z0-9.-]+", "-", self.label.replace("@", "at"))


class Job(msgspec.Struct, frozen=True):
    """Describes one run: an arm with a seed and a learning rate."""

    arm: Arm
    seed: Annotated[int, Meta(ge=0, le=2**62)]
    rounds: Annotated[int, Meta(ge=1, lt=1 << 53)]
    nodes: Annotated[int, Meta(ge=1, le=64)]
    rate: Annotated[float, Meta(gt=0, le=1)] | None = None  # None: that of the settings
    tuning: bool = False  # a short run of the learning-rate grid
    settings: dict[str, object] = {}  # given by the user
    each: dict[str, dict[str, object]] = {}  # settings of single nodes, by their numbers from 1

    @property
    def name(self) -> str:
        rate = f"-lr{self.rate:g}" if self.tuning and self.rate else ""
        return f"{self.arm.slug}{rate}-seed{self.seed}"

    @property
    def count(self) -> int:
        return 1 if self.arm.pooled else self.nodes

    def evaluations(self, settings: NodeSettings, begun: int, played: int) -> float:
        """Return how often the held-out questions are answered between two rounds, without the last time.

        An evaluation in between has no greedy answers, so it counts as a fraction.
        """
        every, samples = settings.evaluation.held_out_every, settings.evaluation.held_out_samples
        between = min(played, self.rounds - 1) // every - begun // every if every else 0
        return (begun == 0) + max(0, between) * samples / (samples + 1)

    def swarm(self) -> NodeSettings:
        """Return the settings of all nodes, without the strategy, whose class may not be installed here."""
        return NodeSettings.of(**{**PRESET, **self._given("alone"), **self.settings})

    def _given(self, strategy: str) -> dict[str, object]:
        arm: dict[str, object] = {
            "strategy": strategy,
            "local_groups": self.arm.local_groups * (self.nodes if self.arm.pooled else 1),
            "external_groups": self.arm.external_groups,
            "epochs": self.arm.epochs,
            "groups_per_update": self.arm.groups_per_update,
            "fetch_max_peers": max(10, self.nodes),
            "nodes_per_device": self.count,
            "seed": self.seed,
            "rounds": self.rounds,
            "nodes": self.count,
        }
        if self.rate is not None:
            arm["learning_rate"] = self.rate
        return arm

    def members(self, resolve: Resolve) -> list[NodeSettings]:
        """Return the settings of every node."""
        presets, found = {"experiment": PRESET, "arm": self._given(self.arm.strategy)}, []
        common = self.swarm()
        tasks = list(task_list(common.task, common.model.model))
        for number in range(1, self.count + 1):
            own = {name: value for name, value in self.each.get(str(number), {}).items() if name != "tasks"}
            given = {**self.settings, **own, "tasks": tasks}  # the manifest names a specialist's tasks
            found.append(_playable(resolve(presets, given), number))
        return found

    def identities(self) -> list[Identity]:
        return [Identity.derived("experiment", self.seed, number) for number in range(1, self.count + 1)]

    def specialists(self) -> dict[str, list[int]]:
        """Return the task numbers of nodes that are asked some tasks only, by peer id."""
        common = self.swarm()
        names = [task.name for task in task_list(common.task, common.model.model)]
        found = {}
        for identity, number in zip(self.identities(), range(1, self.count + 1), strict=True):
            wanted = self.each.get(str(number), {}).get("tasks")
            if wanted is None or self.arm.pooled:
                continue
            chosen = [name.strip() for name in str(wanted).split(",") if name.strip()]
            unknown = [name for name in chosen if name not in names]
            if unknown or not chosen:
                raise UsageError(
                    f"--node {number}:tasks={wanted}: {', '.join(unknown) or 'nothing'} is no task of this swarm. It "
                    f"has {', '.join(names)}."
                )
            found[identity.peer_id] = [k for k, name in enumerate(names) if name in chosen]
        return found

    def write(self, files: LocalFiles) -> None:
        files.write(FILE, msgspec.json.format(msgspec.json.encode(self)))

    @classmethod
    def read(cls, folder: Path) -> "Job | None":
        """Read the job of a run's folder; None if it is no run."""
        try:
            return msgspec.json.decode(files_of(folder).read(FILE, MAX_BYTES), type=cls)
        except (FileNotFoundError, NotADirectoryError):  # also where a link has replaced it
            return None
        except (OSError, *UNREADABLE) as error:
            raise UserError(f"{folder / FILE} cannot be read: {error}.") from error


def is_experiment(address: str | Path) -> bool:
    """Return whether an address is a packed experiment, or a folder of `experiment sapo --out` that has a run."""
    path = Path(address)
    return is_packed(path) or any(job_folders(path / kind) for kind in (RUNS, TUNING))


def is_packed(path: Path) -> bool:
    """Return whether a name is that of a packed experiment."""
    return path.name.endswith(PACKED)


def name_of(path: Path) -> str:
    """Name an experiment after its folder or file."""
    return path.resolve().name.removesuffix(PACKED)


def files_of(run: Path) -> LocalFiles:
    """Return the files of a run. For `<experiment>/runs/<run>`, links inside the experiment are not followed."""
    if run.parent.name in (RUNS, TUNING):
        return LocalFiles(run.parent.parent).below(f"{run.parent.name}/{run.name}")
    return LocalFiles(run)


def job_folders(folder: Path) -> list[Path]:
    """List the runs of an experiment in a folder."""
    return [folder / name for name in LocalFiles(folder.parent).folders_with(FILE, folder.name)]


def arms(configurations: str, names: str) -> list[Arm]:
    """Combine every configuration, or those of a preset, with every strategy; without external groups there is no
    strategy."""
    wanted = [strategy.strip() for strategy in names.split(",") if strategy.strip()]
    for name in wanted:
        strategies.named(name)
    found: dict[Arm, None] = {}
    for given in (part.strip() for part in configurations.split(",")):
        for text in PRESETS.get(given, (given,)):
            for arm in _arms_of(text, wanted):
                found[arm] = None
    return list(found)


def _arms_of(text: str, names: Sequence[str]) -> list[Arm]:
    match = CONFIGURATION.fullmatch(text)
    local, external = (int(match[1]), int(match[2])) if match else (0, 0)
    if match is None or local == 0:
        raise UsageError(
            f"--configs {text or '(nothing)'}: write own/external groups, such as 4/4, 4/4x2 (two updates on the same "
            "groups), 4/4@1 (an update on every group), 4/4x2@1 (both, in this order) or 4/0-pooled (one learner "
            f"with all questions), comma-separated, or a preset: {', '.join(PRESETS)}."
        )
    epochs, each, pooled = int(match[3] or 1), int(match[4] or 0), match[5] is not None
    if external and pooled:
        raise UsageError(f"--configs {text}: -pooled is one learner, which has no peers.")
    if not epochs:
        raise UsageError(f"--configs {text}: x0 would train on nothing. Use x1 or more.")
    if match[4] and not each:
        raise UsageError(f"--configs {text}: @0 would be updates on nothing. Use @1 or more.")
    if not external:
        return [Arm(local, 0, "alone", epochs, pooled, each)]
    sharing = [name for name in names if name != "alone"]
    if not sharing:
        raise UsageError(f"--strategies: {text} needs one that takes peers' groups, such as sapo.")
    return [Arm(local, external, name, epochs, groups_per_update=each) for name in sharing]


def nodes_given(assignments: Sequence[str], nodes: int) -> dict[str, dict[str, object]]:
    """Parse settings of single nodes, from `K:NAME=VALUE`."""
    found: dict[str, dict[str, object]] = {}
    for text in assignments:
        number, colon, assignment = text.partition(":")
        name, equals, value = assignment.partition("=")
        if not (colon and equals and number.isdigit() and 1 <= int(number) <= nodes):
            raise UsageError(
                f"--node {text}: write it as K:NAME=VALUE with a node's number from 1 to {nodes}, for example "
                "--node 1:learning_rate=3e-4 or --node 2:tasks=gcd,chain_sum."
            )
        if name in GIVEN_BY_ARM and name not in ("local_groups", "external_groups", "strategy"):
            raise UsageError(f"--node {text}: {name} is the same for all nodes of a run.")
        found.setdefault(str(int(number)), {})[name] = value
    return found


def _playable(settings: NodeSettings, number: int) -> NodeSettings:
    """Return the settings of a node; raise if it could not run in lock-step in one process."""
    wrong = {
        "round_end": settings.swarm.round_end != "lockstep",
        "publish_frequency": settings.sharing.publish_frequency == "round",
        "local_groups": settings.learning.local_groups == 0,
        "devices_per_node": settings.model.devices_per_node > 1,
        "model": settings.model.model == "auto",
    }
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        raise UsageError(
            f"{name}={settings.flat()[name]} of node {number}: the nodes of an experiment run in lock-step in one "
            "process, publish before they train, and answer at least one question each on one device, with a model "
            "that is named: `rl-swarm models` lists those that fit."
        )
    kind = environments.named(settings.task.environment)
    if kind.stages > 1 or len(kind.roles) > 1:
        raise UsageError(
            f"environment={settings.task.environment}: an experiment compares nodes that answer once a round. "
            "Environments with stages or roles run with `rl-swarm up`."
        )
    return settings


def differences(old: Job, new: Job) -> list[str]:
    """List how an existing run differs from the wanted one."""
    before, after = (msgspec.to_builtins(job) for job in (old, new))
    for job in (before, after):
        job["settings"] = {k: v for k, v in job["settings"].items() if k not in HARMLESS}
    return [f"{key} was {_shown(before[key])}, not {_shown(after[key])}" for key in after if before[key] != after[key]]


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={item}" for name, item in value.items()) or "none"
    return str(value)
