"""Stopping and starting a run: Ctrl-C at any moment, a closed terminal, a dead fork server, a run that has no
checkpoint."""

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import termios
import time
from pathlib import Path

import psutil
import pytest
from processes import QUICK, RL_SWARM, SMALL, end, family, metrics, run, start, state, status, until


def in_terminal(cwd: Path, *arguments: str) -> tuple["subprocess.Popen[bytes]", int]:
    """Starts a command in a terminal of its own, as a window of the desktop does; also its other side."""
    master, slave = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [*RL_SWARM, *arguments], cwd=cwd, stdin=slave, stdout=slave, stderr=slave, preexec_fn=take_terminal
    )
    os.close(slave)
    os.set_blocking(master, False)
    return process, master


def shown(master: int, until_process: "subprocess.Popen[bytes]", text: str = "\0") -> str:
    """Reads what a terminal shows until a text is there or the command has ended."""
    seen = b""
    deadline = time.monotonic() + 400
    while text not in seen.decode(errors="replace"):
        ended = until_process.poll() is not None
        try:
            seen += os.read(master, 1 << 16)
        except BlockingIOError:
            assert time.monotonic() < deadline, seen.decode(errors="replace")
            time.sleep(0.05)
        except OSError:  # nobody has it open any more
            break
        if ended:
            break
    return seen.decode(errors="replace")


def gone(children: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(children, timeout=400)[1]


def versions(address: Path) -> dict[str, list[int]]:
    return {
        node: [line["policy_version"] for line in lines if line["kind"] == "round"]
        for node, lines in metrics(address).items()
    }


def checkpoints(address: Path) -> set[str]:
    return {path.parent.name for path in address.glob("checkpoints/round_*/*/place.json")}


OFTEN = (0.4, 3)  # the other moments are tried by ./run_tests.sh --slow


@pytest.mark.parametrize(
    "seconds",
    [moment if moment in OFTEN else pytest.param(moment, marks=pytest.mark.slow)
     for moment in (0.15, 0.4, 0.8, 1.2, 2, 3, 5, 8)],
)  # fmt: skip
def test_ctrl_c_in_the_first_seconds_ends_with_a_message_and_no_traceback(tmp_path: Path, seconds: float) -> None:
    while (stopped := stopped_after(tmp_path, seconds)) is None:
        seconds *= 2
    code, output = stopped
    assert code == 130, output
    assert "stopped" in output.lower()
    for word in ("Traceback", "Aborted", "is no swarm"):
        assert word not in output
    begun = [path.parent for path in tmp_path.glob("runs/*/manifest.json")]
    assert list(tmp_path.glob("runs/*")) == begun, "what has not begun leaves no folder"


def stopped_after(tmp_path: Path, seconds: float) -> tuple[int, str] | None:
    """Start a swarm and interrupt it; None if Python itself had not started yet."""
    process = subprocess.Popen(
        [*RL_SWARM, "up", "--nodes", "2", "--rounds", "400", *SMALL],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all that run in it
        output, _ = process.communicate(timeout=400)
    finally:
        end(process)
    if "<frozen site>" in output or (not output and process.returncode == -signal.SIGINT):
        return None
    return process.returncode, output


def test_a_second_ctrl_c_is_heard_while_the_fork_server_imports(tmp_path: Path) -> None:
    """A stand-in for torch takes a minute to import in the server, and says that it has begun."""
    (tmp_path / "torch.py").write_text(
        "import pathlib, sys, time\n"
        f"pathlib.Path({str(tmp_path / 'begun')!r}).touch()\n"
        "time.sleep(60) if 'forkserver' in ' '.join(sys.orig_argv) else None\n"
    )
    process = start(tmp_path, "up", "--nodes", "1", *SMALL, start_new_session=True, PYTHONPATH=str(tmp_path))
    try:
        until((tmp_path / "begun").exists)
        children = family(process)
        for _ in range(200):
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(1)
                break
            except subprocess.TimeoutExpired:
                continue
        assert process.poll() == 130
    finally:
        end(process)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


@pytest.mark.slow
def test_a_closed_terminal_stops_a_run_which_saves_and_goes_on_later(tmp_path: Path) -> None:
    address = tmp_path / "r"
    process, master = in_terminal(tmp_path, "up", "--run", "r", "--nodes", "2", "--rounds", "30", *SMALL)
    try:
        until(lambda: state(address)["round"] >= 3)
        children = family(process)
        os.close(master)
        assert process.wait(400) == 130
        assert gone(children)
    finally:
        end(process)
    assert state(address)["phase"] == "running" and len(checkpoints(address)) == 2
    code, output = run(tmp_path, "up", "--resume", "r")
    assert code == 0, output
    for done in versions(address).values():
        assert done == sorted(done), "it went on with the weights it had"


def test_a_node_and_a_coordinator_that_lose_their_terminal_save_and_leave(tmp_path: Path) -> None:
    address = tmp_path / "experiments" / "open"
    quick = ["--set", "poll_interval=0.1"]
    coordinator = start(tmp_path, "coordinate", str(address), "--round-interval", "2", *quick)
    node = start(
        tmp_path, "join", str(address), "--local-groups", "2", "--generations", "4", "--set", "held_out_questions=4",
        *quick, NODE_ID="one", IDENTITY_PATH="one.pem",
    )  # fmt: skip
    try:
        until(lambda: "one" in metrics(address) and bool(versions(address)["one"]))
        for process in (node, coordinator):
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGHUP)  # the shell's and the kernel's
        outputs = [process.communicate(timeout=400)[0] for process in (node, coordinator)]
    finally:
        end(node)
        end(coordinator)
    assert (node.returncode, coordinator.returncode) == (130, 130), outputs
    assert checkpoints(address) == {"one"}
    assert '"left"' in (address / "logs" / "one" / "training_events.jsonl").read_text()


@pytest.mark.slow
def test_an_experiment_that_loses_its_terminal_saves_and_leaves(tmp_path: Path) -> None:
    arms = ["--configs", "2/0", "--nodes", "2", "--rounds", "300", "--set", "generations=4"]
    process = subprocess.Popen(
        [*RL_SWARM, "experiment", "sapo", "--out", "e", *arms, "--set", "held_out_questions=8"],
        cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        until(lambda: any(len(lines) > 2 for lines in metrics(next(tmp_path.glob("e/runs/*"), tmp_path)).values()))
        children = family(process)
        os.killpg(process.pid, signal.SIGHUP)
        output, _ = process.communicate(timeout=400)
        assert gone(children)
    finally:
        end(process)
    assert process.returncode == 130 and "same command resumes it" in output, output
    assert any(tmp_path.glob("e/runs/*/checkpoints/*")), "it has saved"


@pytest.mark.slow
def test_what_nohup_started_survives_its_terminal(tmp_path: Path) -> None:
    command = [*RL_SWARM, "up", "--run", "r", "--nodes", "1", "--rounds", "25", *SMALL]
    process = subprocess.Popen(
        ["nohup", *command], cwd=tmp_path, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        until(lambda: state(tmp_path / "r")["round"] >= 1)
        os.killpg(process.pid, signal.SIGHUP)
        output, _ = process.communicate(timeout=400)
    finally:
        end(process)
    assert process.returncode == 0, output
    assert state(tmp_path / "r")["phase"] == "finished"


@pytest.mark.slow
def test_a_run_that_lost_what_it_learned_goes_on_only_when_that_is_meant(tmp_path: Path) -> None:
    address = tmp_path / "r"
    process = start(tmp_path, "up", "--run", "r", "--nodes", "1", "--rounds", "20", *SMALL)
    until(lambda: state(address)["round"] >= 2)
    children = family(process)
    process.kill()
    process.communicate()
    assert gone(children) and not checkpoints(address)
    seen = status(tmp_path, address)
    assert (seen["phase"], seen["nodes"][0]["alive"]) == ("stopped", False)

    before = (address / "settings.json").read_bytes()
    code, output = run(tmp_path, "up", "--resume", "r", "--set", "keep_checkpoints=1")
    assert code == 1 and "base model (tiny)" in output and "--from-base" in output
    asked, master = in_terminal(tmp_path, "up", "--resume", "r")
    try:
        assert "base model (tiny)" in shown(master, asked, "[y/N]")
        os.write(master, b"n\n")
        assert asked.wait(400) == 1
        assert "left as it is" in shown(master, asked)
    finally:
        end(asked)
        os.close(master)
    assert (address / "settings.json").read_bytes() == before
    code, output = run(tmp_path, "up", "--resume", "r", "--from-base")
    assert code == 0, output
    assert state(address)["phase"] == "finished"


def test_a_second_up_in_a_running_folder_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    address = tmp_path / "r"
    process = start(tmp_path, "up", "--run", "r", "--nodes", "1", "--rounds", "500", *SMALL)
    try:
        until(lambda: (address / "settings.json").exists())
        for begun in (False, True):
            if begun:
                until(lambda: state(address)["round"] >= 1)
            before = (address / "settings.json").read_bytes()
            second = ["--resume", "r"] if begun else ["--run", str(address)]
            code, output = run(tmp_path, "up", *second, "--set", "keep_checkpoints=1")
            assert code == 1 and "running already" in output and str(process.pid) in output
            assert (address / "settings.json").read_bytes() == before
    finally:
        process.terminate()
        process.communicate(timeout=400)
    assert process.returncode == 143
    code, output = run(tmp_path, "up", "--run", "other", "--resume", "r")
    assert code == 2 and "--run other" in output and not (tmp_path / "other").exists()


def servers(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Find the fork servers below `up` by their command lines."""
    found = []
    for child in psutil.Process(process.pid).children():
        try:
            if "forkserver" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_a_run_outlives_the_server_that_its_nodes_are_forked_from(tmp_path: Path) -> None:
    address = tmp_path / "r"
    process = start(tmp_path, "up", "--run", "r", "--nodes", "2", "--rounds", "20", *QUICK)
    killed = 0
    try:
        until(lambda: bool(servers(process)))
        servers(process)[0].kill()  # while the first child is started
        for reached in (2, 6):
            until(lambda reached=reached: state(address)["round"] >= reached and bool(servers(process)))
            servers(process)[0].kill()
            killed += 1
        output, _ = process.communicate(timeout=240)
    finally:
        end(process)
    assert process.returncode == 0 and killed == 2, output
    assert "Aborted" not in output and "Traceback" not in output
    for done in versions(address).values():
        assert done == sorted(done), "its nodes had saved"
    code, output = run(tmp_path, "validate", "r", "--rounds", "20", "--nodes", "2")
    assert code == 0, output
    assert "died" in (address / "logs" / "swarm.log").read_text()
    assert json.loads((address / "settings.json").read_text())["settings"]["nodes"] == 2
