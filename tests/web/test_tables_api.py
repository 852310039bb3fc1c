"""The API of the tables: orders, pages and bounds of the leaderboard, the order of rollouts, events as sentences."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from small_runs import HOSTILE, SmallRun
from starlette.testclient import TestClient
from varied_runs import coding_run, varied_run

from rl_swarm.environments.coding.environment import Coding
from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.protocol.wire import seal
from rl_swarm.telemetry.schema import HeldOutRecord
from rl_swarm.web.api import create_app

LOCAL = "http://localhost"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    return varied_run(tmp_path_factory.mktemp("tables") / "calm-run")


@pytest.fixture(scope="module")
def client(played: SmallRun) -> Iterator[TestClient]:
    with TestClient(create_app(Follower(RunView(played.root))), LOCAL) as found:
        yield found


def listed(client: TestClient, **asked: Any) -> list[dict[str, Any]]:
    response = client.get("/api/nodes", params=asked)
    assert response.status_code == 200, response.text
    rows: list[dict[str, Any]] = response.json()["nodes"]
    return rows


def test_nodes_are_sorted_by_every_column_both_ways_and_those_without_a_value_come_last(
    client: TestClient, played: SmallRun
) -> None:
    described = client.get("/api/openapi.json").json()["paths"]["/api/nodes"]["get"]["parameters"]
    columns = next(each["schema"]["enum"] for each in described if each["name"] == "sort")
    assert len(columns) >= 10
    for column in columns:
        for descending in (True, False):
            values = [row[column] for row in listed(client, sort=column, descending=descending)]
            assert values == sorted(values, reverse=descending) and len(values) == 3, column
    assert [row["held_out_now"] for row in listed(client)] == [0.9, 0.6, 0.4], "the best test score comes first"
    assert [row["rank"] for row in listed(client)] == [1, 2, 3]
    assert 0 < len(listed(client)[0]["spark"]) <= 40
    newcomer = SmallRun(played.root.parent / "newcomer", nodes=3, total=9)
    newcomer.write_round(newcomer.names[0], 0, 0.5, [])
    newcomer.tick()
    newcomer.state = replace(newcomer.state, round=2)
    newcomer.tick()
    with TestClient(create_app(Follower(RunView(newcomer.root))), LOCAL) as other:
        for descending in (True, False):
            rows = listed(other, sort="reward", descending=descending)
            assert [row["reward"] is None for row in rows] == [False, True, True]


def test_pages_and_chosen_nodes_are_bounded(client: TestClient, played: SmallRun) -> None:
    whole = listed(client, sort="name", descending=False)
    assert [listed(client, sort="name", descending=False, offset=k, limit=1)[0] for k in range(3)] == whole
    assert listed(client, offset=1_000_000) == []
    last = whole[2]["node"]
    chosen = listed(client, sort="name", descending=False, first=[last, "nobody", HOSTILE])
    assert [row["node"] for row in chosen] == [last, whole[0]["node"], whole[1]["node"]]
    for wrong in ({"sort": "node"}, {"sort": ""}, {"descending": "x"}, {"first": ["x"] * 13}, {"first": "x" * 101}):
        assert client.get("/api/nodes", params=wrong).status_code == 422, wrong
    table = list(csv.reader(io.StringIO(client.get("/api/nodes?format=csv&limit=1&sort=name").text)))
    assert len(table) == 4 and "spark" not in table[0], "a table has all nodes"


def test_names_and_numbers_of_strangers_are_sorted_as_any_other(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", nodes=3, total=9)
    for _ in range(2):
        run.play()
    identity = run.identities[0]
    peer = RunView.open(run.root).nodes[identity.node].peer
    assert peer is not None
    run.files.write(f"peers/{identity.node}.json", seal(replace(peer, model=HOSTILE), identity))
    run.write_round(identity.node, 2, -1e15, [])
    run.write_round(run.names[1], 2, 1e15, [])
    with TestClient(create_app(Follower(RunView(run.root))), LOCAL) as client:
        assert len(listed(client, search="<SCRIPT>")) == 1
        assert listed(client, sort="model", descending=False)[0]["model"] == HOSTILE
        assert listed(client, sort="reward")[0]["node"] == run.names[1]
        assert listed(client, sort="reward", descending=False)[0]["node"] == identity.node
        for order in ("teaching", "newest", None):
            assert client.get("/api/rollouts", params={"order": order} if order else {}).status_code == 200
        assert client.get("/api/rollouts?order=best").status_code == 422


def test_groups_with_right_and_wrong_answers_come_first_and_none_is_left_out(client: TestClient) -> None:
    def told(**asked: Any) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        after = None
        while True:
            page = client.get(
                "/api/rollouts", params={**asked, "limit": 7, **({"after": after} if after else {})}
            ).json()
            rows += page["rollouts"]
            after = page["next"]
            if after is None:
                return rows

    def teaches(row: dict[str, Any]) -> bool:
        shares = [answer["right"] for answer in row["completions"]]
        return max(shares) == 1 > min(shares)

    newest, teaching = told(order="newest"), told()
    assert sorted(row["id"] for row in newest) == sorted(row["id"] for row in teaching) and len(newest) == 25 * 6
    assert not teaches(newest[0]) or not teaches(newest[1])
    first = [teaches(row) for row in teaching]
    assert first == sorted(first, reverse=True) and any(first) and not all(first)
    assert [row["round"] for row in teaching if teaches(row)] == [r["round"] for r in newest if teaches(r)]
    assert [row["round"] for row in told(round=3)] == [3] * 6
    shares = [answer["right"] for answer in teaching[0]["completions"]]
    assert shares == [0, 1, 1, 0.4, 0] and teaching[0]["best"] == 1.0, "negative rewards are no share of right"


def test_events_are_sentences(client: TestClient, played: SmallRun) -> None:
    def told(kind: str) -> list[str]:
        found = client.get("/api/events", params={"kind": kind, "limit": 1000}).json()["events"]
        return [" ".join(filter(None, (e["name"], e["said"], e["about_name"]))) + e["rest"] for e in found]

    first, second, third = (identity.name for identity in played.identities)
    assert f"{first} joined with tiny" in told("joined")
    assert f"{third} saved a checkpoint in round 21" in told("checkpoint")
    assert told("rejected") == [f"{first} refused a rollout of {second}: it is not signed by that node"] * 3
    assert f"{second} reached its best test score so far, 90% (before: 20%)" in told("best_score")
    assert told("failed") == [f"{third} failed: {HOSTILE}"]
    taught = told("taught")
    assert len(taught) == 10 and "wrote answers that 2 other nodes learned from in round 25" in taught[0]
    run = SmallRun(played.root.parent / "solver", nodes=1, total=9)
    log = run.journals[run.names[0]]
    for score, solved in ((0.2, 0.0), (0.2, 0.5), (0.1, 0.7)):
        log.metrics(HeldOutRecord(
            when="now", round=0, questions=16, sampled=score, greedy=None, well_formed=0.5, accuracy_well_formed=0.5,
            by_task={"gcd": 0.4, HOSTILE: solved}, greedy_by_task={}, well_formed_by_task={},
            accuracy_well_formed_by_task={}, examples=[],
        ))  # fmt: skip
    with TestClient(create_app(Follower(RunView(run.root))), LOCAL) as other:
        news = [e for e in other.get("/api/events").json()["events"] if e["event"] in ("first_solved", "best_score")]
    assert [event["said"] for event in news] == [f"solved its first test question of {HOSTILE}"]


def test_programs_are_shown_with_their_tests_and_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Coding, "sandbox", property(lambda self: pytest.fail("a program was run")))
    run = coding_run(tmp_path)
    with TestClient(create_app(Follower(RunView(run.root))), LOCAL) as client:
        (row,) = client.get("/api/rollouts").json()["rollouts"]
    assert row["best"] == 1.2 and len(row["tests"]) >= 2 and row["answer"].startswith("def ")
    assert [answer["right"] for answer in row["completions"]] == [1, 0, 0], (
        "0.2 is earned for an end, not for being right"
    )
    assert f"{row['tests'][0]['call']} == {row['tests'][0]['expected']}" in row["question"]
