"""RL Swarm in notebooks: real kernels, real nodes below a cell."""

import base64
import json
import struct
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from cells import NOTEBOOKS, executed, kernel, output
from processes import end, metrics, start, state, until

from rl_swarm import notebook
from rl_swarm.identity import Identity, animal_name
from rl_swarm.notebook.cells import _written

ROUNDS = 10
QUICK = "web=False, held_out_questions=16, held_out_samples=1"
CELL = f"from rl_swarm import notebook\nnotebook.up('runs/r', nodes=2, rounds={ROUNDS}, {QUICK})"


@dataclass
class Trained:
    """What happened in a kernel whose cell was interrupted and run again."""

    cwd: Path
    stopped_at: int
    stopped: list[dict[str, Any]]
    finished: list[dict[str, Any]]
    again: list[dict[str, Any]]

    @property
    def names(self) -> list[str]:
        keys = [self.cwd / "swarm.pem", self.cwd / "swarm-2.pem"]
        return [animal_name(Identity.load(key).peer_id) for key in keys]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    cwd = tmp_path_factory.mktemp("notebook")
    run = cwd / "runs" / "r"
    with kernel(cwd) as jupyter:
        cell = jupyter.start(CELL)
        until(lambda: state(run)["round"] >= 2, 120)
        nodes = jupyter.family
        assert len(nodes) >= 4, "it runs as in a shell: a process for each"
        jupyter.manager.interrupt_kernel()
        stopped = jupyter.finish(cell)
        _, alive = psutil.wait_procs(nodes, timeout=30)  # the fork server ends when it notices
        assert not alive
        stopped_at = state(run)["round"]
        yield Trained(cwd, stopped_at, stopped, jupyter.run(CELL), jupyter.run(CELL))


def test_a_swarm_in_a_cell_is_one_picture_that_changes(trained: Trained) -> None:
    first, *others = trained.finished
    assert first["msg_type"] == "display_data" and others
    assert {message["msg_type"] for message in others} == {"update_display_data"}
    (place,) = {message["content"]["transient"]["display_id"] for message in trained.finished}
    assert place
    last = others[-1]["content"]["data"]
    for shown in last["text/html"], last["text/plain"]:
        assert f"round {ROUNDS}/{ROUNDS}" in shown and "finished" in shown and "\x1b" not in shown
        assert all(name in shown for name in trained.names)
        assert "Held-out score: questions that training never saw" in shown
    assert "<answer>" not in last["text/html"] and "&lt;answer&gt;" in last["text/html"]


def test_an_interrupted_cell_stops_cleanly_and_goes_on_when_run_again(trained: Trained) -> None:
    assert trained.stopped_at < ROUNDS - 1
    assert {message["msg_type"] for message in trained.stopped} == {"display_data", "update_display_data"}
    said = trained.stopped[-1]["content"]["data"]["text/plain"]
    assert "Stopped. Run the cell again to go on." in said and "Traceback" not in said
    assert state(trained.cwd / "runs" / "r")["phase"] == "finished"
    for lines in metrics(trained.cwd / "runs" / "r").values():
        played = [line for line in lines if line["kind"] == "round"]
        assert {line["round"] for line in played} == set(range(ROUNDS))
        assert [line["policy_version"] for line in played] == sorted(
            line["policy_version"] for line in played
        )
    (shown,) = trained.again  # a finished run is only shown
    assert f"round {ROUNDS}/{ROUNDS}" in shown["content"]["data"]["text/plain"]


def test_the_monitor_shows_table_and_curves(trained: Trained) -> None:
    run = executed("monitor.ipynb", trained.cwd, ADDRESS="runs/r")
    (table,) = output(run, "look")
    for shown in table.data["text/html"], table.data["text/plain"]:
        assert all(name in shown for name in trained.names) and f"round {ROUNDS}/{ROUNDS}" in shown
    for cell, words in (("curves", "reward, held-out score, tokens"), ("more", "entropy, length of answers")):
        (figure,) = output(run, cell)
        assert words in figure.data["text/plain"]
        png = base64.b64decode(figure.data["image/png"])
        assert png.startswith(b"\x89PNG") and min(struct.unpack(">II", png[16:24])) > 300


def test_the_curves_of_a_plot_are_those_of_the_logs(trained: Trained) -> None:
    swarm = notebook.look(trained.cwd / "runs" / "r")
    (axes,) = swarm.plot("reward_local").figure.axes
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert set(lines) == {*trained.names, "mean"}
    for node, written in metrics(trained.cwd / "runs" / "r").items():
        rewards = dict.fromkeys(range(ROUNDS), 0.0)
        rewards |= {line["round"]: line["reward_local"] for line in written if line["kind"] == "round"}
        name = next(name for name in trained.names if node.startswith(name.replace(" ", "-")))
        assert lines[name][-1] == pytest.approx(rewards[ROUNDS - 1]) and len(lines[name]) == ROUNDS
    with pytest.raises(notebook.UserError, match=r"no curve of 'nothing'.*entropy"):
        swarm.plot("nothing")


def test_a_worker_joins_and_trains_below_its_cell(tmp_path: Path) -> None:
    address = tmp_path / "drive" / "experiments" / "first"
    address.parent.mkdir(parents=True)
    (tmp_path / "coordinator").mkdir()
    rules = ["--rounds", "2", "--round-end", "everyone", "--min-peers", "1", "--set", "poll_interval=0.2"]
    coordinator = start(tmp_path / "coordinator", "coordinate", str(address), *rules)
    small = {
        "held_out_questions": 16,
        "held_out_samples": 1,
        "generations": 4,
        "poll_interval": 0.2,
        "threads": 1,
    }
    small["node_id"] = "colab"
    try:
        run = executed("worker.ipynb", tmp_path, ADDRESS=str(address), LOCAL=2, EXTERNAL=1, SETTINGS=small)
        said, _ = coordinator.communicate(timeout=60)
    finally:
        end(coordinator)
    assert coordinator.returncode == 0, said
    (shown,) = output(run, "join")
    name = animal_name(Identity.load(tmp_path / "swarm.pem").peer_id)
    assert name in shown.data["text/html"] and "round 2/2" in shown.data["text/html"]
    assert [line["round"] for line in metrics(address)["colab"] if line["kind"] == "round"] == [0, 1]


def test_errors_are_said_in_a_line_and_nothing_outlives_its_kernel(tmp_path: Path) -> None:
    with kernel(tmp_path) as jupyter:
        jupyter.run("from rl_swarm import notebook")
        for code, words in (
            ("notebook.look('nowhere')", "nowhere is no swarm"),
            ("notebook.join('/nowhere/experiments/x')", "the folder does not exist. Is the drive mounted"),
            ("notebook.up('r', nodse=3)", "Did you mean `nodes`?"),
        ):
            error = jupyter.run(code)[-1]
            assert error["msg_type"] == "error" and error["content"]["ename"].endswith("Error")
            (line,) = error["content"]["traceback"]
            assert line.startswith("rl-swarm: ") and words in line
        address = tmp_path / "experiments" / "x"
        jupyter.start(f"notebook.coordinate({str(address)!r}, rounds=3)")
        until(lambda: (address / "manifest.json").exists() and len(jupyter.family) == 1, 60)
        (process,) = jupyter.family
        jupyter.manager.shutdown_kernel(now=True)
        process.wait(60)


def test_a_drive_is_mounted_in_colab_only_and_only_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_drive = "/content/drive/MyDrive/rl-swarm/experiments/first"
    notebook.mount_drive(on_drive)  # there is no Colab here
    mounted: list[str] = []
    drive = types.SimpleNamespace(mount=mounted.append)  # what Colab has, and nobody else
    monkeypatch.setitem(sys.modules, "google.colab", types.SimpleNamespace(drive=drive))
    monkeypatch.setitem(sys.modules, "google", types.SimpleNamespace(colab=sys.modules["google.colab"]))
    notebook.mount_drive("runs/r")
    notebook.mount_drive("s3://bucket/first")
    assert mounted == []
    notebook.mount_drive(on_drive)
    assert mounted == ["/content/drive"]


def test_settings_are_written_as_flags_take_them() -> None:
    values = [True, None, 3, 1e-5, "tiny", ["chain_sum", "gcd"]]
    assert list(map(_written, values)) == ["true", "none", "3", "1e-05", "tiny", "chain_sum,gcd"]


def test_every_notebook_is_set_up_the_same_way() -> None:
    """Where the package is there, nothing is installed; the cell that does it is one and the same."""
    found = {path.name: json.loads(path.read_text()) for path in NOTEBOOKS.glob("*.ipynb")}
    assert {"monitor.ipynb", "worker.ipynb"} <= set(found)
    cells = [[cell for cell in book["cells"] if cell["id"] == "setup"] for book in found.values()]
    assert all(len(cell) == 1 for cell in cells) and len({str(cell[0]["source"]) for cell in cells}) == 1
    assert "find_spec" in str(cells[0][0]["source"])
