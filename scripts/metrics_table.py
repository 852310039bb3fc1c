"""Writes the tables of metrics in docs/metrics.md, from the comments of the fields in `telemetry/schema.py`.

python scripts/metrics_table.py            # writes the tables again
python scripts/metrics_table.py --check    # says whether they are up to date
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from rl_swarm.monitor.node_history import MEASURED

ROOT = Path(__file__).resolve().parents[1]
PAGE, SCHEMA = ROOT / "docs" / "metrics.md", ROOT / "src" / "rl_swarm" / "telemetry" / "schema.py"
BEGIN, END = "<!-- begin: scripts/metrics_table.py -->", "<!-- end -->"
PARTS = {"seconds": "Seconds", "load": "Load"}  # fields that are records themselves
CURVES = {*MEASURED, "reward_by_stage", "sampled", "greedy"}  # that the dashboard draws
UNITS = {"s", "tokens", "tokens/s", "groups", "updates", "questions", "answers", "nats", "bytes", "cores", "0 to 1"}


def comments(record: str) -> Iterator[tuple[str, str]]:
    """Yield the fields of a record, each with the comment behind it."""
    text = SCHEMA.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    by_line = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    (found,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == record)
    for field in found.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            yield field.target.id, by_line.get(field.lineno, "")


def rows(record: str, prefix: str = "") -> Iterator[tuple[str, ...]]:
    """Yield the rows of a record: name, unit, whether it has a curve, meaning."""
    for field, comment in comments(record):
        name = prefix + field
        if field in PARTS:
            yield from rows(PARTS[field], f"{name}.")
            continue
        unit, colon, meaning = comment.partition(": ")
        if colon and unit not in UNITS:
            sys.exit(f"{SCHEMA.name}: the comment of {field} begins with {unit!r}, which is not one of {sorted(UNITS)}")
        yield f"`{name}`", unit if colon else "", "yes" if name in CURVES else "", meaning if colon else comment


def table(*records: str) -> str:
    lines = [("metric", "unit", "curve", "what it is"), ("---",) * 4, *(row for name in records for row in rows(name))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def page(before: str) -> str:
    """Return the page with its tables made anew; what stands around the markers stays."""
    head, _, rest = before.partition(BEGIN)
    tail = rest.partition(END)[2]
    lines = (
        "A round, or a stage of one (`kind` is `round`):",
        table("RoundRecord"),
        "A held-out score (`kind` is `held_out`):",
        table("HeldOutRecord", "HeldOut"),
    )
    made = "\n\n".join(lines)
    return f"{head}{BEGIN}\n\n{made}\n\n{END}{tail}"


def main() -> None:
    before = PAGE.read_text(encoding="utf-8")
    after = page(before)
    if "--check" in sys.argv:
        sys.exit(0 if before == after else f"{PAGE.name} is out of date: run python scripts/metrics_table.py")
    PAGE.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
