"""docs/environments.md, as it stands: its class is installed by its entry point and plays with the bundled model."""

import configparser
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
    """Write the page's package as an installer leaves it; return the path on which it is found."""
    site = tmp_path_factory.mktemp("site")
    (code,), (project,) = blocks("python"), blocks("toml")
    (site / "school.py").write_text(code)
    read = configparser.ConfigParser()
    read.read_string(project)
    name, version = (read["project"][key].strip('"') for key in ("name", "version"))
    points = read['project.entry-points."rl_swarm.environments"']
    about = site / f"{name}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{key} = {value.strip(chr(34))}" for key, value in points.items()]
    (about / "entry_points.txt").write_text("\n".join(["[rl_swarm.environments]", *lines]))
    return os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))


def test_it_is_about_fifty_lines_long() -> None:
    (code,) = blocks("python")
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 60


def test_it_plays_learns_and_can_be_checked(installed: str, tmp_path: Path) -> None:
    _, command = blocks("sh")[0].strip().splitlines()
    program, *arguments = shlex.split(command)
    assert program == "rl-swarm"
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
