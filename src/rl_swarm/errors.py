"""Defines the errors that a user can mend."""


class UserError(Exception):
    """Its message names the setting or file, the value, and what would work. Shown without a traceback."""

    def _render_traceback_(self) -> list[str]:
        """What Jupyter shows of it."""
        return [f"rl-swarm: {self}"]


class ConfigError(UserError):
    """A setting that cannot be used. The message names it, its value, its source and what would work."""


class ModelError(UserError):
    """A model that cannot be loaded; the message says what would work."""
