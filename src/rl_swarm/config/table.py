"""Writes the table of docs/settings.md: `python -m rl_swarm.config.table`."""

import msgspec

from rl_swarm.settings import UP_PRESET, all_settings, values_of


def settings_table() -> str:
    """All settings as the Markdown table of docs/settings.md."""
    rows = [
        ("setting", "environment variable", "default", "in `up`", "values", "what it is"),
        ("---",) * 6,
    ]
    for setting in all_settings():
        variables = ", ".join(f"`{name}`" for name in setting.env)
        default, preset = (
            "" if value is None else f"`{msgspec.json.encode(value).decode()}`"
            for value in (setting.default, UP_PRESET.get(setting.name))
        )
        rows.append((f"`{setting.name}`", variables, default, preset, values_of(setting.kind), setting.description))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    print(settings_table(), end="")
