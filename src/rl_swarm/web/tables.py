"""Writes tables and curves as CSV, for a spreadsheet."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Literal

from rl_swarm.monitor.records import Lines, Link, NodeCurves, NodeDetail, RolloutRow, SettingsTable, TaskScore

Cell = object
FORMULAS = tuple("=+-@＝＋－＠")  # some programs read the full-width ones as the others
SPACES = ("\t", "\r", "\n")
NodeTable = Literal[
    "learned_from",
    "used_by",
    "held_out",
    "rejected",
    "rejected_by_peers",
    "errors",
    "checkpoints",
    "settings",
    "hardware",
]


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow([_safe(title) for title in header])
    writer.writerows([_safe(cell) for cell in row] for row in rows)
    return out.getvalue()


def records_csv(kind: type, rows: Iterable[object], but: Sequence[str] = ()) -> str:
    """Write records of one kind, a column per field, without some."""
    names = [field.name for field in fields(kind) if field.name not in but]
    return csv_text(names, ([getattr(row, name) for name in names] for row in rows))


def lines_csv(lines: Lines) -> str:
    """Write a column per line, after mean and percentiles of all nodes."""
    band = {"10th percentile": lines.low, "median": lines.median, "90th percentile": lines.high}
    known = {title: values for title, values in band.items() if values}
    header = ["round", "mean", *known, *(line.name for line in lines.lines)]
    columns = [lines.rounds, lines.mean, *known.values(), *(line.values for line in lines.lines)]
    return csv_text(header, zip(*columns, strict=True))


def curves_csv(curves: NodeCurves) -> str:
    columns = [curves.rounds, *curves.metrics.values()]
    return csv_text(["round", *curves.metrics], zip(*columns, strict=True))


def settings_csv(table: SettingsTable) -> str:
    return csv_text(["setting", *table.runs, "differs"], ([r.name, *r.values, r.differs] for r in table.settings))


def node_csv(node: NodeDetail, table: NodeTable) -> str:
    """Write one of the tables of a node's page."""
    if table == "held_out":
        return records_csv(TaskScore, node.held_out)
    if table == "checkpoints":
        return csv_text(["round"], ([played] for played in node.checkpoints))
    if table in ("learned_from", "used_by"):
        return records_csv(Link, getattr(node, table))
    rows: dict[str, Cell] = getattr(node, table)
    header = ["name", "value"] if table in ("settings", "hardware") else ["reason", "times"]
    return csv_text(header, rows.items())


def rollouts_csv(rows: Iterable[RolloutRow]) -> str:
    """Write a line per completion."""
    header = (
        "round", "stage", "number", "node", "name", "model", "task", "question", "answer", "completion", "reward",
        "advantage",
    )  # fmt: skip
    return csv_text(
        header,
        (
            (r.round, r.stage, r.number, r.node, r.name, r.model, r.task, r.question, r.answer, t.text, t.reward,
            t.advantage)
            for r in rows
            for t in r.completions
        ),
    )  # fmt: skip


def _safe(cell: Cell) -> Cell:
    """Put an apostrophe before what a spreadsheet would take for a formula: models and peers wrote it."""
    if isinstance(cell, str) and (cell[:1] in SPACES or cell.lstrip()[:1] in FORMULAS):
        return f"'{cell}"
    return cell
