"""RL Swarm in notebooks: real kernels, real nodes below a cell."""

import base64
import inspect
import json
import shutil
import struct
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from cells import NOTEBOOKS, executed, kernel, output
from processes import metrics, state, until

from rl_swarm import notebook
from rl_swarm.cli.experiment import app as experiment_app
from rl_swarm.notebook.cells import written
from rl_swarm.notebook.experiments import OPTIONS, flags
from rl_swarm.notebook.picture import Picture
from rl_swarm.protocol.identity import Identity, animal_name

ROUNDS = 20
START_FILE = ".bashrc"  # to which logs in the folder lead, while the first cell runs
QUICK = "web=False, held_out_questions=8, held_out_samples=1, local_groups=2, generations=4"
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
        until(lambda: state(run)["round"] >= 2)
        nodes = jupyter.family
        assert len(nodes) >= 4, "it runs as in a shell: a process for each"
        (cwd / START_FILE).write_text("true\n")
        for log in ("metrics", "training_events"):
            for shared in run.glob(f"logs/*/{log}.jsonl"):
                (cwd / "link").symlink_to(cwd / START_FILE)
                (cwd / "link").replace(shared)
        jupyter.manager.interrupt_kernel()
        stopped = jupyter.finish(cell)
        _, alive = psutil.wait_procs(nodes, timeout=400)  # the fork server ends when it notices
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
        assert "Test score: questions that training never saw" in shown
    said = last["text/plain"].count("<answer>")  # by the models, whose answers are shown as they are
    assert "<answer>" not in last["text/html"] and last["text/html"].count("&lt;answer&gt;") == said
    assert "&lt;answer&gt;7" in Picture("<answer>7")._repr_html_()


def test_an_interrupted_cell_stops_cleanly_and_goes_on_when_run_again(trained: Trained) -> None:
    assert trained.stopped_at < ROUNDS - 1
    assert {message["msg_type"] for message in trained.stopped} == {"display_data", "update_display_data"}
    said = trained.stopped[-1]["content"]["data"]["text/plain"]
    assert "Stopped. Run the cell again to resume." in said and "Traceback" not in said
    assert state(trained.cwd / "runs" / "r")["phase"] == "finished"
    for lines in metrics(trained.cwd / "runs" / "r").values():
        played = [line for line in lines if line["kind"] == "round"]
        assert {line["round"] for line in played} == set(range(ROUNDS))
        assert [line["policy_version"] for line in played] == sorted(line["policy_version"] for line in played)
    (shown,) = trained.again  # a finished run is only shown
    assert f"round {ROUNDS}/{ROUNDS}" in shown["content"]["data"]["text/plain"]


def test_nodes_below_a_cell_write_through_no_link_in_their_folder(trained: Trained) -> None:
    assert (trained.cwd / START_FILE).read_text() == "true\n"
    logs = [*(trained.cwd / "runs" / "r").glob("logs/*/*.jsonl")]
    assert len(logs) == 4 and not [log for log in logs if log.is_symlink()], "the links are replaced by the logs"


def test_the_monitor_shows_table_and_curves(trained: Trained) -> None:
    run = executed("monitor.ipynb", trained.cwd, ADDRESS="runs/r")
    (table,) = output(run, "look")
    for shown in table.data["text/html"], table.data["text/plain"]:
        assert all(name in shown for name in trained.names) and f"round {ROUNDS}/{ROUNDS}" in shown
    for cell, words in (("curves", "reward, held-out score, tokens"), ("more", "entropy, length of answers")):
        _has_picture(output(run, cell), words)


def _has_picture(outputs: list[Any], words: str) -> None:
    (figure,) = outputs
    assert words in figure.data["text/plain"]
    png = base64.b64decode(figure.data["image/png"])
    assert png.startswith(b"\x89PNG") and min(struct.unpack(">II", png[16:24])) > 300


def test_the_curves_of_a_plot_are_those_of_the_logs(trained: Trained) -> None:
    swarm = notebook.look(trained.cwd / "runs" / "r")
    (axes,) = swarm.plot("reward_local").figure.axes
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert set(lines) == {*trained.names, "mean"}
    for node, logged in metrics(trained.cwd / "runs" / "r").items():
        rewards = dict.fromkeys(range(ROUNDS), 0.0)
        rewards |= {line["round"]: line["reward_local"] for line in logged if line["kind"] == "round"}
        name = next(name for name in trained.names if node.startswith(name.replace(" ", "-")))
        assert lines[name][-1] == pytest.approx(rewards[ROUNDS - 1]) and len(lines[name]) == ROUNDS
    with pytest.raises(notebook.UserError, match=r"no curve of 'nothing'.*entropy"):
        swarm.plot("nothing")


def test_coordinator_and_worker_train_in_two_notebooks(tmp_path: Path) -> None:
    """As two machines would that share a folder, with the switch that makes it short."""
    address = tmp_path / "drive" / "experiments" / "first"
    for folder in ("coordinator", "worker", "drive"):
        (tmp_path / folder).mkdir()
    quick = {"poll_interval": 0.2, "threads": 1}
    rules = {**quick, "round_end": "everyone", "rounds": 2}
    small = {**quick, "held_out_questions": 8, "held_out_samples": 1, "node_id": "colab"}
    with ThreadPoolExecutor() as pool:
        books = [
            pool.submit(executed, f"{name}.ipynb", tmp_path / name, ADDRESS=str(address), TEST=True, **parameters)
            for name, parameters in (
                ("coordinator", {"SETTINGS": rules}),
                ("worker", {"LOCAL_GROUPS": 2, "EXTERNAL_GROUPS": 1, "SETTINGS": small}),
            )
        ]
        coordinator, worker = (book.result() for book in books)
    name = animal_name(Identity.load(tmp_path / "worker" / "swarm.pem").peer_id)
    for book, cell in ((coordinator, "coordinate"), (worker, "join")):
        (shown,) = output(book, cell)
        assert name in shown.data["text/html"] and "round 2/2" in shown.data["text/html"]
    tried = address.with_name("first-test")
    played = [line for line in metrics(tried)["colab"] if line["kind"] == "round"]
    assert [line["round"] for line in played] == [0, 1] and not address.exists()


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The notebook of the experiment after a small one."""
    cwd = tmp_path_factory.mktemp("sapo")
    small = {"held_out_questions": 10, "held_out_samples": 1, "generations": 4, "device": "cpu"}
    sizes = {"NODES": 2, "ROUNDS": 2, "CONFIGS": "8/0,4/4"}
    return cwd, executed("sapo.ipynb", cwd, OUT="e", SETTINGS=small, **sizes)


@pytest.mark.slow
def test_the_experiment_runs_below_its_cell_and_shows_what_came_of_it(compared: tuple[Path, Any]) -> None:
    cwd, run = compared
    (shown,) = output(run, "run")
    for words in ("2 of 2 runs have finished", "4/4 sapo", "against 8/0", "report.md"):
        assert words in shown.data["text/html"]
    found = json.loads((cwd / "e" / "report.json").read_text())["configurations"]
    assert all({"training_set", "fresh_local", "held_out"} <= arm.keys() for arm in found.values())
    (table,) = output(run, "results")
    mean, low, high = (f"{found['4/4 sapo']['fresh_local']['total'][name]:.1f}" for name in ("mean", "low", "high"))
    assert f"| {mean} ({low} to {high}) |" in table.data["text/markdown"]
    _has_picture(output(run, "curves"), "fresh local reward, training set reward")


@pytest.mark.slow
def test_results_stand_beside_each_other_and_beside_the_paper(compared: tuple[Path, Any]) -> None:
    cwd, _ = compared
    (cwd / "kept").mkdir()
    shutil.copy(cwd / "e" / "report.json", cwd / "kept")  # without its runs
    run = executed("results.ipynb", cwd, EXPERIMENTS=["e", "kept"])
    (table,), (tables,) = output(run, "results"), output(run, "more")
    for shown in table, tables:
        assert "| e: 4/4 sapo |" in shown.data["text/markdown"] and "| kept: 8/0 |" in shown.data["text/markdown"]
    assert "| kept: 4/4 sapo | 1093.31 | +94 % |" in tables.data["text/markdown"]
    _has_picture(output(run, "curves"), "held-out score")
    _has_picture(output(run, "by-task"), "held-out score")
    with pytest.raises(notebook.UserError, match="no such folder"):
        notebook.results(cwd / "nowhere")
    with pytest.raises(notebook.UserError, match=r"no plot 'luck'.*fresh_local"):
        notebook.results(cwd / "e").plot("luck")


@pytest.mark.slow
def test_the_experiment_is_tried_out_in_short(tmp_path: Path) -> None:
    executed("sapo.ipynb", tmp_path, OUT="e", TEST=True)
    found = json.loads((tmp_path / "e-test" / "report.json").read_text())["configurations"]
    assert [(arm["configuration"], arm["nodes"]) for arm in found.values()] == [
        (configuration, 4) for configuration in ("8/0", "6/2", "4/4", "2/6")
    ]


def test_options_of_an_experiment_are_written_as_its_command_takes_them() -> None:
    given = flags({"configs": "paper", "tune_seeds": 3, "rates": "", "model": None, "temperature": 0.9})
    assert given == ["--configs", "paper", "--tune-seeds", "3", "--set", "temperature=0.9"]
    given = flags({"node": ["1:model=x", "2:tasks=gcd"], "keep_models": True, "out": None})
    assert given == ["--keep-models", "--node", "1:model=x", "--node", "2:tasks=gcd"]
    (command,) = [c for c in experiment_app.registered_commands if c.callback.__name__ == "sapo"]
    assert set(OPTIONS) <= set(inspect.signature(command.callback).parameters)


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
        until(lambda: (address / "manifest.json").exists() and len(jupyter.family) == 1)
        (process,) = jupyter.family
        jupyter.manager.shutdown_kernel(now=True)
        process.wait(120)


def test_a_drive_is_mounted_in_colab_only_and_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert list(map(written, values)) == ["true", "none", "3", "1e-05", "tiny", "chain_sum,gcd"]


def test_every_notebook_is_set_up_the_same_way() -> None:
    """Where the package is there, nothing is installed; the cell that does it is one and the same."""
    found = {path.name: json.loads(path.read_text()) for path in NOTEBOOKS.glob("*.ipynb")}
    names = {"coordinator", "monitor", "results", "sapo", "worker"}
    assert set(found) == {f"{name}.ipynb" for name in names}
    cells = [[cell for cell in book["cells"] if cell["id"] == "setup"] for book in found.values()]
    assert all(len(cell) == 1 for cell in cells) and len({str(cell[0]["source"]) for cell in cells}) == 1
    assert "find_spec" in str(cells[0][0]["source"])
