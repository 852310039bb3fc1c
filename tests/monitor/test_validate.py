"""The validator finds what was altered, removed or forged, and explains what is only missing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from processes import QUICK, run

from rl_swarm.environments.reasoning import Reasoning
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.monitor.validate import rescore, validate
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.rollouts import Publication
from rl_swarm.protocol.rounds import Report
from rl_swarm.protocol.wire import decode, seal, unseal

ROUNDS, NODES = 4, 2


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run `r` and the keys of its nodes."""
    folder = tmp_path_factory.mktemp("runs")
    code, output = run(folder, "up", "--run", "r", "--nodes", str(NODES), "--rounds", str(ROUNDS), *QUICK)
    assert code == 0, output
    return folder


@pytest.fixture
def address(workplace: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(workplace / "r", tmp_path / "r"))


def owner(address: Path, workplace: Path, node: str) -> Identity:
    """The key of a node."""
    return next(i for i in map(Identity.load, workplace.glob("*.pem")) if i.node == node)


def first(address: Path, pattern: str) -> Path:
    return sorted(address.glob(pattern))[0]


def test_a_finished_run_is_sound(workplace: Path) -> None:
    code, output = run(workplace, "validate", "r", "--rounds", str(ROUNDS), "--nodes", str(NODES))
    assert code == 0 and "The run is sound" in output
    assert f"{ROUNDS * NODES} reports" in output and "rescored answers" in output


def test_other_numbers_than_expected_are_errors(workplace: Path) -> None:
    assert run(workplace, "validate", "r", "--rounds", "5")[0] == 1
    assert run(workplace, "validate", "r", "--nodes", "3")[0] == 1


def alter_report(address: Path) -> None:
    path = first(address, "rewards/round_1/stage_0/*.json")
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "reward": fields["reward"] + 0.5}))


def remove_round_of_reports(address: Path) -> None:
    shutil.rmtree(address / "rewards" / "round_2")


def remove_round_of_rollouts(address: Path) -> None:
    shutil.rmtree(address / "rollouts" / "round_2")


def remove_round_from_history(address: Path) -> None:
    path = address / "state" / "history.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:1] + lines[2:]) + "\n")


def alter_logged_reward(address: Path) -> None:
    path = first(address, "logs/*/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    next(line for line in lines if line["kind"] == "round")["reward_local"] += 0.25
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def remove_log(address: Path) -> None:
    first(address, "logs/*/metrics.jsonl").unlink()


def truncate_rollouts(address: Path) -> None:
    path = first(address, "rollouts/round_0/stage_0/*.json")
    path.write_bytes(path.read_bytes()[:-20])


def alter_state(address: Path) -> None:
    path = address / "state" / "current_state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "round": 99}))


def forge_rollouts(address: Path) -> None:
    """A stranger signs properly, under a member's name."""
    path = first(address, "rollouts/round_1/stage_0/*.json")
    path.write_bytes(seal(unseal(path.read_bytes(), Publication), Identity.generate()))


def copy_of_another_round(address: Path) -> None:
    path = first(address, "rollouts/round_1/stage_0/*.json")
    shutil.copy(first(address, "rollouts/round_0/stage_0/*.json"), path)


@pytest.mark.parametrize(
    "tamper",
    [
        alter_report,
        remove_round_of_reports,
        remove_round_of_rollouts,
        remove_round_from_history,
        alter_logged_reward,
        remove_log,
        truncate_rollouts,
        alter_state,
        forge_rollouts,
        copy_of_another_round,
    ],
    ids=lambda f: f.__name__,
)
def test_a_run_that_was_tampered_with_is_not_sound(address: Path, tamper: Callable[[Path], None]) -> None:
    assert validate(address)[0].sound
    tamper(address)
    assert not validate(address)[0].sound


def test_a_node_cannot_change_its_report_afterwards_even_with_its_own_key(address: Path, workplace: Path) -> None:
    path = first(address, "rewards/round_1/stage_0/*.json")
    report = unseal(path.read_bytes(), Report)
    better = msgspec.structs.replace(report, reward=report.reward + 0.1)
    path.write_bytes(seal(better, owner(address, workplace, report.node)))
    verdict, _ = validate(address)
    assert any("not the report that the coordinator counted" in error for error in verdict.errors)


def test_rewards_that_the_answers_do_not_earn_are_found(address: Path, workplace: Path) -> None:
    path = first(address, "rollouts/round_1/stage_0/*.json")
    fields = decode(path.read_bytes())
    fields.pop("digest"), fields.pop("signature")
    for answers in fields["rollouts"].values():  # type: ignore[attr-defined]
        for answer in answers:
            answer["reward"] = 1.0 - answer["reward"]
    path.write_bytes(seal(_publication(fields), owner(address, workplace, path.stem)))
    verdict, opened = validate(address)
    assert verdict.sound and opened is not None, "every signature is right"
    environment = Reasoning(opened.manifest.tasks)
    try:
        rescore(opened, environment, verdict)
    finally:
        environment.close()
    assert any("claims other rewards" in error for error in verdict.errors)


def _publication(fields: dict[str, object]) -> Publication:
    return msgspec.convert(fields, Publication)


def test_what_a_stranger_put_into_the_folder_is_only_noted(address: Path) -> None:
    path, stranger = first(address, "rollouts/round_1/stage_0/*.json"), Identity.generate()
    fields = {**decode(path.read_bytes()), "peer_id": stranger.peer_id, "node": "stranger"}
    path.with_name("stranger.json").write_bytes(seal(_publication(fields), stranger))
    verdict, _ = validate(address)
    assert verdict.sound
    assert any(f"of {stranger.peer_id}, not a member" in note for note in verdict.notes)


def test_files_that_anybody_put_beside_the_rollouts_make_no_run_unsound(address: Path) -> None:
    folder = address / "rollouts" / "round_1" / "stage_0"
    for number in range(200):
        (folder / f"junk-{number}.json").write_bytes(b"{}")
    for name in ("round_1\x1b[31m", "round_1000000", "x\ny"):
        (address / "rollouts" / name / "stage_0").mkdir(parents=True)
        (address / "rollouts" / name / "stage_0" / "junk.json").write_bytes(b"{}")
    verdict, _ = validate(address)
    assert verdict.sound, verdict.errors
    assert len(verdict.notes) < 100 and all(note.isprintable() for note in verdict.notes)


def test_old_rollouts_that_were_cleaned_up_are_only_noted(address: Path) -> None:
    shutil.rmtree(address / "rollouts" / "round_0")
    verdict, _ = validate(address)
    assert verdict.sound and any("removed" in note for note in verdict.notes)


STRANGE_LINES = (
    b'{"event":"skipped"}\n{"event":"skipped","first":0,"last":1000000000000000}\n{"event":"joined_late"}\n'
    b'{"event":"skipped","first":"x","last":[]}\n{"kind":"round"}\n{"kind":"round","round":[]}\n{"kind":"x"}\n'
    b'{"kind":"held_out","when":{}}\n7\n"\xff"\n'
)


def test_what_a_node_writes_into_its_log_stops_nobody_who_reads_it(address: Path) -> None:
    before = RunView.open(address).as_dict()
    for name in ("metrics.jsonl", "training_events.jsonl"):
        with first(address, f"logs/*/{name}").open("ab") as file:
            file.write(STRANGE_LINES)
    verdict, _ = validate(address)
    assert verdict.sound, verdict.errors
    after = RunView.open(address).as_dict()
    for told in (before, after):
        for node in told["nodes"]:  # type: ignore[attr-defined]
            node.pop("unreadable_lines")
    assert after == before
    assert before["mean_held_out_now"] is not None


def test_a_run_that_has_not_finished_is_not_sound(tmp_path: Path) -> None:
    assert run(tmp_path, "validate", str(tmp_path))[0] == 1


def test_lines_of_a_log_that_cannot_be_read_are_counted_and_told(address: Path) -> None:
    damaged, crashed = sorted((address / "logs").glob("*/metrics.jsonl"))
    lines = damaged.read_bytes().splitlines(keepends=True)
    damaged.write_bytes(b"".join([lines[0], b'{"kind": "round", "round": "x"}\n', b"\x00junk\n", *lines[1:]]))
    crashed.write_bytes(crashed.read_bytes() + b'{"kind": "rou')
    with (damaged.parent / "training_events.jsonl").open("ab") as events:
        events.write(b'junk\n{"event": "le')
    code, output = run(address.parent, "validate", "r")
    said = " ".join(output.split())
    assert f"logs/{damaged.parent.name}/metrics.jsonl: 2 lines cannot be read (more than crashes" in said
    assert f"logs/{damaged.parent.name}/training_events.jsonl: 2 lines cannot be read (more than" in said
    assert f"logs/{crashed.parent.name}/metrics.jsonl: 1 line cannot be read (as a crash" in said
    assert code == 0, "what was reported is all there"
    told = RunView.open(address).as_dict()["nodes"]
    assert isinstance(told, list)
    found = {node["node"]: node["unreadable_lines"] for node in told}
    assert found == {damaged.parent.name: 4, crashed.parent.name: 1}
    code, output = run(address.parent, "status", "r")
    assert code == 0 and "5 lines of the nodes' logs cannot be read" in " ".join(output.split())


def test_names_of_files_are_no_commands_to_a_terminal(address: Path) -> None:
    name = "\x1b]0;x\x07\u202e"
    (address / "rollouts" / name / "stage_0").mkdir(parents=True)
    (address / "rollouts" / name / "stage_0" / "one.json").write_text("{}")
    code, output = run(address.parent, "validate", "r")
    assert code == 0 and "\x1b" not in output, "what no member wrote is nothing to this run"
    address.rename(address.with_name(name))
    code, output = run(address.parent, "runs", "--root", ".", "--remove", name)
    assert code == 0 and output == "removed \\x1b]0;x\\x07\\u202e\n"
