"""Finds out what a user has set, and where each value came from.

A value comes from, later wins: its default, the preset of a command, a YAML file, environment variables (a `.env` file
counts as those, below the real ones), command-line flags. `TEST_MODE` is a preset that only flags override.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from rl_swarm.config.checks import check, check_role
from rl_swarm.config.settings import PRESET, TEST_MODE, Settings, all_settings
from rl_swarm.environments.settings import ROLES
from rl_swarm.errors import ConfigError, suggestion
from rl_swarm.network.settings import NetworkSettings
from rl_swarm.node import strategies

MAX_DOTENV = 64 << 10  # bytes


@dataclass(frozen=True)
class SettingsLayer:
    """Values from one source. `origins` says, where the source alone is not enough, which key gave a value."""

    source: str
    values: Mapping[str, object]
    origins: Mapping[str, str] = field(default_factory=dict)

    def origin(self, name: str) -> str:
        return self.origins.get(name, self.source)


def yaml_layer(path: Path) -> SettingsLayer:
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"The settings file {path} cannot be read: {error.strerror}.") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"The settings file {path}{line} is not valid YAML: {error.problem}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"The settings file {path} is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"The settings file {path} must hold `name: value` lines.")
    return SettingsLayer(str(path), values)


def environment_layer(environ: Mapping[str, str], dotenv: Path | None = None) -> SettingsLayer:
    """What the environment variables say; an empty variable says nothing."""
    environ = {key: value for key, value in environ.items() if value != ""}
    merged = {**(read_dotenv(dotenv) if dotenv else {}), **environ}
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for setting in all_settings():
        for variable in setting.env:
            if merged.get(variable):
                values[setting.name] = merged[variable]
                origins[setting.name] = variable if variable in environ else f"{variable} in {dotenv}"
                break
    return SettingsLayer("environment", values, origins)


def read_dotenv(path: Path) -> dict[str, str | None]:
    """Read a `.env` file. `${NAME}` stays as it is: a token may hold that."""
    if not path.is_file():
        return {}
    from dotenv import dotenv_values

    try:
        if path.stat().st_size > MAX_DOTENV:
            raise ConfigError(f"The settings file {path} is too large: at most {MAX_DOTENV} bytes are read.")
        return dotenv_values(path, interpolate=False)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The settings file {path} cannot be read: {error}.") from error


@dataclass(frozen=True)
class Resolved:
    settings: Settings
    sources: Mapping[str, str]


def resolve(layers: Sequence[SettingsLayer], flags: SettingsLayer | None = None) -> Resolved:
    """The settings that the layers give, later ones winning, and where each value came from."""
    values: dict[str, object] = {}
    defaults = next((layer.values for layer in layers if layer.source.startswith(PRESET)), {})
    sources = {setting.name: "default" for setting in all_settings()}

    def apply(layer: SettingsLayer) -> None:
        given = layer.values.get("strategy")
        if isinstance(given, str):  # what it brings along is below what the layer says itself
            apply(SettingsLayer(f"strategy {given}", strategies.named(given).settings))
        for name, value in layer.values.items():
            if name not in sources:
                raise ConfigError(f"There is no setting `{name}` ({layer.origin(name)}).{_suggest(name, sources)}")
            values[name] = _convert(name, value, layer.origin(name), defaults)
            sources[name] = layer.origin(name)

    flags = flags or SettingsLayer("flag", {})
    for layer in [*layers, flags]:
        apply(layer)
    if values.get("test_mode"):
        apply(SettingsLayer("TEST_MODE", TEST_MODE))
        apply(flags)
    settings = Settings.of(**values)
    if settings.task.role not in ROLES:
        check_role(settings.task.role, sources["role"])
    check(settings)
    return Resolved(settings, sources)


def load(
    preset: Mapping[str, object] | None = None,
    config_file: Path | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    command: str = "command",
    origins: Mapping[str, str] | None = None,
) -> Resolved:
    """The settings of a command: its preset, then file, environment and flags; `origins` are flags that are not called
    as
    their setting is."""
    called = {name: f"flag --{name.replace('_', '-')}" for name in flags or {}}
    given = SettingsLayer("flag", dict(flags or {}), {**called, **(origins or {})})
    return resolve([SettingsLayer(f"{PRESET} `{command}`", preset or {}), *_sources(config_file, environ)], given)


def user_network() -> NetworkSettings:
    """Return what the user has set of the network in the environment, whatever the command."""
    return load().settings.network


def layered(presets: Mapping[str, Mapping[str, object]], flags: Mapping[str, object]) -> Settings:
    """Return the settings that named presets give, later ones winning, and above them flags."""
    layers = [SettingsLayer(source, values) for source, values in presets.items()]
    return resolve(layers, SettingsLayer("flag", flags)).settings


def peek(name: str, config_file: Path | None, flags: Mapping[str, object]) -> object:
    """Returns what one setting is, whatever the others are: a command's preset may depend on it."""
    flag = SettingsLayer("flag", flags, {name: f"flag or --set {name}"})
    for layer in (flag, *reversed(_sources(config_file))):
        if name in layer.values:
            return _convert(name, layer.values[name], layer.origin(name), {})
    return next(setting.default for setting in all_settings() if setting.name == name)


def _sources(config_file: Path | None, environ: Mapping[str, str] | None = None) -> list[SettingsLayer]:
    layers = [yaml_layer(config_file)] if config_file else []
    return [*layers, environment_layer(os.environ if environ is None else environ, Path(".env"))]


def _convert(name: str, value: object, origin: str, defaults: Mapping[str, object]) -> object:
    setting = next(s for s in all_settings() if s.name == name)
    if name == "tasks" and value and isinstance(value, list) and all(isinstance(one, str) for one in value):
        value = ",".join(value)  # names alone, as a list in YAML
    return setting.convert(value, origin, defaults.get(name, setting.default))


def _suggest(name: str, known: Mapping[str, str]) -> str:
    return suggestion(name, known) or " `docs/settings.md` lists them."
