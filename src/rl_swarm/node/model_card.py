"""Writes the card of a trained model: what it is, how good it has become, how to use it."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from rl_swarm import __version__
from rl_swarm.node.settings import NodeSettings, public_settings
from rl_swarm.plural import counted
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.sections import settings_of

OF_SWARM = ("seed", "rounds", "round_end", "round_interval", "peer_timeout", "partial_rewards")
ALWAYS = (
    "seed", "rounds", "round_end", "local_groups", "external_groups", "generations", "temperature", "max_new_tokens",
    "learning_rate", "clip_low", "clip_high", "kl_weight",
)  # fmt: skip
# They do not change the model.
NEVER = ("threads", "nodes_per_device", "poll_interval", "hub_every", "log_level", "debug")


class Trained(msgspec.Struct, frozen=True):
    """Holds the facts of a card."""

    repo: str
    base: str  # the model that training started from
    base_is: Literal["bundled", "local", "hub"]
    prompting: Literal["system", "user", "plain"]  # where the instruction stands in a prompt
    system_prompt: str
    settings: NodeSettings
    manifest: Manifest
    rounds: int  # that this node played
    held_out: list[dict[str, Any]]  # the node's own measurements, oldest first


def card(trained: Trained, license: dict[str, str] | None = None) -> str:
    """Write the model card: metadata for the hub, then the text for readers."""
    manifest = trained.manifest
    on_hub = {"base_model": trained.base} if trained.base_is == "hub" else {}
    metadata = {
        **on_hub,
        **(license or {}),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rl-swarm", "grpo", "reinforcement-learning", f"{manifest.environment}-tasks"],
    }
    base = {
        "bundled": "the tiny model that comes with RL Swarm",
        "local": f"a local model, {code(Path(trained.base).name)}",
        "hub": f"[{trained.base}](https://huggingface.co/{trained.base})",
    }[trained.base_is]
    settings = shown_settings(trained.settings, manifest)
    rows = [f"| `{name}` | {code(_json(value), in_table=True)} |" for name, value in settings.items()]
    tasks = [
        f"- `{task.name}`, weight {task.weight:g}" + (f", {code(_json(task.config))}" if task.config else "")
        for task in manifest.tasks
    ]
    versions = [f"{name} {code(version)}" for name, version in manifest.versions.items()]
    return "\n".join([
        "---", yaml.safe_dump(metadata, sort_keys=False).strip(), "---", "",
        f"# {trained.repo.partition('/')[2]}", "",
        f"Trained with RL Swarm {__version__} by reinforcement learning (GRPO) in the swarm `{manifest.name}`, whose "
        "nodes share rollouts instead of weights.", "",
        f"- **Base model**: {base}",
        f"- **Environment**: `{manifest.environment}`, {counted(len(manifest.tasks), 'task')}",
        f"- **Rounds played**: {trained.rounds} of {manifest.rounds}", "",
        "## Held-out score", "", *_scores(trained.held_out), "",
        "## How to use it", "", "```python", _snippet(trained), "```", "",
        "## Tasks", "", *tasks, "",
        "## Settings", "", "| setting | value |", "| --- | --- |", *rows, "",
        f"Library versions: {', '.join(versions)}.", "",
    ])  # fmt: skip


def code(text: str, in_table: bool = False) -> str:
    """Quote text as code, because the swarm's owner wrote some of it and Markdown must not be taken from there."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    text = f" {text} " if text.startswith("`") or text.endswith("`") else text
    return fence + (text.replace("|", "\\|") if in_table else text) + fence


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def shown_settings(settings: NodeSettings, manifest: Manifest) -> dict[str, object]:
    """Return the important settings and those that differ from their defaults.

    Free text is never among them: it may be a secret or a path.
    """
    values = {
        **settings.flat(),
        **{name: getattr(manifest, name) for name in OF_SWARM},
        "learning_rate": settings.step_size(),
        "max_new_tokens": settings.completion_tokens(),
    }
    told, shown = public_settings(values), {}
    for setting in settings_of(type(settings)):
        value = values[setting.name]
        changed = setting.name in told and value != setting.default and setting.name not in NEVER
        if setting.name in ALWAYS or changed:
            shown[setting.name] = value
    return shown


def _scores(held_out: Sequence[dict[str, Any]]) -> list[str]:
    start = next((line for line in held_out if line["when"] == "start"), None)
    last = next((line for line in reversed(held_out) if line["when"] != "start"), None)
    if start is None or last is None:
        return ["Not measured yet."]
    times = f" {counted(last['samples'], 'time')}" if last.get("samples") else ""
    when = "after the last round" if last["when"] == "end" else f"after round {last['round']}"
    tasks = sorted(start["by_task"].keys() | last["by_task"].keys())
    rows = [("**all**", start["sampled"], last["sampled"], start["greedy"], last["greedy"])]
    columns = [line[kind] for kind in ("by_task", "greedy_by_task") for line in (start, last)]
    rows += [(code(task, in_table=True), *(column.get(task) for column in columns)) for task in tasks]
    return [
        f"Mean reward on {counted(last['questions'], 'question')} that training never saw, before it and {when}, as "
        "this node "
        f"measured it: sampled{times} at temperature 1, and the likeliest answer (greedy).",
        "",
        "| task | sampled before | sampled after | greedy before | greedy after |",
        "| --- | --- | --- | --- | --- |",
        *(f"| {name} | {' | '.join(_number(score) for score in scores)} |" for name, *scores in rows),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def prompting(tokenizer: Any) -> Literal["system", "user", "plain"]:
    """Tell where the instruction goes in this model's prompts, as `Policy.prompt_ids` has it."""
    if tokenizer.chat_template is None:
        return "plain"
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    try:
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception:  # noqa: BLE001 some templates refuse a system message, each with an error of its own
        return "user"
    return "system"


def _snippet(trained: Trained) -> str:
    examples = [example for line in trained.held_out for example in line.get("examples", [])]
    question = examples[0]["prompt"] if examples else "What is 12 + 7?"
    system = trained.system_prompt
    if trained.prompting == "plain":
        encode = [f"inputs = tokenizer({system!r} + '\\n\\n' + question + '\\n', return_tensors='pt')"]
    else:
        first = [f'    {{"role": "system", "content": {system!r}}},'] if trained.prompting == "system" else []
        content = "question" if first else f"{system!r} + '\\n\\n' + question"
        encode = [
            "messages = [", *first, f'    {{"role": "user", "content": {content}}},', "]",
            "text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)",
            'inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")',
        ]  # fmt: skip
    return "\n".join([
        "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
        f'tokenizer = AutoTokenizer.from_pretrained("{trained.repo}")',
        f'model = AutoModelForCausalLM.from_pretrained("{trained.repo}")',
        f"question = {question!r}",
        *encode,
        'inputs.pop("token_type_ids", None)',
        f"output = model.generate(**inputs, max_new_tokens={trained.settings.completion_tokens()}, do_sample=False)",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ])  # fmt: skip
