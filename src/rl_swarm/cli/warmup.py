"""Gives a model a supervised start, with its score before and after: `rl-swarm warmup`."""

import json
import shlex
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from rl_swarm.cli import preflight, program
from rl_swarm.cli.models import for_model
from rl_swarm.config.settings import Settings
from rl_swarm.environments import task_list
from rl_swarm.environments.reasoning import Reasoning
from rl_swarm.errors import INTERRUPTED
from rl_swarm.learning.policy import Policy
from rl_swarm.learning.warmup import RATE, WarmupError, make_examples, save, step_count, train
from rl_swarm.monitor.charts import BAR, DONE
from rl_swarm.node.evaluation import evaluate as score
from rl_swarm.node.evaluation import protocol
from rl_swarm.plural import counted
from rl_swarm.protocol.rollouts import Completion
from rl_swarm.telemetry.schema import HeldOut


class WarmUp(msgspec.Struct, frozen=True):
    """Holds the result of a warm-up."""

    model: str
    out: str
    examples: int
    steps: int
    left_out: list[str]  # tasks without an example
    loss_before: float  # nats a token of the right answers, mean of the first and the last tenth of the steps
    loss_after: float
    before: HeldOut
    after: HeldOut
    seconds: float


def warmup(
    model: str,
    settings: Settings,
    out: Path | None,
    examples: int,
    epochs: int,
    questions: int,
    samples: int,
    as_json: bool,
) -> None:
    out = out or Path("models") / f"{Path(model).name}-warm"
    preflight.check(settings.changed(model=model))
    prepare(out)
    console = Console(highlight=False, markup=False, stderr=as_json)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(complete_style=BAR, finished_style=DONE),
        TextColumn("{task.completed:.0f}/{task.total:.0f} steps {task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    try:
        result = _warm_up(model, settings, out, examples, epochs, questions, samples, progress)
    except KeyboardInterrupt:
        console.print("Stopped. Nothing was written.")
        sys.exit(INTERRUPTED)
    if as_json:
        print(json.dumps(msgspec.to_builtins(result), indent=2))
    else:
        _print(result, for_model(model, settings), console)


def prepare(out: Path) -> None:
    """Raise now if the result could not be written after minutes of training."""
    if out.exists():
        raise WarmupError(f"--out {out}: it exists already. Give another directory, or remove it first.")
    try:
        out.mkdir(parents=True)
        out.rmdir()
    except OSError as error:
        raise WarmupError(f"--out {out} cannot be written: {error.strerror}.") from error


def _warm_up(
    model: str,
    settings: Settings,
    out: Path,
    examples: int,
    epochs: int,
    questions: int,
    samples: int,
    progress: Progress,
) -> WarmUp:
    started = time.monotonic()
    rate = settings.learning.learning_rate or RATE
    settings = for_model(model, settings).changed(temperature=1.0, kl_weight=0.0)
    status = progress.console.status
    with status(f"loading {model}"):
        policy = Policy.load(settings, Reasoning.system_prompt)
    environment = Reasoning(task_list(settings.task, settings.model.model), settings.task.partial_rewards)
    try:
        limit = settings.completion_tokens()
        with status("making examples"):
            made, left_out = make_examples(
                environment,
                examples,
                settings.sampling.seed,
                lambda text: len(policy.encode(Completion(text, True))) <= limit,
            )
            held_out = environment.held_out(questions)
        if not made:
            raise WarmupError(f"There is no example answer for any of {', '.join(left_out)}. Use other --tasks.")
        with status(f"answering {len(held_out)} questions before"):
            before = score(policy, environment, held_out, samples, greedy=False)
        steps = step_count(len(made), epochs)
        losses: list[float] = []
        with progress:
            bar = progress.add_task("learning", total=steps, loss="")
            for loss in train(policy, made, epochs, rate, settings.sampling.seed):
                losses.append(loss)
                progress.update(bar, advance=1, loss=f"loss {loss:.2f}")
        with status(f"answering {len(held_out)} questions again"):
            after = score(policy, environment, held_out, samples, greedy=False)
    finally:
        environment.close()
    save(policy, out)
    tenth = max(1, len(losses) // 10)
    return WarmUp(
        model=model,
        out=str(out),
        examples=len(made),
        steps=steps,
        left_out=left_out,
        loss_before=sum(losses[:tenth]) / tenth,
        loss_after=sum(losses[-tenth:]) / tenth,
        before=before,
        after=after,
        seconds=time.monotonic() - started,
    )


def _print(result: WarmUp, settings: Settings, console: Console) -> None:
    asked = result.before
    table = Table(
        box=None,
        padding=(0, 2),
        title=f"{result.model}: test score before and after, "
        f"{protocol(asked.questions, asked.samples, asked.temperature)}",
        title_justify="left",
    )
    table.add_column("task")
    for title in ("sampled", "well-formed"):
        table.add_column(title, justify="right")
    one, two = result.before, result.after
    for task in one.by_task:
        table.add_row(
            task,
            _change(one.by_task[task], two.by_task[task]),
            _change(one.well_formed_by_task[task], two.well_formed_by_task[task]),
        )
    table.add_section()
    table.add_row("all", _change(one.sampled, two.sampled), _change(one.well_formed, two.well_formed), style="bold")
    console.print(table)
    if result.left_out:
        console.print(f"Without an example answer, and so left out: {', '.join(result.left_out)}.")
    console.print(
        f"{counted(result.steps, 'step')} on {counted(result.examples, 'example')} in {result.seconds:.0f} s; "
        f"loss {result.loss_before:.2f} → {result.loss_after:.2f}"
    )
    tasks = (
        ""
        if settings.task.tasks == "auto" or not isinstance(settings.task.tasks, str)
        else f" --tasks {settings.task.tasks}"
    )
    console.print(f"Train it: {program()} up --model {shlex.quote(result.out)}{tasks}", soft_wrap=True)


def _change(before: float, after: float) -> str:
    return f"{before:.3f} → {after:.3f}"
