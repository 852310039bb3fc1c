"""Scores a model, talks to one, and lists those that fit: `evaluate`, `chat`, `models`."""

import json
from dataclasses import asdict, dataclass

import msgspec
from rich.console import Console
from rich.table import Table

from rl_swarm import environments
from rl_swarm.cli import preflight
from rl_swarm.config.settings import Settings
from rl_swarm.environments import task_list
from rl_swarm.errors import UserError
from rl_swarm.learning import memory
from rl_swarm.learning.devices import CATALOGUE, pick_device, pick_model, round_seconds, speed
from rl_swarm.learning.memory import GIB
from rl_swarm.learning.policy import Policy, bundled, other_models
from rl_swarm.node.evaluation import evaluate as score
from rl_swarm.node.evaluation import protocol
from rl_swarm.protocol.untrusted import printable


def evaluate(model: str, settings: Settings, questions: int | None, samples: int | None, as_json: bool) -> None:
    """Score a model as a node does, with as many questions and answers unless told otherwise."""
    settings = for_model(model, settings)
    questions, samples = (
        questions or settings.evaluation.held_out_questions,
        samples or settings.evaluation.held_out_samples,
    )
    preflight.check_tasks(settings)
    kind = environments.named(settings.task.environment)
    policy = Policy.load(settings, kind.system_prompt)
    environment = kind(task_list(settings.task, settings.model.model), settings.task.partial_rewards)
    try:
        environment.configure(settings.task, settings.model.hf_token, other_models(settings))
        console = Console(highlight=False, markup=False)
        held_out = environment.held_out(questions)
        if not held_out:
            raise UserError(f"The environment {settings.task.environment!r} has no held-out questions.")
        with console.status(f"answering {questions} questions {samples + 1} times"):
            result = score(policy, environment, held_out, samples, greedy=True)
    finally:
        environment.close()
    if as_json:
        print(json.dumps(msgspec.to_builtins(result), indent=2))
        return
    table = Table(
        box=None,
        padding=(0, 2),
        title=f"{model}: test score, {protocol(result.questions, result.samples, result.temperature)}",
        title_justify="left",
    )
    table.add_column("task")
    for title in ("sampled", "greedy", "well-formed", "accuracy if\nwell-formed"):
        table.add_column(title, justify="right")
    for task, sampled in result.by_task.items():
        right = result.accuracy_well_formed_by_task.get(task, 0.0)
        columns = (sampled, result.greedy_by_task[task], result.well_formed_by_task[task], right)
        table.add_row(task, *(f"{value:.3f}" for value in columns))
    table.add_section()
    columns = (result.sampled, result.greedy or 0.0, result.well_formed, result.accuracy_well_formed)
    table.add_row("all", *(f"{value:.3f}" for value in columns), style="bold")
    console.print(table)


def chat(model: str, settings: Settings, prompt: str | None) -> None:
    policy = Policy.load(for_model(model, settings), environments.named(settings.task.environment).system_prompt)
    asked = 0

    def answer(question: str) -> str:
        return printable(policy.sample([question], 1, seed=asked)[0][0].text.strip())

    if prompt is not None:
        print(answer(prompt))
        return
    print(f"{model}. Each question starts a new conversation. Ctrl-D ends.")
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if question:
            asked += 1
            print(answer(question))


@dataclass(frozen=True)
class Row:
    model: str
    pool: str
    parameters: int
    plan: memory.Plan
    seconds: float  # of a round, estimated


def list_models(settings: Settings, as_json: bool) -> None:
    device = pick_device(settings.model)
    free = memory.available(device, memory.processes_on_device(settings.model, device))
    speeds = [
        speed(device, rows) for rows in (max(1, settings.learning.local_groups) * settings.sampling.generations, 1024)
    ]
    auto = pick_model(settings.changed(model="auto"), device)
    rows = []
    for card in CATALOGUE:
        theirs = settings.changed(model=card.name)
        plan = memory.plan(card.shape, free, theirs, device.type)
        seconds = round_seconds(card.shape, theirs, *speeds)
        rows.append(Row(card.name, card.pool, card.shape.parameters, plan, round(seconds, 3)))
    if as_json:
        found = {"device": str(device), "available": free, "auto": auto, "models": list(map(asdict, rows))}
        print(json.dumps(found, indent=2))
        return
    table = Table(box=None, padding=(0, 1))
    for title in ("model", "pool", "parameters", "needs", "fits", "a round"):
        left = title in ("model", "pool", "fits")
        table.add_column(
            title, justify="left" if left else "right", overflow="fold"
        )  # so that names can be copied whole
    for row in rows:
        parameters, needs = f"{row.parameters / 1e6:,.0f} M", f"{row.plan.needed / GIB:.1f} GiB"
        fits = "yes" if row.plan.fits else "no"
        table.add_row(row.model, row.pool, parameters, needs, fits, duration(row.seconds))
    console = Console(highlight=False, markup=False)
    console.print(f"{device} with {free / GIB:.1f} GiB available; MODEL_NAME=auto takes {auto}")
    console.print(table)
    console.print(
        f"For one node with {settings.learning.local_groups} questions and {settings.learning.external_groups} peers' "
        f"groups a round, {settings.sampling.generations} answers each, all of the maximum length. These are "
        "estimates: see docs/hardware.md."
    )


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"


def for_model(model: str, settings: Settings) -> Settings:
    """Ask a checkpoint of a bundled model the bundled model's questions, unless told otherwise."""
    name = bundled(model)
    if name is not None:
        tiny = name == "tiny" and settings.task.environment == "reasoning" and settings.task.tasks == "auto"
        settings = settings.changed(
            tasks="tiny" if tiny else settings.task.tasks,
            max_new_tokens=settings.sampling.max_new_tokens or settings.changed(model=name).completion_tokens(),
        )
    return settings.changed(model=model)
