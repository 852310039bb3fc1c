"""A disk that is full and a folder that disappears: one clear message, nothing half-written, a failing exit code."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import QUICK, WHOLE, end, run, start, state, until


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has mount namespaces")
@pytest.mark.parametrize("megabytes", [1, 8, 60])
def test_a_full_disk_is_said_clearly(tmp_path: Path, megabytes: int) -> None:
    """A real file system of that size, in a mount namespace of its own: too small for the first files, for a
    checkpoint, for the checkpoints of a few rounds."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = f"mount -t tmpfs -o size={megabytes}m tmpfs {disk} && exec {sys.executable} -m rl_swarm up --run {disk}/r"
    options = f"--nodes 2 --rounds 40 {' '.join(WHOLE)}"
    look = f"find {disk} -name '*.tmp*' | grep . && echo LEFT BEHIND"
    done = subprocess.run(
        [
            "unshare",
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            f"({command} {options}); code=$?; {look}; exit $code",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    output = done.stdout + done.stderr
    assert done.returncode != 0, output
    assert "full" in output and str(disk) in output, output
    assert "Traceback" not in output and "LEFT BEHIND" not in output, output


@pytest.mark.slow
def test_a_folder_that_disappears_is_said_clearly_and_not_made_anew(tmp_path: Path) -> None:
    process = start(tmp_path, "up", "--run", "mounted/r", "--nodes", "2", "--rounds", "500", *QUICK)
    try:
        until(lambda: state(tmp_path / "mounted/r")["round"] >= 2)
        (tmp_path / "mounted").rename(tmp_path / "gone")
        output, _ = process.communicate(timeout=240)
    finally:
        end(process)
    assert process.returncode == 1, output
    assert "disappeared" in output and "mounted/r" in output and "Traceback" not in output
    assert not (tmp_path / "mounted").exists()

    (tmp_path / "gone").rename(tmp_path / "mounted")
    round_then = state(tmp_path / "mounted/r")["round"]
    process = start(tmp_path, "up", "--resume", "mounted/r")
    try:
        until(lambda: state(tmp_path / "mounted/r")["round"] > round_then + 1)
    finally:
        process.terminate()
        process.wait(120)


@pytest.mark.slow
def test_a_worker_that_waits_notices_that_the_folder_has_disappeared(tmp_path: Path) -> None:
    address = tmp_path / "drive" / "experiments" / "open"
    quick = ["--set", "held_out_questions=4", "--set", "held_out_samples=1", "--set", "poll_interval=0.1"]
    slow = ["--round-interval", "1000", "--set", "peer_timeout=2"]
    (tmp_path / "drive").mkdir()
    coordinator = start(tmp_path, "coordinate", str(address), *slow, *quick)
    worker = start(tmp_path, "join", str(address), *quick, IDENTITY_PATH="worker.pem")
    try:
        until(lambda: any(address.glob("rewards/round_0/*/*.json")))
        (tmp_path / "drive").rename(tmp_path / "gone")
        output, _ = worker.communicate(timeout=240)
    finally:
        end(worker)
        end(coordinator)
    assert worker.returncode == 1, output
    assert "disappeared" in output and "Traceback" not in output
    assert not (tmp_path / "drive").exists()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """A node whose newest checkpoint was damaged goes on from an older one or from the start."""
    code, output = run(
        tmp_path, "up", "--run", "r", "--nodes", "1", "--rounds", "6", *WHOLE, "--set", "external_groups=0"
    )
    assert code == 0, output
    newest = max((tmp_path / "r/checkpoints").glob("round_*/*"), key=lambda p: int(p.parent.name[6:]))
    place = json.loads((newest / "place.json").read_text())
    assert place["round"] == 5
    (newest / "model.safetensors").write_bytes(b"not a model")
    shutil.rmtree(tmp_path / "r/state")
    code, output = run(tmp_path, "up", "--resume", "r")
    assert code == 0, output
