"""Commands about models: score one, talk to one, list those that fit."""

import json

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from rl_swarm.config import Settings
from rl_swarm.environments.reasoning import Reasoning
from rl_swarm.evaluation import evaluate as score
from rl_swarm.learning.devices import CATALOGUE, GIB, pick_device, pick_model, total_memory
from rl_swarm.learning.policy import Policy


def evaluate(model: str, settings: Settings, questions: int, samples: int, as_json: bool) -> None:
    settings = for_model(model, settings)
    policy = Policy.load(settings, Reasoning.system_prompt)
    environment = Reasoning(settings.task_list(), settings.partial_rewards)
    try:
        console = Console(highlight=False)
        with console.status(f"answering {questions} questions {samples + 1} times"):
            result = score(policy, environment, environment.held_out(questions), samples, greedy=True)
    finally:
        environment.close()
    if as_json:
        print(json.dumps(msgspec.to_builtins(result), indent=2))
        return
    table = Table(
        box=None,
        padding=(0, 2),
        title=f"{model}: {result.questions} held-out questions",
        title_justify="left",
    )
    table.add_column("task")
    for title in ("sampled", "greedy", "well-formed", "right then"):
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
    policy = Policy.load(for_model(model, settings), Reasoning.system_prompt)
    asked = 0

    def answer(question: str) -> str:
        return policy.sample([question], 1, seed=asked)[0][0].text.strip()

    if prompt is not None:
        print(answer(prompt))
        return
    print(f"{model}, new at every question. Ctrl-D ends.")
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if question:
            asked += 1
            print(answer(question))


def list_models(settings: Settings) -> None:
    device = pick_device(settings)
    memory = total_memory(device)
    table = Table(box=None, padding=(0, 2))
    for title in ("model", "pool", "parameters", "needs about", "fits"):
        table.add_column(title)
    for card in CATALOGUE:
        fits = "yes" if card.memory <= memory else "no"
        table.add_row(card.name, card.pool, f"{card.parameters:g} B", f"{card.memory / GIB:.1f} GiB", fits)
    console = Console(highlight=False)
    console.print(
        f"{device} with {memory / GIB:.1f} GiB; MODEL_NAME=auto takes {pick_model(replace(settings, model='auto'), device)}"
    )
    console.print(table)


def for_model(model: str, settings: Settings) -> Settings:
    """A checkpoint of the bundled model is asked the bundled model's questions unless told otherwise."""
    from rl_swarm.learning.policy import is_tiny

    if is_tiny(model):
        settings = replace(
            settings,
            tasks="tiny" if settings.tasks == "auto" else settings.tasks,
            max_new_tokens=settings.max_new_tokens or replace(settings, model="tiny").completion_tokens(),
        )
    return replace(settings, model=model)
