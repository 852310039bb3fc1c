"""An experiment as one file, and what others may have put in its place."""

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_measures import made

from rl_swarm.cli.app import app
from rl_swarm.errors import UserError
from rl_swarm.experiment import packed, report
from rl_swarm.experiment.arms import Arm
from rl_swarm.experiment.progress import followed

NODES = {"ann": [(0.125, 0.1), (0.3, 0.3)], "bob": [(0.2, 0.2), (0.2, 0.2)]}
ENDS = {"ann": (0.1, 0.2), "bob": (0.1, 0.4)}
ROOM = 8 << 20  # bytes after decompression, in the tests of what is refused
MACHINE = {"processor": "slow", "cores": "2"}
RATES = {"4/0": {"rate": 0.001, "scores": {"0.001": 0.4}, "seeds": [10000], "rounds": 2}}


def experiment(folder: Path) -> Path:
    for arm in (Arm(4, 0, "alone"), Arm(4, 4)):
        made(folder, arm, 1, NODES, ENDS)
    (folder / "runs" / "4-0-seed1" / "machine.json").write_text(json.dumps(MACHINE))
    (folder / "rates.json").write_text(json.dumps(RATES))
    return folder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "e.jsonl.xz"
    report.pack(experiment(tmp_path / "e"), found)
    return found


def experiment_(*arguments: object) -> None:
    app(["experiment", *map(str, arguments)], standalone_mode=False)


def test_it_makes_the_same_report_from_one_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        experiment(tmp_path / name)
    made(tmp_path / "two", Arm(8, 0, "alone"), 1, {"ann": [(0.1, 0.1)]}, {"ann": (0.1, 0.2)})  # unfinished
    experiment_("pack", tmp_path / "one", tmp_path / "two", tmp_path / "kept")
    files = [tmp_path / "kept" / name for name in ("one.jsonl.xz", "two.jsonl.xz")]
    assert sorted((tmp_path / "kept").iterdir()) == files
    experiment_("report", tmp_path / "one", tmp_path / "two", "--out", tmp_path / "whole")
    experiment_("report", *files, "--out", tmp_path / "packed")
    whole, found = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("whole", "packed"))
    assert whole.pop("unfinished") == ["two: 8-0-seed1"] and found.pop("unfinished") == []
    assert {**whole, "made": ""} == {**found, "made": ""}
    assert found["configurations"]["one: 4/0"]["learning_rate_chosen"] == RATES["4/0"]
    assert found["machine"] == MACHINE
    assert list(report.read(files)["configurations"]) == list(whole["configurations"])


def test_two_experiments_are_not_written_to_one_file(tmp_path: Path) -> None:
    for where in ("a", "b"):
        experiment(tmp_path / where / "e")
    for out in ("kept", "both.jsonl.xz"):
        with pytest.raises(UserError, match="two of these experiments"):
            experiment_("pack", tmp_path / "a" / "e", tmp_path / "b" / "e", tmp_path / out)
        assert not (tmp_path / out).exists()


def test_what_cannot_be_packed_or_reported_is_refused(tmp_path: Path, path: Path) -> None:
    made(tmp_path / "begun", Arm(8, 0, "alone"), 1, {"ann": [(0.1, 0.1)]}, {"ann": (0.1, 0.2)})
    with pytest.raises(UserError, match="No run has finished yet"):
        experiment_("pack", tmp_path / "begun", tmp_path)
    with pytest.raises(UserError, match="--out"):
        experiment_("report", path)
    with pytest.raises(UserError, match="No such file"):
        experiment_("report", tmp_path / "none.jsonl.xz", "--out", tmp_path)


def test_what_nobody_could_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "MAX_UNPACKED", 500)
    with pytest.raises(UserError, match="too large"):
        experiment_("pack", experiment(tmp_path / "e"), tmp_path)
    assert not (tmp_path / "e.jsonl.xz").exists()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lzma.decompress(path.read_bytes()).splitlines()]


def changed(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[Path], None]:
    """Changes the lines of a file."""

    def rewrite(path: Path) -> None:
        lines = lines_of(path)
        change(lines)
        path.write_bytes(lzma.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))

    return rewrite


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


WRONG: dict[str, Callable[[Path], object]] = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "something behind it": lambda path: path.write_bytes(path.read_bytes() * 2),
    "no xz": lambda path: path.write_text("{}"),
    "nothing": lambda path: path.write_bytes(b""),
    "a link": lambda path: path.rename(path.with_name("x")) and path.symlink_to("x"),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "zeros without end": lambda path: path.write_bytes(lzma.compress(bytes(ROOM + 1))),
    "a long line": lambda path: path.write_bytes(lzma.compress(b'{"machine": {"a": "' + b"a" * (5 << 20) + b'"}}')),
    "many values": changed(lambda lines: lines[1]["job"]["settings"].update(a=[[]] * 300_000)),
    "deep": changed(lambda lines: lines[1]["job"]["settings"].update(a=nested(100))),
    "a node missing": changed(lambda lines: lines.pop()),
    "a node too many": changed(lambda lines: lines.append(lines[-1])),
    "a round missing": changed(lambda lines: lines[1]["round"].pop()),
    "a column missing": changed(lambda lines: lines[1].pop("round")),
    "words for numbers": changed(lambda lines: lines[1].update(round=["one", "two"])),
    "no examination": changed(lambda lines: lines[1].update(held_out=[])),
    "no rounds": changed(lambda lines: [line["job"].update(rounds=0) for line in lines[1:]]),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_others_put_in_its_place_is_refused_in_one_line(
    path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "MAX_UNPACKED", ROOM)
    WRONG[wrong](path)
    for read in (lambda: report.find([path]), lambda: followed(path)):
        with pytest.raises(UserError, match=r"e\.jsonl\.xz cannot be read: .") as caught:
            read()
        assert len(str(caught.value)) < 600
