"""Writes curves for TensorBoard, Weights & Biases and Trackio. All stay on this machine unless the user's own settings
send them on."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from rl_swarm.telemetry.export import Source, scalars

log = logging.getLogger(__name__)

PROJECT = "rl-swarm"


def step_of(values: Mapping[str, object]) -> int:
    """Return the round as a step from 0; a score from before the first round has step 0 too."""
    number = values.get("round")
    return max(0, number) if isinstance(number, int) else 0


class TensorBoard:
    """Writes event files with tensorboardX: `tensorboard` itself brings a web server, and torch's writer needs it."""

    def __init__(self, source: Source) -> None:
        from tensorboardX import SummaryWriter

        self.writer = SummaryWriter(str(source.folder / "tensorboard"))

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        for name, number in scalars(values).items():
            self.writer.add_scalar(f"{kind}/{name}", number, step_of(values))
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Writes to Weights & Biases, offline unless WANDB_MODE says otherwise: `wandb sync` sends it later."""

    def __init__(self, source: Source) -> None:
        mode: Any = os.environ.get("WANDB_MODE") or "offline"
        if mode != "online":  # error reports are sent even when offline
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            group=os.environ.get("WANDB_RUN_GROUP") or source.swarm,
            name=source.node,
            dir=str(source.folder),
            mode=mode,
            config={"swarm": source.swarm_id, "peer_id": source.peer_id} | source.settings,
            reinit="create_new",  # one run per node, also within one process
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.run.define_metric("*", step_metric="round")

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        curves = {f"{kind}/{name}": number for name, number in scalars(values).items()}
        self.run.log({"round": step_of(values)} | curves)

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """Writes to Trackio, into its own folder on this machine, where `trackio show` finds it."""

    def __init__(self, source: Source) -> None:
        import trackio
        import trackio.deploy
        import trackio.run
        import trackio.utils

        for module in (trackio, trackio.deploy, trackio.run, trackio.utils):
            module.print = quietly  # else it prints over the live view
        if not (os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")):
            # It asks the hub for the token's owner, even when nothing is sent.
            trackio.run._get_default_namespace = lambda: None
        self.finish = trackio.finish
        self.run = trackio.init(
            project=PROJECT,
            group=source.swarm,
            name=f"{source.swarm}-{source.node}",
            resume="allow",
            config={"swarm": source.swarm_id, "peer_id": source.peer_id} | source.settings,
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        curves = {f"{kind}/{name}": number for name, number in scalars(values).items()}
        self.run.log(curves, step=step_of(values))

    def close(self) -> None:
        self.finish()


def quietly(*words: object, **_: object) -> None:
    log.debug("%s", " ".join(map(str, words)))
