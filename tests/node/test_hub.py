"""The trained model on the hub: what is uploaded, what its card says, and that training never suffers from it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import msgspec
import pytest
import torch
import yaml
from hub_server import COMMIT, HubServer, hub_server
from markdown_it import MarkdownIt
from processes import end, run, start, until
from test_node import make_node

from rl_swarm import __version__
from rl_swarm.config.resolve import load
from rl_swarm.config.settings import Settings
from rl_swarm.environments import task_list
from rl_swarm.environments.reasoning import Reasoning
from rl_swarm.errors import ConfigError
from rl_swarm.learning import checkpoints, devices
from rl_swarm.learning.devices import TINY
from rl_swarm.learning.policy import Policy
from rl_swarm.network.local import LocalSwarm
from rl_swarm.node import worker
from rl_swarm.node.founding import new_manifest
from rl_swarm.node.hub import Push, license_of, outcomes, put_aside
from rl_swarm.node.model_card import Trained, card, shown_settings
from rl_swarm.node.swarm import worker_settings
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.tasks import Task
from rl_swarm.telemetry.journal import EVENTS, Journal
from rl_swarm.telemetry.schema import HeldOutRecord, RoundRecord

SETTINGS = Settings.of(
    hf_token="hf_secret", hub_repo="ada/model", external_groups=2, share_logprobs=True, log_level="error"
)
QUICK = [
    "--nodes",
    "1",
    "--rounds",
    "2",
    "--set",
    "held_out_questions=8",
    "--set",
    "held_out_samples=1",
    "--set",
    "threads=1",
]


def scores(when: str, round: int, sampled: float, greedy: float | None) -> dict[str, object]:
    return {
        "kind": "held_out",
        "when": when,
        "round": round,
        "questions": 8,
        "sampled": sampled,
        "greedy": greedy,
        "well_formed": 1.0,
        "accuracy_well_formed": sampled,
        "by_task": {"chain_sum": sampled},
        "greedy_by_task": {} if greedy is None else {"chain_sum": greedy},
        "well_formed_by_task": {"chain_sum": 1.0},
        "accuracy_well_formed_by_task": {"chain_sum": sampled},
        "examples": [
            {"task": "chain_sum", "prompt": "What is 1 + 2?\n", "answer": "3", "completion": "3", "reward": 1.0}
        ],
    }


def manifest(settings: Settings = SETTINGS) -> Manifest:
    return new_manifest(settings, "test", "owner", 0.0, stages=1)


def trained(**changes: object) -> Trained:
    facts = Trained(
        repo="ada/model",
        base="Qwen/Qwen3-0.6B",
        base_is="hub",
        prompting="system",
        system_prompt="Answer.",
        settings=SETTINGS,
        manifest=manifest(),
        rounds=7,
        held_out=[scores("start", -1, 0.125, 0.25), scores("now", 3, 0.333, None), scores("end", 6, 0.875, 0.5)],
    )
    return msgspec.structs.replace(facts, **changes)


def metadata(text: str) -> dict[str, object]:
    return yaml.safe_load(text.split("---\n")[1])


def test_a_card_tells_what_the_model_is_and_how_good_it_has_become() -> None:
    text = card(trained(), {"license": "mit"})
    assert metadata(text) == {
        "base_model": "Qwen/Qwen3-0.6B",
        "license": "mit",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rl-swarm", "grpo", "reinforcement-learning", "reasoning-tasks"],
    }
    for expected in (
        f"RL Swarm {__version__}",
        "7 of 2000",
        "| **all** | 0.125 | 0.875 | 0.250 | 0.500 |",
        "| `chain_sum` | 0.125 | 0.875 | 0.250 | 0.500 |",
        "after the last round",
        "| `external_groups` | `2` |",
        "| `learning_rate` | `0.0001` |",
        '- `count_primes`, weight 1, `{"min_n":1,"max_n":100}`',
        'from_pretrained("ada/model")',
    ):
        assert expected in text


def test_a_card_in_the_middle_of_a_run_says_what_is_known() -> None:
    text = card(trained(held_out=[scores("start", -1, 0.125, 0.25), scores("now", 3, 0.333, None)]))
    assert "| **all** | 0.125 | 0.333 | 0.250 |  |" in text and "after round 3" in text
    assert "license" not in metadata(text)
    assert "Not measured yet" in card(trained(held_out=[]))


def test_what_the_owner_of_a_swarm_wrote_is_code_on_a_card_and_nothing_else() -> None:
    hostile = "x`` ` [free](http://evil.example) <img src=x> |\n\n# Owned\n```"
    tasks = [Task("chain_sum", config={"a": hostile}), Task("gcd", config={"a": "`"})]
    made = msgspec.structs.replace(manifest(), tasks=tasks, versions={"reasoning-gym": hostile[:64]})
    scored = {**scores("end", 6, 0.875, 0.5), "by_task": {hostile: 0.5}}
    text = card(trained(manifest=made, held_out=[scores("start", -1, 0.1, 0.2), scored]))
    shown = MarkdownIt().enable("table").render(text.split("---\n", 2)[2])
    assert "Owned" in shown and "<h1>Owned" not in shown
    assert "<img" not in shown and 'evil.example"' not in shown
    (row,) = [row for row in re.findall("<tr>.*?</tr>", shown, re.DOTALL) if "Owned" in row]
    assert row.count("<td") == 5


@pytest.mark.parametrize(("base", "kind"), [("/home/ada/secret-place/mine", "local"), ("tiny", "bundled")])
def test_a_base_that_is_not_on_the_hub_is_described_and_not_linked(base: str, kind: str) -> None:
    text = card(trained(base=base, base_is=kind))
    assert "base_model" not in metadata(text) and "secret-place" not in text


def test_settings_on_a_card_are_the_important_ones_and_the_changed_ones_but_no_free_text() -> None:
    settings = SETTINGS.changed(gdrive_path="/my/drive", identity_path="my.pem", node_id="me", seed=5, device="cpu")
    shown = shown_settings(settings, manifest(settings.changed(seed=9, rounds=11)))
    assert (shown["seed"], shown["rounds"]) == (9, 11), "the swarm's, not what the node would have chosen"
    assert shown["share_logprobs"] is True and shown["device"] == "cpu" and "top_k" not in shown
    assert not {"hf_token", "hub_repo", "gdrive_path", "identity_path", "node_id"} & shown.keys()
    text = card(trained(settings=settings))
    assert not [word for word in ("hf_secret", "/my/drive", "my.pem") if word in text]


@pytest.mark.parametrize("prompting", ["system", "user", "plain"])
def test_the_code_on_a_card_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prompting: str
) -> None:
    shutil.copytree(TINY, tmp_path / "ada" / "model")
    monkeypatch.chdir(tmp_path)
    exec(card(trained(prompting=prompting)).split("```python\n")[1].split("```")[0], {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    "repo", ["model", "a/b/c", "ada/", "/model", "ada/my model", "ada/a--b", "ada/..", "ada/m.git", "é/m", "a/b\n"]
)
def test_a_repository_that_cannot_be_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"HUB_REPO=.*owner/name"):
        load(environ={"HUB_REPO": repo})


def test_several_nodes_push_to_repositories_of_their_own(tmp_path: Path) -> None:
    settings = Settings.of(hub_repo="ada/my.model_1-x", nodes=2, identity_path=str(tmp_path / "swarm.pem"))
    repos = {name: worker.checkpoint.hub_repo for name, worker in worker_settings(settings).items()}
    assert repos == {name: f"ada/my.model_1-x-{name}" for name in repos} and len(set(repos.values())) == 2
    for repo in repos.values():
        huggingface_hub.utils.validate_repo_id(repo)
    (alone,) = worker_settings(settings.changed(nodes=1)).values()
    assert alone.checkpoint.hub_repo == "ada/my.model_1-x"


# Pushing to a server in this process.


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    with hub_server() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Write a checkpoint as a node does."""
    folder = tmp_path / "checkpoints" / "round_6" / "node"
    shutil.copytree(TINY, folder)
    for private in ("optimizer.safetensors", "place.json", "swarm.pem", "adapter_model.safetensors"):
        (folder / private).write_text("nobody else's business")
    return folder


POLICY = SimpleNamespace(
    name="tiny",
    system_prompt="Answer.",
    tokenizer=SimpleNamespace(chat_template="", apply_chat_template=lambda *_, **__: ""),
)


def make_push(tmp_path: Path, settings: Settings = SETTINGS) -> Push:
    journal = Journal(tmp_path / "logs" / "node")
    journal.metrics(RoundRecord(0, 0.0, 0.0, 0, 0, 0.0))
    for line in trained().held_out:
        journal.metrics(msgspec.convert(line, HeldOutRecord))
    push = Push.wanted(settings, tmp_path / "checkpoints" / ".push-node", journal, threading.Event())
    assert push is not None
    push.delays = (0.01, 0.01)
    return push


def events(push: Push) -> list[dict]:
    return push.journal.read(EVENTS)


def test_model_tokenizer_and_card_are_uploaded_and_nothing_else(
    hub: HubServer, tmp_path: Path, checkpoint: Path
) -> None:
    push = make_push(tmp_path)
    push(checkpoint, POLICY, manifest())
    push.finish(120)
    files = dict(hub.repos["ada/model"])
    text = files.pop("README.md").decode()
    assert files == {path.name: path.read_bytes() for path in TINY.iterdir()}
    assert metadata(text)["license"] == "apache-2.0" and "0.875" in text and "hf_secret" not in text
    private = [r for r in hub.requests if not r[1].startswith("/large/")]
    assert private and {token for _, _, token in private} == {"Bearer hf_secret"}
    assert [event["event"] for event in events(push)] == ["pushed"]
    assert outcomes(tmp_path, os.listdir(tmp_path / "logs")) == [f"pushed to {hub.url}/ada/model"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["round_6"], "nothing left over"


def test_weights_of_an_earlier_model_leave_the_repository_and_other_files_stay(
    hub: HubServer, tmp_path: Path, checkpoint: Path
) -> None:
    hub.repos["ada/model"] = {"model-00001-of-00002.safetensors": b"old", "notes.md": b"mine"}
    push = make_push(tmp_path)
    push(checkpoint, POLICY, manifest())
    push.finish(120)
    assert "model-00001-of-00002.safetensors" not in hub.repos["ada/model"]
    assert hub.repos["ada/model"]["notes.md"] == b"mine"


def test_a_checkpoint_that_is_removed_during_the_upload_is_uploaded_all_the_same(
    hub: HubServer, tmp_path: Path, checkpoint: Path
) -> None:
    hub.open.clear()
    push = make_push(tmp_path)
    push(checkpoint, POLICY, manifest())
    assert not hub.repos, "training does not wait"
    shutil.rmtree(checkpoint)
    hub.open.set()
    push.finish(120)
    assert hub.repos["ada/model"]["model.safetensors"] == (TINY / "model.safetensors").read_bytes()


def test_where_files_cannot_be_linked_they_are_copied(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links on this drive")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    staged = put_aside(checkpoint, tmp_path / "aside")
    assert {path.name for path in staged.iterdir()} == {path.name for path in TINY.iterdir()}


def test_an_error_of_the_server_is_tried_again_counted_and_told(
    hub: HubServer, tmp_path: Path, checkpoint: Path
) -> None:
    hub.refusals += [500, 503]
    push = make_push(tmp_path)
    push(checkpoint, POLICY, manifest())
    push.finish(120)
    first, second, last = events(push)
    assert (first["event"], first["again"], second["attempt"]) == ("push_failed", True, 2)
    assert "500" in first["reason"] and "503" in second["reason"]
    assert (last["event"], last["attempts"], push.failures) == ("pushed", 3, 2)


@pytest.mark.parametrize(
    ("status", "words"), [(401, "HF_TOKEN is not accepted"), (403, "may not write to HUB_REPO=ada/model")]
)
def test_a_token_that_is_refused_is_named_and_not_tried_again(
    hub: HubServer, tmp_path: Path, checkpoint: Path, status: int, words: str
) -> None:
    hub.refusals += [status]
    push = make_push(tmp_path)
    push(checkpoint, POLICY, manifest())
    push.finish(120)
    (event,) = events(push)
    assert words in event["reason"] and event["again"] is False
    assert len(hub.asked("/api/repos/create")) == 1 and not hub.asked("/commit")
    assert words in outcomes(tmp_path, os.listdir(tmp_path / "logs"))[0]


def test_only_the_newest_of_those_that_wait_is_pushed(hub: HubServer, tmp_path: Path, checkpoint: Path) -> None:
    hub.open.clear()
    push = make_push(tmp_path)
    for number in range(1, 5):
        push(checkpoint, POLICY, manifest())
        push.journal.metrics(RoundRecord(number, 0.0, 0.0, 0, 0, 0.0))
        until(lambda: bool(hub.requests))
    hub.open.set()
    push.finish(120)
    assert hub.commits == ["RL Swarm: 1 of 2000 rounds", "RL Swarm: 4 of 2000 rounds"]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_server_that_does_not_answer_holds_nobody_up(
    hub: HubServer, tmp_path: Path, checkpoint: Path, stopped: bool
) -> None:
    hub.open.clear()
    push = make_push(tmp_path)
    push(checkpoint, POLICY, manifest())
    if stopped:
        push.stop.set()
    push.finish(600 if stopped else 0.3)
    assert not hub.repos, "the server, which answers in the end, was not waited for"
    assert "not pushed to ada/model: the node ended" in outcomes(tmp_path, os.listdir(tmp_path / "logs"))[0]
    assert not list((tmp_path / "checkpoints").glob(".push*"))


def test_offline_is_said_and_not_tried_again(tmp_path: Path, checkpoint: Path) -> None:
    push = make_push(tmp_path)
    push(checkpoint, POLICY, manifest())
    push.finish(120)
    (event,) = events(push)
    assert "HF_HUB_OFFLINE" in event["reason"]


@pytest.mark.parametrize("changes", [{"hf_token": None}, {"hub_repo": None}])
def test_there_is_no_push_without_a_token_or_a_repository(tmp_path: Path, changes: dict[str, None]) -> None:
    settings = SETTINGS.changed(**changes)
    assert Push.wanted(settings, tmp_path / "aside", Journal(tmp_path), threading.Event()) is None


def test_the_licence_is_the_one_of_the_base_model(hub: HubServer, tmp_path: Path) -> None:
    api = huggingface_hub.HfApi(hub.url)
    hub.repos["ada/base"] = {}
    assert license_of("ada/base", "hub", api) == {"license": "mit"}
    assert license_of("ada/nothing", "hub", api) == {}
    assert license_of(str(tmp_path), "local", api) == {}
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: mine\nlibrary_name: x\n---\n")
    assert license_of(str(tmp_path), "local", api) == {"license": "other", "license_name": "mine"}


def test_settings_help_and_the_package_do_not_load_the_library() -> None:
    script = "import sys, rl_swarm, rl_swarm.node.hub, rl_swarm.cli.app, rl_swarm.cli.running; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert not {"huggingface_hub", "torch"} & set(output.split())


# Whole runs.


@pytest.mark.slow
def test_a_run_ends_with_a_model_on_the_hub_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server() as hub:
        code, output = run(
            tmp_path, "up", "--run", "r", *QUICK, "--set", "hub_every=1",
            HF_ENDPOINT=hub.url, HF_TOKEN="hf_secret", HUB_REPO="ada/model", HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="1",
        )  # fmt: skip
    assert code == 0, output
    assert f"pushed to {hub.url}/ada/model" in output
    assert hub.commits == ["RL Swarm: 1 of 2 rounds", "RL Swarm: 2 of 2 rounds"]
    folder = tmp_path / "ada" / "model"
    folder.mkdir(parents=True)
    for name, data in hub.repos["ada/model"].items():
        (folder / name).write_bytes(data)
    (saved,) = (tmp_path / "r" / "checkpoints").glob("round_1/*")
    same = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}
    kept = {path.name: path.read_bytes() for path in saved.iterdir()}
    assert kept.keys() - same.keys() == {"optimizer.safetensors", "place.json"}
    assert same == {name: kept[name] for name in same}
    text = (folder / "README.md").read_text()
    lines = [json.loads(line) for line in next(tmp_path.glob("r/logs/*/metrics.jsonl")).read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "held_out"][-1]
    assert f"| {last['sampled']:.3f} |" in text and f"| {last['greedy']:.3f} |" in text and "2 of 2" in text
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"hf_secret" in path.read_bytes()]
    monkeypatch.chdir(tmp_path)
    exec(text.split("```python\n")[1].split("```")[0], {})


@pytest.mark.slow
def test_a_run_finishes_when_the_hub_is_down(tmp_path: Path) -> None:
    """Ctrl-C ends the attempts that follow."""
    process = start(
        tmp_path, "up", "--run", "r", *QUICK, "--rounds", "1",
        HF_ENDPOINT="http://127.0.0.1:9", HF_TOKEN="hf_secret", HUB_REPO="ada/model", HF_HUB_OFFLINE="0",
    )  # fmt: skip
    try:
        log = tmp_path / "r" / "logs" / "swarm.log"
        until(lambda: log.exists() and "next attempt in" in log.read_text())
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=240)
    finally:
        end(process)
    assert process.returncode == 0 and "Test score" in output, output
    assert "not pushed to ada/model" in output
    text = log.read_text()
    assert "waiting for the push to ada/model" in text and "Traceback" not in text
    assert list((tmp_path / "r" / "checkpoints").glob("round_0/*/model.safetensors"))


def test_a_node_pushes_as_often_as_asked_and_finishes_whatever_comes_of_it(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SETTINGS.changed(rounds=4, local_groups=1, external_groups=0, generations=2, held_out_questions=2, 
        hub_every=2, checkpoint_every=0, held_out_samples=1, device="cpu", round_end="everyone", keep_checkpoints=1,
    )  # fmt: skip
    environment = Reasoning(task_list(settings.task, settings.model.model))
    try:
        for address, ending in ((hub.url, "pushed"), ("http://127.0.0.1:9", "push_failed")):
            monkeypatch.setenv("HF_ENDPOINT", address)
            folder = tmp_path / ending
            node = make_node(LocalSwarm(manifest(settings)), environment, folder, settings)
            node.push = Push.wanted(settings, folder / "checkpoints" / ".push", node.journal, node.stop)
            node.push.delays = (0.01,)
            node.prepare()
            node.run()
            names = [event["event"] for event in node.journal.read(EVENTS)]
            assert "finished" in names and names[-1] == ending
    finally:
        environment.close()
    assert hub.commits == ["RL Swarm: 2 of 4 rounds", "RL Swarm: 4 of 4 rounds"]


# What a coding swarm takes from the hub.


def test_in_a_coding_swarm_auto_takes_a_model_of_the_hub_where_there_is_one_and_a_gpu(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = "Qwen/Qwen2.5-Coder-0.5B-Instruct", "Qwen/Qwen2.5-Coder-1.5B-Instruct"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(devices.memory, "available", lambda device, nodes: 64 << 30)

    def picked(role: str, device: str = "cuda") -> str:
        settings = Settings.of(environment="coding", model="auto", role=role)
        return devices.pick_model(settings, torch.device(device))

    assert {picked(role) for role in ("solver", "proposer", "evaluator")} == {"coder"}  # the hub has neither
    hub.repos[small] = hub.repos[large] = {}
    assert (picked("solver"), picked("proposer"), picked("evaluator")) == (small, small, large)
    assert picked("solver", "cpu") == "coder"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert picked("solver") == "coder"
    kept = tmp_path / f"models--{small.replace('/', '--')}"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(COMMIT)
    (kept / "snapshots" / COMMIT).mkdir(parents=True)
    (kept / "snapshots" / COMMIT / "model.safetensors").touch()
    assert (picked("solver"), picked("evaluator")) == (small, small)


def test_auto_goes_on_with_the_model_it_began_with(tmp_path: Path) -> None:
    settings = Settings.of(model="auto", environment="coding", device="cpu")
    policy = Policy.load(settings, "")
    assert policy.settings.model.model == policy.name == "coder" and policy.settings.completion_tokens() == 64
    kept = checkpoints.Checkpoints(tmp_path, Identity.generate(), "node")
    kept.save(None, checkpoints.Place("s", "", "tiny", 3, 0, 5))
    again, found = worker._restored(kept, "s", settings, "", None)
    assert found and found.round == 3 and again.name == "tiny" and again.settings.completion_tokens() == 24
