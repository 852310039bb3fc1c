"""What is known of a swarm: read once, kept small, and nothing in a log can spoil it."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as changed
from small_runs import HOSTILE, SmallRun

from rl_swarm.config.settings import Settings
from rl_swarm.monitor import run_reader as report
from rl_swarm.monitor import snapshot
from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.node_history import KEPT_LINES
from rl_swarm.monitor.rollouts import RolloutFilter, RolloutReader
from rl_swarm.monitor.run_reader import LONGEST_LINE, NodeView, RunView
from rl_swarm.monitor.runs import Runs
from rl_swarm.monitor.series import Curves, combined, stride_for
from rl_swarm.network.address import open_address
from rl_swarm.node import run_settings
from rl_swarm.protocol.identity import Identity
from rl_swarm.telemetry.schema import Load, RoundRecord

GOOD = b'"reward_local":0.5,"reward_training":0.5,"local_with_signal":1,"external_accepted":1,"tokens_per_second":1.0'
NOBODY = 2**31 - 1  # a process id that no system hands out


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def followed(run: SmallRun) -> tuple[Follower, Clock]:
    clock = Clock()
    follower = Follower(RunView(run.root), clock)
    follower.poll()
    return follower, clock


def test_curves_stay_small_and_keep_their_means() -> None:
    curves = Curves(most=8)
    for played in range(100):
        curves.add([played], {"reward": [float(played)]})
    assert curves.stride == 16 and len(curves.sums["reward"]) == 7
    assert curves.points("reward", 16)[:2] == [7.5, 23.5]
    assert curves.points("reward", 32)[0] == 15.5
    assert curves.points("nothing", 16) == []
    assert stride_for([curves, Curves()], 2) == 64


def test_a_round_without_a_point_is_a_gap_and_one_played_twice_is_averaged() -> None:
    curves = Curves()
    for played, reward in [(0, 1.0), (3, 0.0), (3, 1.0)]:
        curves.add([played], {"reward": [reward]})
    assert curves.points("reward", 1) == [1.0, None, None, 0.5]


def test_the_mean_of_all_counts_what_was_measured_however_coarse_the_curves_are() -> None:
    short, long = Curves(most=4), Curves(most=4)
    short.add([0, 1, 2], {"reward": [1.0, None, 3.0], "nothing": [None] * 3})
    long.add(range(8), {"reward": [0.0] * 8})
    assert (short.stride, long.stride) == (1, 2) and "nothing" not in short.sums
    assert combined([short, long, Curves()], "reward", 2).points("reward", 2) == [
        pytest.approx(1 / 3, 1e-5),
        1.0,
        0.0,
        0.0,
    ]
    assert combined([], "reward", 2).points("reward", 2) == []


def test_the_overview_and_the_leaderboard_tell_what_the_rounds_did(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", nodes=3, total=5)
    for _ in range(2):
        run.play()
    follower, _ = followed(run)
    told = snapshot.overview(follower)
    assert (told.phase, told.round, told.rounds, told.nodes, told.alive) == ("running", 2, 5, 3, 3)
    assert told.tasks == ["chain_sum", "gcd"] and told.models == ["tiny"]
    assert told.tokens == 2 * 3 * 50 and told.rollouts == 2 * 3 * 4
    assert told.external_share == 0.4 and told.held_out_start == pytest.approx(0.2)
    assert told.seconds_to_next is not None and told.seconds_to_next >= 0
    rows = snapshot.nodes(follower).nodes
    assert [row.rank for row in rows] == [1, 2, 3]
    assert [row.node for row in rows] == run.names[::-1], "their test scores are equal, so the reward decides"
    assert rows[2].wins == 4 and rows[2].participation == 2
    assert {row.total_reward for row in rows} == {0.5}
    assert snapshot.nodes(follower, search=rows[1].name.upper()).nodes == [rows[1]]
    assert snapshot.nodes(follower, search=rows[2].peer_id[-9:]).nodes == [rows[2]]
    assert snapshot.nodes(follower, offset=1, limit=1).nodes == [rows[1]]
    assert snapshot.health(follower).status == "alive"


def test_a_look_reads_only_what_is_new_and_only_when_it_is_time(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", total=9)
    run.play()
    follower, clock = followed(run)
    before = follower.version
    run.play()
    assert follower.poll() == before, "a second has not passed"
    clock.time += 1.0
    assert follower.poll() == before + 1
    assert snapshot.lines(follower, "reward_local").rounds == [0, 1]
    clock.time += 1.0
    assert follower.poll() == before + 1, "nothing has changed"
    assert snapshot.overview(follower).tokens == 2 * 2 * 50, "nothing was counted twice"


def test_a_long_run_is_told_in_few_points_and_its_lines_are_let_go(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", nodes=8, total=2000)
    lines = run.root / "logs" / run.names[0] / "metrics.jsonl"
    run.state = changed(run.state, round=1999)
    run.tick()
    for node in run.names:
        for played in range(2000):
            run.write_round(node, played, played / 2000, [])
    assert lines.stat().st_size > 500_000
    follower, _ = followed(run)
    told = snapshot.lines(follower, "reward_local", points=500)
    assert len(told.rounds) == 500 and len(told.lines) == 8 and told.rounds[-1] == 1996
    assert all(abs(value - (4 * k + 1.5) / 2000) < 1e-9 for k, value in enumerate(told.mean))  # type: ignore[operator]
    assert all(len(view.rounds) == KEPT_LINES for view in follower.view.nodes.values())
    assert snapshot.overview(follower).rollouts == 8 * 2000 * 4


def test_a_node_is_told_with_whom_it_learned_from_and_what_was_rejected(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", nodes=2, total=4)
    run.play()
    run.score(run.identities[0], "now", 0.5)
    run.journals[run.names[0]].event("resumed", round=0, model="tiny")
    (run.root / "checkpoints" / "round_3" / run.names[0]).mkdir(parents=True)
    run_settings.keep(Settings.of(seed=42, identity_path="/home/ada/swarm.pem"), run.root, run.manifest, run.owner)
    follower, _ = followed(run)
    told = snapshot.node(follower, run.identities[0].peer_id)
    assert told is not None and told.row.node == run.names[0]
    assert [(link.node, link.groups) for link in told.learned_from] == [(run.names[1], 1)]
    assert [(link.node, link.groups) for link in told.used_by] == [(run.names[1], 1)]
    assert told.rejected == {"digest": 1} and told.restarts == 1 and told.checkpoints == [3]
    assert [(s.task, s.start, s.now) for s in told.held_out] == [("chain_sum", 0.2, 0.5), ("gcd", 0.2, 0.5)]
    assert told.settings["seed"] == "42" and "identity_path" not in told.settings, "of this machine alone"
    assert "private_path" not in told.settings
    curves = snapshot.curves(follower, run.names[0], ["entropy", "seconds.train", "nothing"])
    assert curves is not None and curves.metrics == {"entropy": [0.5], "seconds.train": [0.25]}
    assert snapshot.node(follower, "nobody") is None and snapshot.curves(follower, "nobody", []) is None


def test_what_a_node_says_about_itself_and_what_others_say_about_its_rollouts(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", nodes=2, total=4)
    mine, others = (run.journals[name] for name in run.names)
    run_settings.keep(Settings.of(seed=42), run.root, run.manifest, run.owner)
    mine.event("joined", round=-1, model="tiny", hardware={"cores": "2"}, settings={"seed": 7, "hf_token": "secret"})
    mine.event("failed", error="ValueError: no")
    others.event("rejected", node=run.names[0], reason="digest", detail="altered")
    others.event("rejected", node="stranger", reason="digest", detail="altered")
    run.write_round(run.names[0], 0, 0.5, [])
    mine.metrics(RoundRecord(1, 0.5, 0.5, 1, 0, 1.0, load=Load(gpu=0.5)))
    run.state = changed(run.state, round=2)
    run.tick()
    follower, _ = followed(run)
    told, other = (snapshot.node(follower, name) for name in run.names)
    assert told is not None and other is not None
    assert told.settings == {"seed": "7"} and told.hardware == {"cores": "2"}, "its own, and no secret"
    assert other.settings["seed"] == "42" and other.hardware == {}
    assert (
        told.errors == {"ValueError: no": 1}
        and told.rejected_by_peers == {"digest": 1}
        and other.rejected_by_peers == {}
    )
    assert told.restarts == 1 and other.restarts == 0, "who joins twice was started again"
    kinds = [event.event for event in snapshot.events(follower, node=run.names[0]).events]
    assert kinds == ["failed", "restarted", "joined"]
    curves = snapshot.curves(follower, run.names[0], [])
    assert curves is not None and curves.metrics["load.gpu"] == [None, 0.5]


def test_what_a_stranger_writes_into_a_log_spoils_nothing(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", total=5)
    run.play()
    log = run.root / "logs" / run.names[0]
    good = GOOD.decode()
    with (log / "metrics.jsonl").open("a") as file:
        file.write('not json\n{"kind":"round"}\n[1]\n')
        file.write(f'{{"kind":"round","round":4000000000000000,{good}}}\n')
        file.write(f'{{"kind":"round","round":-3,{good}}}\n')
        file.write(
            f'{{"kind":"round","round":0,{good},"entropy":1e308,"seconds":[1],'
            f'"external_by_peer":{{"x":"y","{"z" * 99}":1}}}}\n'
        )
    with (log / "training_events.jsonl").open("a") as file:
        file.write('{"event":7}\n{"event":"left","timestamp":"now"}\n{"event":"rejected","timestamp":1.0}\n')
        file.write('{"event":"resumed","timestamp":1.0,"hardware":[1],"settings":{"hf_token":"x","seed":[1]}}\n')
    follower, _ = followed(run)
    assert snapshot.lines(follower, "reward_local").rounds == [0]
    found = snapshot.node(follower, run.names[0])
    assert found is not None and [link.node for link in found.learned_from] == [run.names[1]]
    assert snapshot.curves(follower, run.names[0], ["entropy"]).metrics["entropy"] == [0.5]  # type: ignore[union-attr]
    assert [e.event for e in snapshot.events(follower, node=run.names[0]).events] == ["joined", "rejected", "restarted"]
    assert found.settings == {} and found.hardware == {}


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"kind":"round","round":1,"unknown":' + b"[" * 50_000,
        b'{"kind":"round","round":' + b"9" * 5000 + b"," + GOOD + b"}",
        b'{"kind":"round","round":1,"entropy":' + b"9" * 5000 + b"," + GOOD + b"}",
        b'{"kind":"round","round":1,"note":"' + b"x" * LONGEST_LINE + b'",' + GOOD + b"}",
        b'{"kind":"round","round":1,"external_by_peer":{"\xff":1},' + GOOD + b"}",
        b'{"kind":"round","round":1,"external_by_peer":{"x":-1},' + GOOD + b"}",
        b'{"kind":"round","round":1,"kl":1e999,' + GOOD + b"}",
        b'{"kind":"square","round":1,' + GOOD + b"}",
    ],
)
def test_a_line_that_no_node_writes_is_left_out_and_the_next_is_read(tmp_path: Path, line: bytes) -> None:
    run = SmallRun(tmp_path / "run", total=5)
    with (run.root / "logs" / run.names[0] / "metrics.jsonl").open("ab") as file:
        file.write(line + b'\n{"kind":"round","round":0,' + GOOD + b"}\n")
    follower, _ = followed(run)
    assert snapshot.lines(follower, "reward_local").mean == [0.5]


def test_events_come_newest_first_and_a_node_that_dies_is_one(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", total=5, pid=NOBODY)
    run.join(run.identities[1], os.getpid())
    follower, clock = followed(run)
    run.join(run.identities[1], NOBODY)
    clock.time += 1.0
    follower.poll()
    times = [event.timestamp for event in snapshot.events(follower).events]
    assert len(times) == 5 and times == sorted(times, reverse=True)
    assert [e.node for e in snapshot.events(follower, kind="offline").events] == [run.names[1]]
    assert snapshot.overview(follower).phase == "crashed" and snapshot.health(follower).status == "stale"
    assert snapshot.events(follower, node="nobody").events == []


def test_a_node_is_alive_by_its_process_whatever_number_is_claimed(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # and nobody has taken notice of that
        run = SmallRun(tmp_path / "run", total=5, pid=NOBODY)
        for pid, alive in ((os.getpid(), 1), (ended.pid, 0), (0, 0), (NOBODY, 0)):
            run.join(run.identities[1], pid)
            follower, _ = followed(run)
            assert snapshot.overview(follower).alive == alive


def test_rollouts_are_read_page_by_page_with_task_and_answer_key(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", nodes=2, total=4)
    for _ in range(3):
        run.play(HOSTILE)
    follower, _ = followed(run)
    texts = RolloutReader(follower)
    try:
        rows, after = [], None
        while True:
            page = texts.page(RolloutFilter(), after, 5)
            rows += page.rollouts
            if (after := page.next) is None:
                break
        assert len(rows) == len({row.id for row in rows}) == 12
        assert [row.round for row in rows] == [2] * 4 + [1] * 4 + [0] * 4
        first = next(row for row in rows if row.number == 0)
        assert first.task in ("chain_sum", "gcd") and first.completions[0].text == f"<answer>{first.answer}</answer>"
        assert first.completions[1].text == HOSTILE, "as it was written: whoever shows it makes it harmless"
        assert first.reward == 0.5 and first.completions[0].advantage > 0.7
        assert {row.round for row in texts.page(RolloutFilter(round=1), None, 99).rollouts} == {1}
        assert {row.node for row in texts.page(RolloutFilter(node=run.names[1]), None, 99).rollouts} == {run.names[1]}
        assert {row.task for row in texts.page(RolloutFilter(task="gcd"), None, 99).rollouts} <= {"gcd"}
        assert {row.reward for row in texts.page(RolloutFilter(min_reward=0.4), None, 99).rollouts} == {0.5}
        assert {row.reward for row in texts.page(RolloutFilter(max_reward=0.4), None, 99).rollouts} == {0.0}
        assert texts.page(RolloutFilter(), "nonsense", 1).rollouts[0] == rows[0]
    finally:
        texts.close()


def test_rollouts_that_others_forged_are_passed_over(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", nodes=2, total=4)
    run.play()
    path = run.root / "rollouts" / "round_0" / "stage_0"
    (path / f"{run.names[0]}.json").write_bytes((path / f"{run.names[1]}.json").read_bytes())
    follower, _ = followed(run)
    texts = RolloutReader(follower)
    try:
        page = texts.page(RolloutFilter(), None, 99)
    finally:
        texts.close()
    assert {row.node for row in page.rollouts} == {run.names[1]} and page.unreadable == 1


def test_where_logs_are_elsewhere_the_curves_are_what_nodes_reported(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", nodes=2, total=9)
    for _ in range(4):
        run.play()
    place = replace(open_address(run.root), is_url=True, here=tmp_path / "here")
    clock = Clock()
    follower = Follower(RunView(place), clock)
    follower.poll()
    told = snapshot.lines(follower, "reward_local")
    assert told.rounds == [0, 1, 2, 3] and told.mean == [0.25] * 4
    assert snapshot.overview(follower).rollouts == 2 * 4 * 2 and not snapshot.overview(follower).has_logs
    assert [event.event for event in snapshot.events(follower).events] == ["joined", "joined"]
    (run.root / "rewards" / "round_4" / "stage_0").mkdir(parents=True)
    (run.root / "rewards" / "round_4" / "stage_0" / f"{run.names[0]}.json").write_text('{"reward": 9}')
    run.tick()
    clock.time += 100.0
    follower.poll()
    assert snapshot.lines(follower, "reward_local").mean == [0.25] * 4
    assert snapshot.nodes(follower).nodes[0].reward == 0.25, "as the coordinator counted"


def test_runs_of_one_folder_are_laid_over_each_other(tmp_path: Path) -> None:
    first, second = SmallRun(tmp_path / "first", total=3), SmallRun(tmp_path / "second", total=9)
    for run, times in ((first, 3), (second, 5)):
        for _ in range(times):
            run.play()
    (tmp_path / "other").mkdir()
    follower, _ = followed(first)
    runs = Runs(follower)
    page = runs.page(0, 20)
    assert {(row.run, row.phase, row.current) for row in page.runs} == {
        ("first", "finished", True),
        ("second", "running", False),
    }
    lines = runs.lines(["first", "second", "other", "../first"], "reward_local", 500)
    assert [line.name for line in lines.lines] == ["first", "second"] and lines.rounds == [0, 1, 2, 3, 4]
    assert lines.lines[0].values[3:] == [None, None]


def test_a_file_that_introduces_nobody_is_no_node(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run")
    (run.root / "peers" / "stranger.json").write_text('{"peer_id": "x"}')
    run.identities.append(Identity.generate())
    follower, _ = followed(run)
    assert "stranger" not in [row.node for row in snapshot.nodes(follower).nodes]
    assert len(follower.view.nodes) == len(run.identities) - 1


@pytest.mark.parametrize("line", [b"{}\n", b"\n", b'{"kind":"nothing","of":"what a node would write","x":12345}\n'])
def test_a_log_of_a_million_lines_that_are_none_is_not_parsed(tmp_path: Path, line: bytes, monkeypatch) -> None:
    run = SmallRun(tmp_path / "run")
    run.play()
    parsed = []
    decode = report.decode
    monkeypatch.setattr(report, "decode", lambda data: parsed.append(1) or decode(data))
    for name in ("metrics.jsonl", "training_events.jsonl"):
        (run.root / "logs" / run.names[0] / name).write_bytes(line * 200_000)
    follower, _ = followed(run)
    assert len(parsed) < 3000, "a bounded number of lines is looked at"
    view = follower.view.nodes[run.names[0]]
    assert view.unreadable_lines > 0 and follower.view.nodes[run.names[1]].rounds, "and the other's log is read"


def test_logs_that_take_long_to_read_are_read_in_turn(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run")
    run.play()
    clock = Clock()
    follower = Follower(RunView(run.root), clock)
    read = follower.view.refresh_node
    looked: list[list[str]] = []

    def slowly(node: NodeView) -> None:
        looked[-1].append(node.node)
        clock.time += 60.0
        read(node)

    follower.view.refresh_node = slowly  # type: ignore[method-assign]
    for _ in range(2 * len(run.names)):
        looked.append([])
        clock.time += 60.0
        follower.poll()
    assert {len(each) for each in looked} == {1}, "one after the other"
    assert {each[0] for each in looked} == set(run.names), "and none is forgotten"


@pytest.mark.parametrize("when", [0, 2**33, -(2**31)], ids=["1970", "2242", "1901"])
def test_a_run_is_listed_whatever_time_its_manifest_has(tmp_path: Path, when: int) -> None:
    run = SmallRun(tmp_path / "run")
    os.utime(run.root / "manifest.json", (when, when))
    for path in run.root.rglob("*"):
        os.utime(path, (when, when))
    runs = Runs(None, tmp_path)
    assert [row.run for row in runs.page(0, 20).runs] == ["run"] and runs.get("run") is not None
