"""Describes settings: a section has the settings of one part, sections are put together, and names stay flat.

A user knows a setting by one name: in files, variables, flags and records. Inside the package it stands in the section
of the part that uses it, so that `top_p` is `settings.sampling.top_p`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from rl_swarm.errors import ConfigError, suggestion

S = TypeVar("S", bound="SectionedSettings")
Part = TypeVar("Part", bound="SectionedSettings")


def setting(description: str, env: str | None = None, secret: bool = False, **limits: Any) -> Meta:
    """Describe a setting: what it is, the variables that set it, whether it is never shown or kept, its limits."""
    return Meta(description=description, extra={"env": env, "secret": secret}, **limits)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds the settings of one part. The heading stands above its table in docs/settings.md."""

    heading: ClassVar[str] = ""


class SectionedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds sections. The name of a setting is unique in all of them."""

    @classmethod
    def of(cls: type[S], **values: object) -> S:
        """Make settings from values by their flat names; the others are defaults."""
        return cls().changed(**values)

    def changed(self: S, **values: object) -> S:
        """Return these settings with other values, by their flat names; raises `ConfigError` for one that cannot be."""
        known, given = {one.name: one for one in settings_of(type(self))}, dict[str, dict[str, object]]()
        for name, value in values.items():
            if name not in known:
                raise ConfigError(f"There is no setting `{name}`.")
            given.setdefault(known[name].section, {})[name] = known[name].convert(value)
        return replace(self, **{section: replace(getattr(self, section), **new) for section, new in given.items()})

    def flat(self) -> dict[str, object]:
        """Return every value by its flat name, as JSON has it."""
        sections: dict[str, dict[str, object]] = msgspec.to_builtins(self)
        return {name: value for section in sections.values() for name, value in section.items()}

    def part(self, kind: type[Part]) -> Part:
        """Return some of the sections: those that `kind` has."""
        return kind(**{section: getattr(self, section) for section in kind.__struct_fields__})


@dataclass(frozen=True)
class Setting:
    """Describes one setting: a row of docs/settings.md."""

    section: str
    name: str
    kind: Any
    description: str
    env: tuple[str, ...]
    default: object
    secret: bool  # never shown, and not kept with a run

    @property
    def is_choice(self) -> bool:
        return get_origin(get_args(self.kind)[0]) is Literal

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(get_args(self.kind)[0]) if self.is_choice else ()

    def convert(self, value: object, origin: str = "", usual: object = None) -> object:
        """Return a value in this setting's type; an error names where the value is from, and the usual one."""
        if self.default is None and value in ("None", "none", "null"):
            return None
        if isinstance(value, str) and self.is_choice:
            value = value.lower()  # LOG_LEVEL=INFO
        try:
            return msgspec.convert(value, self.kind, strict=not isinstance(value, str))
        except msgspec.ValidationError as error:
            shown = "(not shown)" if self.secret else repr(value)
            source = f" ({origin})" if origin else ""
            default = "" if usual is None else f" The default is {usual!r}."
            raise ConfigError(
                f"{self.name}={shown}{source} cannot be used. What can: {values_of(self.kind)}."
                f"{default}{suggestion(value, self.choices)}"
            ) from error


@cache
def headings(schema: type[SectionedSettings]) -> Mapping[str, str]:
    """Return the heading of every section."""
    kinds = get_type_hints(schema)
    return {section: kinds[section].heading for section in schema.__struct_fields__}


@cache
def settings_of(schema: type[SectionedSettings]) -> tuple[Setting, ...]:
    """List the settings of all sections."""
    found, kinds = [], get_type_hints(schema)
    for section in schema.__struct_fields__:
        hints = get_type_hints(kinds[section], include_extras=True)
        for entry in msgspec.structs.fields(kinds[section]):
            kind = hints[entry.name]
            meta = next(m for m in kind.__metadata__ if isinstance(m, Meta) and m.extra)
            extra = meta.extra or {}
            env = tuple(part.strip() for part in (extra["env"] or "").split(",") if part.strip())
            found.append(
                Setting(section, entry.name, kind, meta.description or "", env, entry.default, extra["secret"])
            )
    return tuple(found)


def values_of(kind: Any) -> str:
    """Say in words what a setting can be."""
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
