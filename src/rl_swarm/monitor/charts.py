"""Draws numbers in characters: a curve in one line or in several, a bar, and how values are spread."""

from collections.abc import Sequence

from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
LEVELS = len(BLOCKS)
BAR, DONE, CURVE = "cyan", "green", "green"  # red is for errors
LABEL = 7  # columns of a number beside a chart


def curve(values: Sequence[float | None]) -> str:
    """Draw values as one line of block characters, from the lowest to the highest; a gap where there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    steps = LEVELS - 1
    return "".join(
        " " if value is None else BLOCKS[round((value - low) / span * steps) if span else 0] for value in values
    )


def chart(values: Sequence[float | None], width: int, rows: int) -> list[Text]:
    """Draw values as an area of so many columns and lines, with the highest and the lowest value beside it."""
    known = [value for value in values if value is not None]
    if not known or width <= LABEL or rows < 2:
        return []
    low, high = min(known), max(known)
    columns = width - LABEL
    shown = [values[column * len(values) // columns] for column in range(columns)]
    heights = [
        None if value is None else 1 + round((value - low) / (high - low) * (rows * LEVELS - 1)) if high > low else 1
        for value in shown
    ]
    lines = []
    for row in range(rows - 1, -1, -1):
        label = figure(high) if row == rows - 1 else figure(low) if row == 0 else ""
        cells = "".join(_block(height, row) for height in heights)
        lines.append(Text(f"{label:>{LABEL - 1}} ", style="dim", no_wrap=True).append(cells, style=CURVE))
    return lines


def _block(height: int | None, row: int) -> str:
    """Return what a column of so many eighths shows in a row, counted from below."""
    full = 0 if height is None else height - row * LEVELS
    return " " if full <= 0 else BLOCKS[min(full, LEVELS) - 1]


def bar(done: int, total: int, width: int) -> Text:
    """Draw how much is done. The end of what is done shows without colours too."""
    share = min(1.0, max(0.0, done / total)) if total > 0 else 0.0
    filled = round(share * width)
    text = Text("━" * filled, style=DONE if share == 1 else BAR, no_wrap=True)
    return text.append("┄" * (width - filled), style="bright_black")


def spread(values: Sequence[float], width: int, bins: int = 8) -> list[Text]:
    """Draw how many values lie in each of equal parts of their range, and the percentiles below."""
    low, size, counts = _binned(values, bins)
    room, most = max(1, width - 2 * LABEL - 10), max(counts)
    lines = []
    for number, count in enumerate(counts):
        first, last = low + number * size, low + (number + 1) * size
        line = Text(f"{figure(first):>{LABEL}} to {figure(last):<{LABEL - 1}} ", style="dim", no_wrap=True)
        length = max(count > 0, round(count / most * room))
        lines.append(line.append("█" * length, style=BAR).append(f" {count:,}"))
    return [*lines, percentiles(values)]


def spread_line(values: Sequence[float], bins: int = 24) -> Text:
    """Draw the same in one line."""
    low, size, counts = _binned(values, bins)
    line = Text(f"{figure(low)} ", style="dim", no_wrap=True, overflow="ellipsis")
    return line.append(curve(counts), style=BAR).append(f" {figure(low + size * len(counts))}")


def percentiles(values: Sequence[float]) -> Text:
    """Say between which values most of them lie."""
    ordered = sorted(values)
    places = (("lowest", 0.0), ("10 % below", 0.1), ("half below", 0.5), ("10 % above", 0.9), ("highest", 1.0))
    told = (f"{name} {figure(ordered[round(place * (len(ordered) - 1))])}" for name, place in places)
    return Text(" · ".join(told), no_wrap=True, overflow="ellipsis")


def _binned(values: Sequence[float], bins: int) -> tuple[float, float, list[int]]:
    """Count the values in equal parts of their range; return the lowest, the size of a part, and the counts."""
    low, high = min(values), max(values)
    size = (high - low) / bins
    counts = [0] * (bins if size > 0 else 1)
    for value in values:
        counts[min(len(counts) - 1, int((value - low) / size)) if size > 0 else 0] += 1
    return low, size, counts


def figure(value: float, digits: int = 2, sign: str = "") -> str:
    """Format a number in few characters, however large it is."""
    return f"{value:{sign},.{digits}f}" if abs(value) < 1e6 else f"{value:{sign}.0e}"
