"""Defines the settings of the dashboard."""

from typing import Annotated, ClassVar

from rl_swarm.sections import Section, setting

SHORTEST_TOKEN = 12  # characters


class WebSettings(Section, frozen=True, kw_only=True):
    heading: ClassVar[str] = "The dashboard"

    web: Annotated[bool, setting("serve the dashboard while `up` runs", "SWARM_WEB")] = True
    web_host: Annotated[str, setting("where the dashboard listens; only this machine by default", "SWARM_WEB_HOST")] = (
        "127.0.0.1"
    )
    web_port: Annotated[
        int, setting("port of the dashboard, or the next that is free", "SWARM_WEB_PORT", ge=1, le=65535)
    ] = 8080
    web_token: Annotated[
        str | None,
        setting(
            "with it the dashboard of `up` can stop the run; where others reach the dashboard, it is "
            "also the password to see it",
            "SWARM_WEB_TOKEN",
            secret=True,
        ),
    ] = None
