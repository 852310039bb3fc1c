"""The commands, as a person types them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import HAS_HIVEMIND, QUICK, RL_SWARM, end, run, start, state, until
from small_runs import SmallRun

import rl_swarm
from rl_swarm.cli.choice import checkpoint_of
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.node.evaluation import protocol
from rl_swarm.protocol.identity import Identity


def test_importing_the_package_and_asking_for_help_load_no_torch() -> None:
    heavy = ("torch", "transformers", "huggingface_hub", "fsspec", "s3fs", "fastapi", "uvicorn")
    heavy += ("opentelemetry", "tensorboardX", "trackio", "wandb", "IPython", "matplotlib")
    modules = "rl_swarm, rl_swarm.cli.app, rl_swarm.notebook, rl_swarm.telemetry.sinks"
    code = f"import sys, {modules}; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_help_lists_every_command(tmp_path: Path) -> None:
    code, output = run(tmp_path, "--help")
    assert code == 0
    for command in [
        "up",
        "join",
        "coordinate",
        "status",
        "watch",
        "runs",
        "validate",
        "evaluate",
        "warmup",
        "chat",
        "models",
        "doctor",
        "show",
        "identity",
        "invite",
        "allow",
        "deny",
        "members",
    ]:
        assert f"\n  {command} " in output
        assert run(tmp_path, command, "--help")[0] == 0


def test_dry_run_prints_every_value_and_where_it_came_from(tmp_path: Path) -> None:
    (tmp_path / "swarm.yaml").write_text("generations: 6\nseed: 5\n")
    (tmp_path / ".env").write_text("LOG_LEVEL=debug\n")
    code, output = run(
        tmp_path, "up", "--config", "swarm.yaml", "--rounds", "9", "--set", "top_k=3", "--dry-run", SEED="11"
    )
    assert code == 0
    rows = {line.split()[0]: line for line in output.splitlines()}
    assert "9" in rows["rounds"] and "--rounds" in rows["rounds"]
    assert "6" in rows["generations"] and "swarm.yaml" in rows["generations"]
    assert "11" in rows["seed"] and "SEED" in rows["seed"]
    assert "debug" in rows["log_level"] and ".env" in rows["log_level"]
    assert "3" in rows["top_k"] and "--set top_k" in rows["top_k"]
    assert "preset of `up`" in rows["external_groups"]
    assert "default" in rows["temperature"]
    assert not list(tmp_path.glob("runs*")), "a dry run starts nothing"


@pytest.mark.slow
def test_evaluate_scores_the_bundled_model_within_its_range(tmp_path: Path) -> None:
    code, output = run(tmp_path, "evaluate", "tiny", "--questions", "200", "--samples", "4", "--json")
    assert code == 0, output
    result = json.loads(output[output.index("{") :])
    assert 0.10 <= result["sampled"] <= 0.25
    assert result["greedy"] is not None and len(result["by_task"]) >= 8
    assert 0 < result["well_formed"] < 1
    code, output = run(tmp_path, "evaluate", "tiny", "--questions", "16", "--samples", "1")
    assert code == 0 and "greedy" in output


def test_a_held_out_score_says_what_it_is_the_mean_of() -> None:
    assert protocol(200, 2, 1.0) == "200 questions answered 2 times at temperature 1"
    assert protocol(1, 1, 0.7) == "1 question answered 1 time at temperature 0.7"
    assert protocol(20, None, None) == "20 questions"  # of a log that does not tell


@pytest.mark.slow
def test_evaluate_and_status_say_the_same_of_a_checkpoint_and_how_it_was_measured(tmp_path: Path) -> None:
    few = ["held_out_questions=20", "held_out_every=0", "checkpoint_every=2", "generations=4"]
    sets = [part for one in few for part in ("--set", one)]
    code, output = run(tmp_path, "up", "--run", "runs/r", "--nodes", "1", "--rounds", "2", "--device", "cpu", *sets)
    assert code == 0 and "20 questions answered 2 times at temperature 1" in output, output
    code, output = run(tmp_path, "status", "runs/r", "--json")
    told = json.loads(output[output.index("{") :])
    assert code == 0 and told["held_out_protocol"] == "20 questions answered 2 times at temperature 1"
    (checkpoint,) = (tmp_path / "runs/r").glob("checkpoints/round_1/*")
    same = [str(checkpoint), "--tasks", "tiny", "--device", "cpu", "--set", "held_out_questions=20"]
    code, output = run(tmp_path, "evaluate", *same, "--json")
    found = json.loads(output[output.index("{") :])
    assert code == 0 and (found["questions"], found["samples"]) == (20, 2)
    assert found["sampled"] == told["nodes"][0]["held_out_now"]
    code, output = run(tmp_path, "evaluate", *same, "--samples", "1")
    assert code == 0 and "20 questions answered 1 time at temperature 1" in " ".join(output.split())


def test_chat_answers(tmp_path: Path) -> None:
    code, output = run(tmp_path, "chat", "tiny", "--prompt", "What is 2 + 3?")
    assert code == 0 and output.strip()


@pytest.mark.slow
def test_models_are_listed_with_what_they_need(tmp_path: Path) -> None:
    code, output = run(tmp_path, "models")
    assert code == 0 and "Qwen/Qwen2.5-0.5B-Instruct" in output and "fits" in output and "GiB" in output
    assert "Qwen/Qwen2.5-Coder-1.5B-Instruct" in output, "names are whole at 80 columns"


def test_models_and_doctor_tell_what_this_machine_can_do(tmp_path: Path) -> None:
    code, output = run(tmp_path, "models", "--json", "--set", "lora_rank=8")
    found = json.loads(output[output.index("{") :])
    assert code == 0 and found["available"] > 0
    assert [row["model"] for row in found["models"]][:2] == ["tiny", "coder"]
    assert all(row["plan"]["needed"] > 0 and row["seconds"] > 0 for row in found["models"])
    assert found["models"][0]["plan"]["fits"]
    code, output = run(tmp_path, "doctor", P2P_LISTEN="/ip4/127.0.0.1/tcp/0")
    assert code == 0, output
    assert "All checks passed" in output
    assert ("listens at /ip4/127.0.0.1/tcp/" if HAS_HIVEMIND else "only swarms across the internet") in output


@pytest.mark.slow
def test_doctor_says_what_is_wrong(tmp_path: Path) -> None:
    nobody = f"p2p:///ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"
    wrong = {"GDRIVE_PATH": "/nowhere/at/all", "EXPERIMENT_NAME": "x", "P2P_KNOWN": nobody}
    code, output = run(tmp_path, "doctor", P2P_LISTEN="/ip4/127.0.0.1/tcp/0", **wrong)
    assert code == 1
    assert "/nowhere/at/all" in output and "GDRIVE_PATH" in output
    assert "no peer answers" in " ".join(output.split())
    code, output = run(tmp_path, "doctor", P2P_LISTEN="nonsense")
    assert code == 1 and "P2P_LISTEN=nonsense is no multiaddress" in " ".join(output.split())


@pytest.mark.slow
def test_runs_are_listed_and_removed_but_not_while_they_run(tmp_path: Path) -> None:
    process = start(tmp_path, "up", "--run", "runs/one", "--nodes", "1", "--rounds", "500", *QUICK)
    try:
        until(lambda: state(tmp_path / "runs/one")["round"] >= 1)
        code, output = run(tmp_path, "runs", "--remove", "one")
        assert code == 1 and "running" in output
    finally:
        process.terminate()
        process.wait(120)
    code, output = run(tmp_path, "runs")
    assert code == 0 and "runs/one" in output and "stopped" in output
    assert run(tmp_path, "runs", "--remove", "two")[0] == 1
    assert run(tmp_path, "runs", "--remove", "one")[0] == 0
    assert not (tmp_path / "runs/one").exists()


def test_any_file_of_a_swarm_is_printed_as_json_and_junk_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plain.json").write_text('{"a": [1]}')
    assert json.loads(run(tmp_path, "show", "plain.json")[1]) == {"a": [1]}
    (tmp_path / "junk.json").write_bytes(b"\x1f\x8bjunk")
    code, output = run(tmp_path, "show", "junk.json")
    assert code == 1 and "junk.json" in output and "Traceback" not in output


def test_python_dash_m_is_the_same_command() -> None:
    script = Path(sys.executable).with_name("rl-swarm")
    outputs = [subprocess.run([*call, "--version"], capture_output=True, text=True) for call in (RL_SWARM, [script])]
    assert outputs[0].stdout == outputs[1].stdout
    assert rl_swarm.__version__ in outputs[0].stdout


PANELS = (
    "Run a swarm", "Look at it", "Models and this machine", "Identity and admission", "Research", "Help",
)  # fmt: skip


def test_the_help_has_groups_and_help_explains_a_command(tmp_path: Path) -> None:
    code, listed = run(tmp_path, "--help")
    places = [listed.index(f"\n{panel}:\n") for panel in PANELS]
    assert code == 0 and places == sorted(places)
    assert places[0] < listed.index("\n  up ") < places[1] < listed.index("\n  status ") < places[2]
    assert run(tmp_path, "help") == (0, listed)
    assert run(tmp_path, "help", "identity", "new") == run(tmp_path, "identity", "new", "--help")
    assert run(tmp_path)[0] == 2, "without a command the help is shown, and nothing was done"
    assert run(tmp_path, "-V") == run(tmp_path, "--version") == (0, f"rl-swarm {rl_swarm.__version__}\n")


def apart(cwd: Path, *arguments: str, **environ: str) -> tuple[int, str, str]:
    """Run a command; return its exit code, and what it prints for programs and for people."""
    done = subprocess.run(
        [*RL_SWARM, *arguments], cwd=cwd, env={**os.environ, **environ}, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=240,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run that two nodes played without a model, and an older one."""
    folder = tmp_path_factory.mktemp("runs-here")
    for name in ("older", "newest"):
        made = SmallRun(folder / "runs" / name, nodes=2, total=3)
        made.play()
        for number, identity in enumerate(made.identities):
            made.score(identity, "now", 0.5 + number / 10)
    os.utime(folder / "runs" / "older" / "state" / "current_state.json", (1, 1))
    os.utime(folder / "runs" / "older" / "manifest.json", (1, 1))
    return folder


def test_without_an_address_the_newest_run_is_taken_and_named(two_runs: Path) -> None:
    code, seen, note = apart(two_runs, "status")
    assert code == 0 and note == "runs/newest, the newest of 2 runs here\n" and seen.startswith("newest  runs/newest")
    assert "2 models went from 20 % to 55 % on unseen questions in 2 rounds so far." in seen
    code, seen, note = apart(two_runs, "watch", "--tui")
    assert code == 0 and "runs/newest" in note and seen.startswith("newest")
    code, seen, note = apart(two_runs, "status", "older")
    assert (code, note) == (0, "") and seen.startswith("older  runs/older"), "the name alone is enough"
    code, seen, note = apart(two_runs, "status", GDRIVE_PATH="drive", EXPERIMENT_NAME="x")
    assert code == 1 and "drive/experiments/x (GDRIVE_PATH and EXPERIMENT_NAME)" in note


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        (["status"], {"headline", "example", "phase", "nodes"}),
        (["validate"], {"sound", "errors", "notes", "checked", "address"}),
        (["members", "runs/newest"], {"admission", "owner", "peers"}),
        (["identity", "show"], {"peer_id", "name", "file"}),
        (["models"], {"device", "models", "auto"}),
    ],
)
def test_with_json_a_program_gets_one_document_and_nothing_else(
    two_runs: Path, command: list[str], keys: set[str]
) -> None:
    if command[0] == "identity" and not (two_runs / "swarm.pem").exists():
        run(two_runs, "identity", "new")
    code, seen, _ = apart(two_runs, *command, "--json")
    assert code in (0, 1) and keys <= json.loads(seen).keys()


def test_runs_are_listed_for_programs_with_what_they_achieved(two_runs: Path) -> None:
    code, seen, note = apart(two_runs, "runs", "--json")
    listed = json.loads(seen)
    assert (code, note) == (0, "") and [one["run"] for one in listed] == ["runs/newest", "runs/older"]
    assert listed[0]["headline"].startswith("2 models went from 20 % to 55 %") and listed[0]["rounds"] == 3
    assert json.loads(apart(two_runs, "runs", "--root", "none", "--json")[1]) == []
    code, seen, note = apart(two_runs, "status", "nowhere", "--json")
    assert (code, seen) == (1, "") and "no swarm" in note, "an error is no document"


def test_the_best_checkpoint_of_a_run_is_taken_by_its_held_out_score(
    two_runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(two_runs)
    view = RunView.open("runs/older")
    low, high = sorted(view.nodes.values(), key=lambda node: node.now["sampled"] if node.now else 0.0)
    for node, played in ((low, 2), (high, 0), (high, 1)):
        (two_runs / "runs" / "older" / "checkpoints" / f"round_{played}" / node.node).mkdir(parents=True)
    assert checkpoint_of("older", None) == f"runs/older/checkpoints/round_1/{high.node}"
    told = capsys.readouterr().err
    assert f"{high.name} of runs/older after round 2: test score 0.600, the best of 2 nodes" in told
    assert checkpoint_of("runs/older", low.name).endswith(f"round_2/{low.node}")
    assert checkpoint_of("runs/older", low.name[:-1]).endswith(low.node), "the beginning is enough"
    assert checkpoint_of(None, None).startswith("runs/older/"), "the newest run has no checkpoint"
    assert checkpoint_of("tiny", None) == "tiny" and checkpoint_of("owner/name", None) == "owner/name"


def completed(cwd: Path, line: str) -> list[str]:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    called = "import sys; sys.argv = ['rl-swarm']; from rl_swarm.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", called], cwd=cwd, env={**os.environ, **words, "_RL_SWARM_COMPLETE": "complete_bash"},
        capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.split()


def test_a_shell_completes_commands_runs_and_models(two_runs: Path) -> None:
    assert completed(two_runs, "rl-swarm sta") == ["status"]
    assert completed(two_runs, "rl-swarm status ") == ["runs/newest", "runs/older"]
    assert completed(two_runs, "rl-swarm watch ol") == ["older"]
    assert completed(two_runs, "rl-swarm chat ti") == ["tiny"]
    assert completed(two_runs, "rl-swarm up --roun") == ["--rounds"]
    script = subprocess.run([*RL_SWARM, "--show-completion", "bash"], capture_output=True, text=True).stdout
    assert "COMPREPLY" in script


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_is_told_to_stop_says_by_what(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    process = start(tmp_path, "coordinate", "swarm", "--set", "poll_interval=0.1")
    try:
        until(lambda: (tmp_path / "swarm" / "manifest.json").exists())
        process.send_signal(sent)
        output, _ = process.communicate(timeout=240)
    finally:
        end(process)
    assert process.returncode == code and "Traceback" not in output, output
