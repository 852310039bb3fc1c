"""`rl-swarm experiment` as a user types it."""

import io
import json
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from processes import end, family, metrics, run, start, status, until
from rich.console import Console

from rl_swarm.cli.app import app
from rl_swarm.config.resolve import layered
from rl_swarm.config.settings import Settings
from rl_swarm.errors import UserError
from rl_swarm.experiment.arms import PRESETS, Arm, Job, arms
from rl_swarm.experiment.measures import NodeLog, Run
from rl_swarm.experiment.plan import Costs, duration, makespan
from rl_swarm.experiment.run import Experiment, Runner, RunProcess, RunStatus, is_finished, play
from rl_swarm.storage.files import LocalFiles
from rl_swarm.telemetry.schema import RoundRecord, Seconds

SMALL = ["--device", "cpu", "--set", "held_out_questions=10", "--set", "held_out_samples=1", "--set", "generations=4"]


def refused(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        app(["experiment", *arguments], standalone_mode=False)
    return str(caught.value)


def kill_once_saved(process: "subprocess.Popen[str]", folder: Path) -> None:
    try:
        until(lambda: process.poll() is not None or any(folder.glob("checkpoints/*/state.json")))
        children = family(process)
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(children, timeout=240)
        assert not alive, "nothing survives"
    finally:
        end(process)


@pytest.mark.slow
def test_an_experiment_that_was_killed_goes_on_and_writes_what_it_would_have_written(tmp_path: Path) -> None:
    common = ["--configs", "2/1", "--nodes", "2", "--rounds", "9", *SMALL, "--set", "checkpoint_every=3"]
    for out in ("e", "again", "and-again"):  # the first may have ended before it is killed
        command = ["experiment", "sapo", "--out", out, *common]
        folder = tmp_path / out / "runs" / "2-1-sapo-seed1"
        kill_once_saved(start(tmp_path, *command), folder)
        if not is_finished(folder):
            break
    assert not is_finished(folder) and any(folder.glob("checkpoints/*/state.json"))
    code, output = run(tmp_path, *command)
    assert code == 0, output
    job = Job.read(folder)
    assert job is not None
    play(
        job,
        job.members(layered),
        LocalFiles(tmp_path / "whole"),
        Settings.of(identity_path=str(tmp_path / "user.pem")),
        threading.Event(),
        keep_models=False,
    )
    assert metrics(folder) == metrics(tmp_path / "whole")
    found = json.loads((tmp_path / out / "report.json").read_text())["configurations"]["2/1 sapo"]
    assert {"training_set", "fresh_local", "held_out"} <= found.keys()
    seen = status(tmp_path, folder)
    assert (seen["phase"], seen["round"], len(seen["nodes"])) == ("finished", 8, 2)
    command[3] = str(tmp_path / out)
    said = refused(*command[1:], "--set", "temperature=0.9")
    assert "temperature=0.9" in said and "another --out" in said


@pytest.mark.slow
def test_ctrl_c_saves_and_every_arm_gets_its_best_learning_rate(tmp_path: Path) -> None:
    command = ["experiment", "sapo", "--out", "e", "--configs", "2/0", "--nodes", "2", "--rounds", "3", *SMALL]
    command += ["--rates", "3e-4,1e-4", "--tune-seeds", "1", "--tune-rounds", "2"]
    process = start(tmp_path, *command)
    try:
        until(lambda: any((tmp_path / "e").glob("tuning/*/logs/*/metrics.jsonl")))
        process.send_signal(2)
        output, _ = process.communicate(timeout=240)
    finally:
        end(process)
    assert process.returncode == 130 and "Stopping" in output and "same command resumes it" in output, output
    code, output = run(tmp_path, *command)
    assert code == 0, output
    for said in ("Plan: ", "held-out score", "fresh local", "report.md", "rl-swarm watch e"):
        assert said in output
    scores = {}
    for rate in ("0.0001", "0.0003"):
        lines = metrics(tmp_path / "e" / "tuning" / f"2-0-lr{rate}-seed10000")
        scores[rate] = sum(node[-1]["sampled"] for node in lines.values()) / 2
    found = json.loads((tmp_path / "e" / "report.json").read_text())["configurations"]["2/0"]
    chosen = found["learning_rate_chosen"]
    assert chosen["scores"] == pytest.approx(scores) and chosen["seeds"] == [10000] and found["seeds"] == [1]
    assert found["learning_rate"] == float(max(sorted(scores), key=lambda rate: scores[rate]))


def test_help_is_there_without_torch() -> None:
    code = "import sys; from rl_swarm.cli import main; sys.argv = ['rl-swarm', 'experiment', 'sapo', '--help']\n"
    code += "try: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for word in ("--configs", "--strategies", "--rates", "--seeds", "4/0-pooled", "adaptive", "module:Class"):
        assert word in done.stdout.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--configs", "4-4"], ["4-4", "4/4", "paper"]),
        (["--configs", "0/8"], ["0/8"]),
        (["--configs", "4/4-pooled"], ["4/4-pooled", "one learner"]),
        (["--configs", "4/4@0"], ["@1"]),
        (["--configs", "4/4@1x2"], ["4/4x2@1"]),
        (["--configs", "4/4", "--strategies", "alone"], ["--strategies", "sapo"]),
        (["--model", "auto"], ["model=auto", "rl-swarm models"]),
        (["--set", "environment=debate"], ["debate", "rl-swarm up"]),
        (["--set", "metrics_sinks=wandb"], ["metrics_sinks", "not a setting"]),
        (["--strategies", "spao"], ["spao", "sapo", "module:Class"]),
        (["--strategies", "nowhere:Idea"], ["nowhere:Idea", "module:Class"]),
        (["--rates", "1e-4,fast"], ["--rates", "3e-5"]),
        (["--rates", "1e-4", "--set", "learning_rate=1e-3"], ["contradict"]),
        (["--seeds", "3-1"], ["--seeds", "1-3"]),
        (["--seeds", "10000"], ["9999"]),
        (["--node", "9:learning_rate=1"], ["--node 9", "from 1 to 8"]),
        (["--node", "1:rounds=3"], ["same for all"]),
        pytest.param(["--node", "1:tasks=chess"], ["chess", "gcd"], marks=pytest.mark.processes),
        (["--node", "2:publish_frequency=round"], ["publish_frequency=round of node 2", "lock-step"]),
        (["--node", "2:warmth=3"], ["warmth"]),
        (["--set", "round_end=interval"], ["round_end", "lock-step"]),
        (["--set", "seed=3"], ["--seeds"]),
        (["--set", "warmth=3"], ["warmth"]),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_work(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    said = refused("sapo", "--out", str(tmp_path / "e"), *arguments)
    for word in words:
        assert word in said
    assert not (tmp_path / "e").exists(), "nothing was started"


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    assert "no such directory" in refused("report", str(tmp_path / "none"))
    assert "holds no run" in refused("report", str(tmp_path))


def test_there_is_nothing_to_validate_in_an_experiment(tmp_path: Path) -> None:
    Job(Arm(4, 0, "alone"), 1, 10, 2).write(LocalFiles(tmp_path / "runs" / "4-0-seed1"))
    for address in (tmp_path, tmp_path / "runs" / "4-0-seed1"):
        with pytest.raises(UserError, match="nothing can be checked"):
            app(["validate", str(address)], standalone_mode=False)


def test_presets_and_strategies_make_arms() -> None:
    assert [arm.label for arm in arms("paper", "sapo")] == ["8/0", "6/2 sapo", "4/4 sapo", "2/6 sapo"]
    assert [arm.label for arm in arms("4/0,4/4", "sapo,top")] == ["4/0", "4/4 sapo", "4/4 top"]
    assert [arm.label for arm in arms("controls", "sapo")] == ["4/0x2", "4/0-pooled"]
    small = arms("1/7x2@1,4/0@2-pooled,1/0", "sapo")
    assert [arm.label for arm in small] == ["1/7x2@1 sapo", "4/0@2-pooled", "1/0"]
    assert [arm.slug for arm in small] == ["1-7x2at1-sapo", "4-0at2-pooled", "1-0"]
    assert [arm.is_plain for arm in small] == [False, False, True]
    assert len(arms(",".join(PRESETS), "sapo")) == 12, "none twice"
    assert arms("4/4", "sapo")[0].slug == "4-4-sapo"


def test_a_plan_follows_from_what_groups_cost() -> None:
    costs = Costs(local=0.1, external=0.2, train=0.05, evaluation=3.0)
    alone, sharing = (Job(arm, 1, 100, 4) for arm in (Arm(4, 0, "alone"), Arm(4, 4)))
    node = alone.members(layered)[0]
    evaluations = 2 + 2 / 3  # the one after half of the rounds is not greedy too: two answers of three
    assert costs.seconds(alone, node) == pytest.approx(4 * (100 * (0.4 + 0.2) + 3 * evaluations))
    assert costs.seconds(sharing, node) == pytest.approx(4 * (100 * (0.4 + 0.2 + 0.4) + 3 * evaluations))
    assert costs.seconds(alone, node, played=60) == pytest.approx(4 * (40 * (0.4 + 0.2) + 3))
    assert makespan([5, 3, 1, 1], 2) == 5 and makespan([3, 1, 5], 2) == 6, "the longest is waited for"
    assert [duration(s) for s in (23, 400, 3600 + 300)] == ["20 s", "7 min", "1 h 5 min"]


def test_a_plan_counts_what_no_node_notes() -> None:
    """A round takes the nodes three seconds each, and everybody seven."""
    line = RoundRecord(0, 0.0, 0.0, 2, 2, 0.0, seconds=Seconds(generate=2.0, train=1.0))
    nodes = [NodeLog([line] * 5) for _ in range(2)]
    job = Job(Arm(2, 2), 1, 10, 2, settings={"held_out_every": 0})
    node = job.members(layered)[0]
    costs = Costs.of(Run(job, nodes), node, evaluating=4.0, evaluations=1, start=5.0, rounds=3, took=3 * 7.0)
    assert costs.seconds(job, node) == pytest.approx(5.0 + 10 * 7.0 + 2 * 4.0)


@pytest.mark.processes
def test_a_plan_can_be_made_when_the_run_that_was_timed_has_just_finished(tmp_path: Path) -> None:
    settings = {"device": "cpu", "held_out_questions": 10, "held_out_samples": 1, "generations": 4}
    wanted = Experiment(tmp_path, arms("1/0", "sapo"), [1], 1, 3, layered, settings=settings)
    (job,) = wanted.runs({})
    job.write(wanted.files(job))
    play(
        job,
        job.members(layered),
        wanted.files(job),
        Settings.of(identity_path=str(tmp_path / "user.pem")),
        threading.Event(),
        keep_models=False,
    )
    runner = Runner(wanted, Console(file=io.StringIO()), threading.Event())
    runner.all = [job]
    runner._plan(RunProcess(job, wanted.node(job), None, RunStatus(3, 0.1, 1 << 30, 8 << 30)))  # its process has ended
    assert runner.at_once == 1 and "Plan: 0 runs" in runner.console.file.getvalue()


def test_tuning_is_done_on_other_seeds_than_those_reported(tmp_path: Path) -> None:
    wanted = Experiment(tmp_path, arms("4/0,4/4", "sapo"), [1, 2], 4, 100, layered, rates=[1e-4, 3e-4], tune_rounds=20)
    tuning, runs = wanted.tuning(), wanted.runs({"4/0": 1e-4, "4/4 sapo": 3e-4})
    assert len(tuning) == 8 and not {job.seed for job in tuning} & {job.seed for job in runs}
    assert [(job.arm.label, wanted.node(job).step_size()) for job in runs[:2]] == [("4/0", 1e-4), ("4/4 sapo", 3e-4)]
    assert len({wanted.folder(job) for job in [*tuning, *runs]}) == 12
