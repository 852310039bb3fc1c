"""Which environments there are: what is installed here decides, and nothing that a stranger writes."""

import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from rl_swarm import environments
from rl_swarm.config import resolve as config
from rl_swarm.config.settings import Settings
from rl_swarm.environments import NoEnvironment
from rl_swarm.environments.debate import Debate
from rl_swarm.environments.reasoning import Reasoning
from rl_swarm.environments.settings import TaskSettings
from rl_swarm.errors import ConfigError
from rl_swarm.node.founding import new_manifest
from rl_swarm.node.worker import role_of, with_role
from rl_swarm.protocol.manifest import Manifest

MANIFEST = new_manifest(Settings.of(tasks="chain_sum"), "test", "owner", 0.0, stages=1)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package with these entry points."""

    def installed(points: str, code: str = "") -> None:
        about = tmp_path / "others-2.5.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 2.5\n")
        (about / "entry_points.txt").write_text(f"[{environments.GROUP}]\n{points}\n")
        (tmp_path / "others.py").write_text(code)
        environments._registered.cache_clear()
        environments.named.cache_clear()

    monkeypatch.syspath_prepend(str(tmp_path))
    yield installed
    environments._registered.cache_clear()
    environments.named.cache_clear()
    sys.modules.pop("others", None)


ROLES = """
from rl_swarm.environments.base import Environment, Role
class Judge(Role):
    learns, settings = False, {"model": "smollm2-135m", "local_groups": 3}
class Court(Environment):
    stages, shared, roles = 2, True, {"party": Role, "judge": Judge}
"""


def test_what_comes_with_the_package_is_registered_like_any_other() -> None:
    lines = (Path(__file__).parents[2] / "pyproject.toml").read_text().splitlines()
    start = lines.index(f'[project.entry-points."{environments.GROUP}"]') + 1
    block = "\n".join(lines[start : lines.index("", start)]).replace(" = ", ": ")
    named = {name: environments.named(name) for name in environments.BUILT_IN}
    assert yaml.safe_load(block) == {n: f"{kind.__module__}:{kind.__name__}" for n, kind in named.items()}
    assert environments.named("reasoning") is Reasoning and environments.named("debate") is Debate


def test_an_installed_environment_is_found_by_its_name_and_told_in_the_manifest(install) -> None:
    install("court = others:Court", ROLES)
    assert "court" in environments.installed()
    manifest = new_manifest(Settings.of(environment="court"), "test", "owner", 0.0, stages=2)
    assert (manifest.environment, manifest.versions, manifest.same_questions) == ("court", {"others": "2.5"}, True)
    assert [task.name for task in manifest.tasks] == ["Court"]
    assert type(environments.made(manifest)).__name__ == "Court"


def test_nobody_takes_the_name_of_one_that_comes_with_the_package(install) -> None:
    install("reasoning = others:Court", ROLES)
    assert environments.named("reasoning") is Reasoning


@pytest.mark.parametrize(
    ("points", "named"),
    [
        ("court = others:Nothing", "cannot be imported"),
        ("court = others.missing:Court", "cannot be imported"),
        ("court = others:ROLES", "is not a subclass of"),
        ("yard = others:Court", "no installed package registers the entry point 'court'"),
    ],
)
def test_one_that_cannot_be_used_is_an_error_that_says_why(install, points: str, named: str) -> None:
    install(points, f"ROLES = 1\n{ROLES}")
    with pytest.raises(NoEnvironment, match=named):
        environments.named("court")


def test_settings_with_an_unknown_environment_tell_which_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(flags={"environment": "chess"}, environ={})
    assert "environment='chess'" in str(caught.value) and "debate, reasoning" in str(caught.value)


@pytest.mark.parametrize("name", ["", "os", "../x", "reasoning:Reasoning", "Reasoning", "a" * 33, "x\n"])
def test_a_manifest_names_an_environment_and_nothing_else(name: str) -> None:
    fields = {**msgspec.to_builtins(MANIFEST), "environment": name}
    if name == "os":  # a name like any other: no module is imported by it
        with pytest.raises(NoEnvironment, match="'os'"):
            environments.of_swarm(msgspec.convert(fields, Manifest))
        return
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, Manifest)
    with pytest.raises(NoEnvironment):
        environments.named(name)


@pytest.mark.parametrize(
    "versions", [{"x" * 65: "1"}, {"x": "1" * 65}, {str(number): "1" for number in range(33)}, {"x; rm -rf": "1"}]
)
def test_what_a_manifest_says_of_packages_is_bounded(versions: dict) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**msgspec.to_builtins(MANIFEST), "versions": versions}, Manifest)


def test_a_swarm_of_another_version_of_its_environment_is_refused(install) -> None:
    install("court = others:Court", ROLES)
    manifest = new_manifest(Settings.of(environment="court"), "test", "owner", 0.0, stages=3)
    with pytest.raises(NoEnvironment, match=r"in 3 stages.*has 2"):
        environments.of_swarm(manifest)


def test_a_node_takes_the_role_that_its_settings_name_and_the_settings_of_that_role(install) -> None:
    install("court = others:Court", ROLES)
    manifest = new_manifest(Settings.of(environment="court"), "test", "owner", 0.0, stages=2)
    judge = with_role(Settings.of(role="judge", local_groups=5), manifest)
    assert (judge.model.model, judge.learning.local_groups) == ("smollm2-135m", 5), "what the user says wins"
    kind = environments.of_swarm(manifest)
    named = {role: role_of(TaskSettings(role=role), kind) for role in ("worker", "party", "judge")}
    assert named["worker"] == named["party"] == (kind.roles["party"], "")
    assert named["judge"] == (kind.roles["judge"], "judge")
    with pytest.raises(ConfigError, match=r"role='judge'.*'reasoning'"):
        with_role(Settings.of(role="judge"), MANIFEST)
    assert config.load(flags={"role": "judge"}, environ={}).settings.task.role == "judge"
