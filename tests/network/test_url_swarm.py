"""A whole swarm in a bucket: a coordinator and two nodes as three people would start them, on an S3 server."""

import json
from pathlib import Path

from processes import end, run, start
from stores import BUCKET, S3

from rl_swarm.monitor.run_reader import RunView
from rl_swarm.monitor.validate import validate
from rl_swarm.network.address import open_address


def test_a_swarm_in_a_bucket_learns_and_is_sound(tmp_path: Path, s3: S3) -> None:
    """Every process has a directory of its own, as on machines of their own."""
    url = f"s3://{BUCKET}/experiments/first"
    for name in ("owner", "ann", "bob"):
        (tmp_path / name).mkdir()
    small = ("held_out_questions=4", "held_out_samples=1", "generations=4", "threads=1", "poll_interval=0.1")
    quick = [part for setting in small for part in ("--set", setting)]
    swarm = [
        start(
            tmp_path / "owner", "coordinate", url, "--rounds", "2", "--round-end", "lockstep", "--min-peers", "2",
            *quick
        ),
        # One knows the address whole, the other by the variables of a folder swarm.
        start(tmp_path / "ann", "join", url, "--local-groups", "2", "--external-groups", "2", *quick),
        start(
            tmp_path / "bob", "join", "--local-groups", "2", "--external-groups", "2", *quick,
            GDRIVE_PATH=f"s3://{BUCKET}/", EXPERIMENT_NAME="first",
        ),
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=240)[0] for process in swarm]
    finally:
        for process in swarm:
            end(process)
    assert [process.returncode for process in swarm] == [0, 0, 0], outputs

    files = open_address(url).store.files
    assert files.names("") == ["manifest.json", "peers", "rewards", "rollouts", "state"]
    for node in ("ann", "bob"):
        (kept,) = (tmp_path / node / "runs").iterdir()
        assert kept.name == open_address(url).here.name and f"in runs/{kept.name}" in outputs[1]
        assert {path.name for path in kept.iterdir()} == {"checkpoints", "logs"}
    lines = [
        line
        for path in tmp_path.glob("*/runs/*/logs/*/metrics.jsonl")
        for line in map(json.loads, path.read_text().splitlines())
        if line["kind"] == "round"
    ]
    assert len(lines) == 4 and all(line["external_scored"] for line in lines), "they look at each other's answers"
    taken, signal = ([line[name] for line in lines] for name in ("external_accepted", "local_with_signal"))
    assert (sum(taken) > 0) == (sum(signal) > 0), "and learn from those that differ in reward"

    code, output = run(tmp_path / "ann", "validate", url, "--rounds", "2", "--nodes", "2")
    assert code == 0 and "The run is sound." in output, output
    assert "4 reports" in output and "2 log lines" in output and "4 publications" in output, output
    assert "not on this machine" in output

    told = RunView.open(url).as_dict()
    assert (told["address"], told["phase"], told["round"]) == (url, "finished", 1)
    assert [(node["participation"], node["round"]) for node in told["nodes"]] == [(2, None)] * 2
    assert all(0 <= node["reward"] <= 1 for node in told["nodes"])
    code, output = run(tmp_path, "status", url)
    assert code == 0 and "round 2/2" in output and url in output, output

    round_1 = files.names("rewards/round_1/stage_0")
    files.write(f"rewards/round_1/stage_0/{round_1[0]}", files.read(f"rewards/round_1/stage_0/{round_1[1]}", 1 << 16))
    verdict, _ = validate(url)
    assert not verdict.sound
