"""Generates flags from settings, so that a flag, its help and its type are what the schema says."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer

from rl_swarm.config.settings import all_settings
from rl_swarm.sections import Setting, values_of

Command = TypeVar("Command", bound=Callable[..., Any])

# Flags whose names differ from their settings'.
NAMES = {
    "environment": "--env",
    "web_host": "--host",
    "web_port": "--port",
    "web": "--web/--no-web",
    "p2p_initial_peers": "--initial-peers",
}
LAST = ("config_file", "sets", "dry_run", "as_json")  # in the help of a command


def flag_of(name: str) -> str:
    """Return the flag of a setting, as the user types it."""
    return NAMES.get(name, f"--{name.replace('_', '-')}")


def setting_flags(*names: str) -> Callable[[Command], Command]:
    """Give a command a flag for each of these settings; those that the user gave reach it as `**flags`."""
    settings = {setting.name: setting for setting in all_settings()}

    def add(command: Command) -> Command:
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        generated = [_parameter(settings[name]) for name in names]
        first, last = [p for p in own if p.name not in LAST], [p for p in own if p.name in LAST]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*first, *generated, *last)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return add


def _parameter(setting: Setting) -> inspect.Parameter:
    kind = get_args(setting.kind)[0]
    bare = _bare(kind)
    python = bool if bare is bool else str  # numbers are read by the setting, whose error says what can be used
    shown = {int: "NUMBER", float: "NUMBER"}.get(bare, "TEXT")
    text = setting.description.replace("`", "")
    if not setting.description.startswith("`"):
        text = text[:1].upper() + text[1:]
    if get_origin(kind) is Literal:
        text += f" ({values_of(setting.kind).replace('`', '')})"
    annotation = Annotated[python | None, typer.Option(flag_of(setting.name), metavar=shown, help=f"{text}.")]  # type: ignore[valid-type]
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _bare(kind: Any) -> Any:
    """Return a setting's type without None and without its limits."""
    members = [one for one in get_args(kind) if one is not type(None)] if type(None) in get_args(kind) else [kind]
    return get_args(members[0])[0] if get_origin(members[0]) is Annotated else members[0]
