"""Shows the terminal's picture as the output of a cell, and replaces it by the next."""

import io
from typing import Any

from rich.console import Console, RenderableType
from rich.terminal_theme import TerminalTheme

WIDTH, HEIGHT = 100, 60  # columns and lines
GREY, RED, GREEN, AMBER, BLUE, PURPLE, TEAL = (
    (128, 128, 128), (214, 69, 65), (38, 158, 82), (190, 130, 10), (52, 120, 210), (150, 90, 190), (20, 150, 160),
)  # fmt: skip
# Colours that are readable on white and on black.
THEME = TerminalTheme(GREY, GREY, [GREY, RED, GREEN, AMBER, BLUE, PURPLE, TEAL, GREY])
FORMAT = '<pre style="font-family: monospace; line-height: 1.3; white-space: pre; overflow-x: auto">{code}</pre>'


class Picture:
    """Renders characters as HTML where that can be shown, and as plain text elsewhere."""

    def __init__(self, drawn: RenderableType) -> None:
        console = Console(file=io.StringIO(), record=True, width=WIDTH, force_jupyter=False, highlight=False)
        console.print(drawn)
        self.html = console.export_html(theme=THEME, code_format=FORMAT, inline_styles=True, clear=False)
        self.text = console.export_text().rstrip()

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


class Cell:
    """Replaces the output of the running cell."""

    def __init__(self) -> None:
        self._handle: Any = None  # IPython's
        self._shown = ""

    def show(self, drawn: RenderableType) -> None:
        from IPython.display import display

        picture = Picture(drawn)
        if self._handle is None:
            self._handle = display(picture, display_id=True)
        elif picture.html != self._shown:
            self._handle.update(picture)
        self._shown = picture.html
