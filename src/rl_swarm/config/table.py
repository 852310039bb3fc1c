"""Writes the tables of docs/settings.md, one for every section: `python -m rl_swarm.config.table`."""

import msgspec

from rl_swarm.config.settings import UP_PRESET, Settings, all_settings
from rl_swarm.sections import Setting, headings, values_of

COLUMNS = ("setting", "environment variable", "default", "in `up`", "values", "what it is")


def settings_tables() -> str:
    """Return all settings as the Markdown of docs/settings.md."""
    return "\n".join(
        f"## {heading}\n\n{_table([known for known in all_settings() if known.section == section])}"
        for section, heading in headings(Settings).items()
    )


def _table(settings: list[Setting]) -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(_row, settings)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(known: Setting) -> tuple[str, ...]:
    variables = ", ".join(f"`{name}`" for name in known.env)
    default, preset = (
        "" if value is None else f"`{msgspec.json.encode(value).decode()}`"
        for value in (known.default, UP_PRESET.get(known.name))
    )
    return (f"`{known.name}`", variables, default, preset, values_of(known.kind), known.description)


if __name__ == "__main__":
    print(settings_tables(), end="")
