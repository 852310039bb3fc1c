"""docs/environments.md, as it stands: its classes are installed by entry points and play with the bundled model."""

import configparser
import json
import os
import re
import shlex
from pathlib import Path

import pytest
from processes import QUICK, metrics, run, status

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write the page's packages as an installer leaves them; return the path on which they are found."""
    site = tmp_path_factory.mktemp("site")
    for code, project in zip(blocks("python"), blocks("toml"), strict=True):
        read = configparser.ConfigParser()
        read.read_string(project)
        name, version = (read["project"][key].strip('"') for key in ("name", "version"))
        (site / f"{name}.py").write_text(code)
        points = read['project.entry-points."rl_swarm.environments"']
        about = site / f"{name}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{key} = {value.strip(chr(34))}" for key, value in points.items()]
        (about / "entry_points.txt").write_text("\n".join(["[rl_swarm.environments]", *lines]))
    return os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))


def commands(number: int) -> list[list[str]]:
    """Return the arguments of `rl-swarm` in a block of commands."""
    typed = [shlex.split(line, comments=True) for line in blocks("sh")[number].strip().splitlines()]
    return [arguments for program, *arguments in typed if program == "rl-swarm"]


def test_they_are_about_twenty_and_fifty_lines_long() -> None:
    lengths = [sum(bool(line.strip()) for line in code.splitlines()) for code in blocks("python")]
    assert lengths[0] <= 26 and lengths[1] <= 60


@pytest.mark.slow
def test_the_smallest_one_is_measured_and_learns(installed: str, tmp_path: Path) -> None:
    measured, played = commands(0)
    code, output = run(tmp_path, *measured, "--json", PYTHONPATH=installed)
    assert code == 0, output
    assert list(json.loads(output[output.index("{") :])["by_task"]) == ["sum"]
    code, output = run(tmp_path, *played, "--run", "r", *QUICK, PYTHONPATH=installed)
    assert code == 0, output
    for lines in metrics(tmp_path / "r").values():
        scores = {line["when"]: line["sampled"] for line in lines if line["kind"] == "held_out"}
        assert {"start", "end"} <= scores.keys() and all(0 <= score <= 1 for score in scores.values())
        assert sum(line["trained_tokens"] for line in lines if line["kind"] == "round") > 0
    code, output = run(tmp_path, "validate", "r", "--rounds", "20", "--nodes", "2", PYTHONPATH=installed)
    assert code == 0, output


@pytest.mark.slow
def test_it_plays_learns_and_can_be_checked(installed: str, tmp_path: Path) -> None:
    (arguments,) = commands(1)
    shorter = ["--rounds", "6", "--run", "r", *QUICK]
    code, output = run(tmp_path, *arguments, *shorter, PYTHONPATH=installed)
    assert code == 0, output
    assert "teacher" in output and "level" in output
    seen = status(tmp_path, tmp_path / "r")
    roles = {node["node"]: node.get("role", "pupil") for node in seen["nodes"]}
    assert sorted(roles.values()) == ["pupil", "pupil", "pupil", "teacher"]
    assert seen["reward_by_stage"][0] == 1.0 and 0 < seen["reward_by_stage"][1] < 1
    played = metrics(tmp_path / "r")
    for node, role in roles.items():
        lines = [line for line in played[node] if line["kind"] == "round"]
        assert [(line["round"], line["stage"]) for line in lines] == [(r, s) for r in range(6) for s in (0, 1)]
        busy = 0 if role == "teacher" else 1
        assert all(line.get("idle", False) == (line["stage"] != busy) for line in lines)
        assert any(line["policy_version"] for line in lines) == (role == "pupil"), "only pupils learn"
    levels = [line["role_metrics"]["level"] for lines in played.values() for line in lines if "role_metrics" in line]
    assert levels[0] == 2 and levels[1] in (1, 3), "the teacher learns how its sums were solved"
    code, output = run(tmp_path, "validate", "r", "--rounds", "6", "--nodes", "4", PYTHONPATH=installed)
    assert code == 0, output

    code, output = run(tmp_path, "join", "r", "--set", "identity_path=other.pem")  # not installed for this one
    assert code != 0
    for named in ("'school'", "entry point", "rl_swarm.environments", "school 1.0", "debate, reasoning"):
        assert named in output
    code, output = run(tmp_path, "join", "r", "--role", "judge", PYTHONPATH=installed)
    assert code != 0 and "role='judge'" in output and "`pupil`, `teacher`" in output
