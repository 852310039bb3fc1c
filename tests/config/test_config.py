"""Where a setting's value comes from, and what is said about one that cannot be used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rl_swarm.config.resolve import MAX_DOTENV, environment_layer, load, read_dotenv
from rl_swarm.config.settings import TEST_MODE, UP_PRESET, Settings, all_settings
from rl_swarm.config.table import settings_tables
from rl_swarm.environments import task_list
from rl_swarm.environments.presets import PRESETS
from rl_swarm.environments.settings import TaskSettings
from rl_swarm.errors import ConfigError
from rl_swarm.learning.settings import PolicySettings
from rl_swarm.network.address import configured_address
from rl_swarm.node.settings import SwarmSettings, public_settings
from rl_swarm.protocol.tasks import Task
from rl_swarm.sections import headings

DOCS = Path(__file__).parents[2] / "docs" / "settings.md"


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    """Away from any `.env` of whoever runs the tests."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings(**environ) -> Settings:
    return load(environ=environ).settings


def refusal(**arguments):
    with pytest.raises(ConfigError) as caught:
        load(**{"environ": {}, **arguments})
    return str(caught.value)


def test_later_sources_win_and_are_named(tmp_path):
    file = tmp_path / "settings.yaml"
    arguments = {"environ": {}, "command": "up"}

    def found():
        resolved = load(**arguments)
        return resolved.settings.sampling.seed, resolved.sources["seed"]

    assert found() == (42, "default")
    arguments["preset"] = {"seed": 1}
    assert found() == (1, "preset of `up`")
    file.write_text("seed: 2\n")
    arguments["config_file"] = file
    assert found() == (2, str(file))
    (tmp_path / ".env").write_text("SEED=3\n")
    assert found() == (3, "SEED in .env")
    arguments["environ"] = {"SEED": "4"}
    assert found() == (4, "SEED")
    arguments["flags"] = {"seed": 5}
    assert found() == (5, "flag --seed")


def test_a_source_that_says_nothing_about_a_setting_leaves_it_alone(tmp_path):
    (tmp_path / "settings.yaml").write_text("rounds: 7\n")
    resolved = load(
        preset={"local_groups": 3},
        config_file=tmp_path / "settings.yaml",
        environ={"SEED": "9"},
        flags={"external_groups": 2},
    )
    found = resolved.settings
    assert (found.learning.local_groups, found.swarm.rounds, found.sampling.seed, found.learning.external_groups) == (
        3,
        7,
        9,
        2,
    )
    assert resolved.sources["generations"] == "default"


@pytest.mark.parametrize(
    ("variable", "field", "default", "given", "value"),
    [
        ("GDRIVE_PATH", "gdrive_path", None, "/drive", "/drive"),
        ("EXPERIMENT_NAME", "experiment_name", None, "my-swarm", "my-swarm"),
        ("NODE_ROLE", "role", "worker", "coordinator", "coordinator"),
        ("NODE_ID", "node_id", None, "node-1", "node-1"),
        ("MODEL_NAME", "model", "tiny", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("SEED", "seed", 42, "7", 7),
        ("MAX_ROUNDS", "rounds", 2000, "10", 10),
        ("NUM_TRAIN_SAMPLES", "local_groups", 8, "4", 4),
        ("NUM_TRANSPLANT_TREES", "external_groups", 0, "4", 4),
        ("NUM_GENERATIONS", "generations", 8, "16", 16),
        ("COORDINATOR_ROUND_INTERVAL", "round_interval", 60.0, "5", 5.0),
        ("ROLLOUT_PUBLISH_FREQUENCY", "publish_frequency", "stage", "generation", "generation"),
        ("ROLLOUT_CLEANUP_ENABLED", "cleanup_rollouts", False, "True", True),
        ("ROLLOUT_KEEP_LAST_N_ROUNDS", "keep_rollout_rounds", 10, "3", 3),
        ("ROLLOUT_ARCHIVE_OLD", "archive_rollouts", False, "true", True),
        ("TEST_MODE", "test_mode", False, "1", True),
        ("IDENTITY_PATH", "identity_path", "swarm.pem", "/keys/me.pem", "/keys/me.pem"),
        ("LOG_LEVEL", "log_level", "info", "debug", "debug"),
        ("DEBUG", "debug", False, "1", True),
        ("CPU_ONLY", "cpu_only", False, "True", True),
        ("HF_TOKEN", "hf_token", None, "hf_x", "hf_x"),
        ("HUB_REPO", "hub_repo", None, "ada/model", "ada/model"),
        ("HUGGINGFACE_ACCESS_TOKEN", "hf_token", None, "hf_x", "hf_x"),
    ],
)
def test_the_environment_variables_keep_their_meaning_and_default(variable, field, default, given, value):
    assert settings().flat()[field] == default
    found = settings(**{variable: given}).flat()[field]
    assert found == value
    assert type(found) is type(value)
    assert settings(**{variable: ""}).flat()[field] == default


def test_the_chain_is_refused_in_words_and_off_by_default():
    assert settings(CONNECT_TO_TESTNET="False").swarm.connect_to_testnet is False
    assert "CONNECT_TO_TESTNET" in refusal(environ={"CONNECT_TO_TESTNET": "True"})


def test_one_of_two_names_for_the_token_is_enough_and_the_first_wins():
    assert settings(HF_TOKEN="a", HUGGINGFACE_ACCESS_TOKEN="b").model.hf_token == "a"
    assert settings(HF_TOKEN="", HUGGINGFACE_ACCESS_TOKEN="b").model.hf_token == "b"
    assert settings(HUGGINGFACE_ACCESS_TOKEN="None").model.hf_token is None


def test_publishing_can_be_by_generation_stage_or_round():
    for value in ("generation", "stage", "round"):
        assert settings(ROLLOUT_PUBLISH_FREQUENCY=value).sharing.publish_frequency == value


def test_test_mode_is_three_rounds_of_four_and_only_flags_override_it(tmp_path):
    (tmp_path / "settings.yaml").write_text("rounds: 9\n")
    environ = {"TEST_MODE": "True", "NUM_TRAIN_SAMPLES": "6"}
    resolved = load(UP_PRESET, tmp_path / "settings.yaml", {"generations": "2"}, environ)
    found = resolved.settings
    assert (found.swarm.rounds, found.learning.local_groups, found.sampling.generations) == (3, 4, 2)
    assert resolved.sources["rounds"] == resolved.sources["local_groups"] == "TEST_MODE"
    assert resolved.sources["generations"] == "flag --generations"


@pytest.mark.parametrize(
    ("environ", "flag", "rounds"),
    [({}, "true", 3), ({}, "false", 2000), ({"TEST_MODE": "True"}, "false", 2000), ({}, True, 3), ({}, False, 2000)],
)
def test_a_flag_switches_test_mode_on_and_off(environ, flag, rounds):
    assert load(flags={"test_mode": flag}, environ=environ).settings.swarm.rounds == rounds


def test_up_is_a_swarm_for_one_machine():
    found = load(UP_PRESET, environ={}).settings
    assert (found.learning.local_groups, found.learning.external_groups, found.swarm.round_end) == (4, 4, "lockstep")
    assert found.swarm.rounds < SwarmSettings().rounds


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"environ": {"SEED": "abc"}}, ["seed='abc'", "(SEED)", "whole number", "at least 0", "42"]),
        ({"environ": {"NUM_GENERATIONS": "1"}}, ["generations='1'", "NUM_GENERATIONS", "at least 2"]),
        ({"environ": {"NODE_ROLE": "boss"}}, ["role='boss'", "NODE_ROLE", "`worker`, `coordinator`"]),
        ({"environ": {"CPU_ONLY": "maybe"}}, ["cpu_only='maybe'", "CPU_ONLY", "true or false"]),
        ({"environ": {"COORDINATOR_ROUND_INTERVAL": "inf"}}, ["round_interval='inf'", "at most"]),
        ({"flags": {"temperature": "nan"}}, ["temperature='nan'", "flag --temperature", "above 0"]),
        ({"flags": {"learning_rate": 2.0}}, ["learning_rate=2.0", "flag --learning-rate", "at most 1"]),
        ({"flags": {"max_new_tokens": "0"}}, ["max_new_tokens='0'", "at least 1"]),
        ({"environ": {"EXPERIMENT_NAME": "../x"}}, ["experiment_name='../x'", "EXPERIMENT_NAME", "letters"]),
        ({"preset": {"rounds": 0}, "command": "up"}, ["rounds=0", "preset of `up`", "at least 1"]),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_its_source_and_what_would_work(arguments, words):
    message = refusal(**arguments)
    for word in words:
        assert word in message


def test_the_line_of_the_env_file_is_named_too(tmp_path):
    (tmp_path / ".env").write_text("MAX_ROUNDS=many\n")
    assert "rounds='many' (MAX_ROUNDS in .env)" in refusal()


def test_an_unknown_setting_gets_a_suggestion(tmp_path):
    assert "no setting `learning_rat` (flag --learning-rat). Did you mean `learning_rate`?" in refusal(
        flags={"learning_rat": 1}
    )
    (tmp_path / "settings.yaml").write_text("generatoins: 3\n")
    message = refusal(config_file=tmp_path / "settings.yaml")
    assert str(tmp_path / "settings.yaml") in message
    assert "Did you mean `generations`?" in message
    assert "docs/settings.md" in refusal(flags={"zzz": 1})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"rounds: [", "not valid YAML"),
        (b"\xff\xfe\x00", "not valid YAML"),
        (b"- rounds", "`name: value`"),
        (b"", "`name: value`"),
        (b"1: 2", "no setting `1`"),
        (b"rounds: ten", "rounds='ten'"),
        (b"tasks: [{name: chain_sum, wieght: 2}]", "wieght"),
    ],
)
def test_a_settings_file_that_cannot_be_used_is_explained(tmp_path, content, words):
    (tmp_path / "settings.yaml").write_bytes(content)
    assert words in refusal(config_file=tmp_path / "settings.yaml")


def test_a_settings_file_that_is_not_there_is_explained(tmp_path):
    assert "No such file" in refusal(config_file=tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"local_groups": 0, "external_groups": 0}, ["local_groups=0", "external_groups=0", "Set one above 0"]),
        ({"cpu_only": True, "device": "cuda"}, ["CPU_ONLY", "device='cuda'"]),
        ({"external_correction": "capped"}, ["external_correction='capped'", "share_logprobs=true"]),
        ({"tasks": " , "}, ["tasks=' , '", "tiny, sapo"]),
        ({"tasks": []}, ["tasks=[]", "tiny, sapo"]),
    ],
)
def test_settings_that_contradict_each_other_are_refused(flags, words):
    message = refusal(flags=flags)
    assert all(word in message for word in words)


def test_an_env_file_is_read_as_people_write_them(tmp_path):
    path = tmp_path / ".env"
    path.write_text(
        "# SEED=1\n\nexport SEED=5\n MAX_ROUNDS = 6  # rounds\nMODEL_NAME='a b'\nHF_TOKEN=\"x # "
        'y"\nNODE_ID=a#b\nnonsense\n'
        "SWARM_WEB_TOKEN=${SEED}$\n"
    )
    assert read_dotenv(path) == {
        "SEED": "5",
        "MAX_ROUNDS": "6",
        "MODEL_NAME": "a b",
        "HF_TOKEN": "x # y",
        "NODE_ID": "a#b",
        "nonsense": None,
        "SWARM_WEB_TOKEN": "${SEED}$",
    }
    assert read_dotenv(tmp_path / "nowhere") == {}


def test_an_empty_variable_does_not_hide_the_env_file(tmp_path):
    (tmp_path / ".env").write_text("SEED=5\n")
    layer = environment_layer({"SEED": ""}, tmp_path / ".env")
    assert layer.values["seed"] == "5"
    assert layer.origin("seed") == f"SEED in {tmp_path / '.env'}"


def test_an_env_file_does_not_change_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SEED", "4")
    monkeypatch.delenv("MAX_ROUNDS", raising=False)
    (tmp_path / ".env").write_text("SEED=5\nMAX_ROUNDS=6\n")
    settings = load().settings
    assert (settings.sampling.seed, settings.swarm.rounds) == (4, 6)
    assert os.environ["SEED"] == "4" and "MAX_ROUNDS" not in os.environ


def test_an_env_file_that_is_not_text_is_explained(tmp_path):
    (tmp_path / ".env").write_bytes(b"SEED=\xff\xfe")
    assert ".env cannot be read" in refusal()


def test_an_env_file_without_end_is_not_read(tmp_path):
    (tmp_path / ".env").write_bytes(b"SEED=5" + b" " * MAX_DOTENV + b"#\n")
    assert ".env is too large" in refusal()
    (tmp_path / ".env").unlink()
    os.mkfifo(tmp_path / ".env")
    assert read_dotenv(tmp_path / ".env") == {}


def test_variables_that_are_no_settings_are_left_alone():
    assert environment_layer({"PATH": "/bin", "LOCAL": "3", "ROUNDS": "4"}).values == {}


def test_tasks_are_a_preset_some_names_or_a_list(tmp_path):
    assert task_list(TaskSettings(), "tiny") == PRESETS["tiny"]
    assert task_list(TaskSettings(), "other/model") == PRESETS["sapo"]
    assert task_list(load(flags={"tasks": "sapo"}, environ={}).settings.task, "tiny") == PRESETS["sapo"]
    assert task_list(TaskSettings(tasks="gcd, chain_sum"), "tiny") == (Task("gcd"), Task("chain_sum"))
    (tmp_path / "settings.yaml").write_text(
        "tasks:\n- name: chain_sum\n  weight: 2\n  config: {min_terms: 2, max_terms: 3}\n- name: gcd\n"
    )
    found = task_list(load(config_file=tmp_path / "settings.yaml", environ={}).settings.task, "tiny")
    assert found == (Task("chain_sum", 2.0, {"min_terms": 2, "max_terms": 3}), Task("gcd"))


def test_the_nine_tasks_of_the_paper_are_the_sapo_preset():
    names = (
        "arc_1d basic_arithmetic base_conversion bf binary_matrix calendar_arithmetic decimal_arithmetic "
        "fraction_simplification propositional_logic"
    )
    assert PRESETS["sapo"] == tuple(Task(name, 1.0, {}) for name in names.split())


def test_yaml_numbers_in_scientific_notation_are_numbers(tmp_path):
    """YAML 1.1 reads 1e-6 as text."""
    (tmp_path / "settings.yaml").write_text("learning_rate: 1e-6\ntemperature: 1\n")
    found = load(config_file=tmp_path / "settings.yaml", environ={}).settings
    assert (found.learning.learning_rate, found.sampling.temperature) == (1e-6, 1.0)


def test_the_bundled_model_has_defaults_of_its_own():
    tiny, other = Settings(), Settings.of(model="Qwen/Qwen3-0.6B")
    assert tiny.completion_tokens() < other.completion_tokens() == 256
    assert tiny.step_size() > other.step_size() == 5e-6
    assert Settings.of(max_new_tokens=7, learning_rate=0.5).completion_tokens() == 7
    assert Settings.of(max_new_tokens=7, learning_rate=0.5).step_size() == 0.5


def test_a_token_is_long_enough_and_never_told(tmp_path):
    for token in ("short", "with some spaces in it", "naïve-but-long-enough"):
        said = refusal(environ={"SWARM_WEB_TOKEN": token})
        assert "SWARM_WEB_TOKEN" in said and token not in said
    token = settings(SWARM_WEB_TOKEN="correct-horse-battery").web.web_token
    assert token == "correct-horse-battery"
    secrets = [setting.name for setting in all_settings() if setting.secret]
    assert public_settings(dict.fromkeys(secrets, token)) == {}
    file = tmp_path / "numbers.yaml"
    file.write_text("web_token: 123456789012")
    said = refusal(config_file=file)
    assert "web_token=" in said and "123456789012" not in said


def test_the_address_of_a_folder_swarm_is_its_experiment_directory():
    assert configured_address(settings().storage) is None
    found = configured_address(settings(GDRIVE_PATH="/drive", EXPERIMENT_NAME="mine").storage)
    assert found == Path("/drive/experiments/mine")
    with pytest.raises(ConfigError, match="EXPERIMENT_NAME is not set"):
        configured_address(settings(GDRIVE_PATH="/drive").storage)


def test_the_documented_table_is_the_one_in_the_code():
    text = DOCS.read_text()
    tables = text[text.index(f"## {headings(Settings)['task']}") :]
    assert tables == settings_tables(), "replace it by what `python -m rl_swarm.config.table` prints"
    printed = subprocess.run(
        [sys.executable, "-m", "rl_swarm.config.table"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == settings_tables()


def test_the_table_has_a_whole_row_for_every_setting():
    lines = [line for line in settings_tables().splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    assert [row[0].strip("| `") for row in rows] == [setting.name for setting in all_settings()]
    assert {len(row) for row in rows} == {6}
    assert all(row[4] and row[5].removesuffix("|").strip() for row in rows)
    by_name = {row[0].strip("| `"): row[1:] for row in rows}
    assert by_name["seed"][:3] == ["`SEED`", "`42`", ""]
    assert by_name["round_end"][1:3] == ['`"interval"`', '`"lockstep"`']


def test_settings_are_flat_for_users_and_in_sections_for_the_program():
    names = [setting.name for setting in all_settings()]
    assert len(set(names)) == len(names) == len(Settings().flat())
    given = Settings.of(local_groups=4, top_p="0.5", web=False, tasks=[Task("gcd")], experiment_name="mine")
    assert (given.learning.local_groups, given.sampling.top_p, given.web.web) == (4, 0.5, False)
    assert given.changed(rounds=3).swarm.rounds == 3 and given.swarm.rounds == 2000
    assert Settings.of(**given.flat()) == given
    assert given.part(PolicySettings) == PolicySettings.of(local_groups=4, top_p=0.5, tasks=[Task("gcd")])
    with pytest.raises(ConfigError, match="There is no setting `zzz`"):
        given.changed(zzz=1)
    with pytest.raises(ConfigError, match=r"rounds='many' cannot be used\. .*whole number, at least 1"):
        given.changed(rounds="many")


def test_what_the_documentation_says_about_test_mode_and_yaml_is_true(tmp_path):
    text = DOCS.read_text()
    assert ", ".join(f"`{name}` {value}" for name, value in TEST_MODE.items()) in text
    example = text.split("```yaml\n")[1].split("```")[0]
    (tmp_path / "settings.yaml").write_text(example)
    found = load(config_file=tmp_path / "settings.yaml", environ={}).settings
    assert found.model.model == yaml.safe_load(example)["model"]
    assert [task.name for task in task_list(found.task, found.model.model)] == ["chain_sum", "propositional_logic"]


def test_settings_can_be_read_without_torch():
    script = "import sys, rl_swarm.config.table; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_names_of_tasks_may_be_a_list_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("tasks: [gcd, chain_sum]")
    settings = load({}, tmp_path / "c.yaml", environ={}).settings
    assert [task.name for task in task_list(settings.task, settings.model.model)] == ["gcd", "chain_sum"]
