"""The leaderboard, the rollouts and the feed in a real browser: order, pins, thousands of rows, answers, sentences."""

import csv
import io
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from browsing import CHROMIUM, Visit, address_of, opened
from msgspec.structs import replace
from playwright.sync_api import Browser, Locator, Page, expect
from processes import start, until
from small_runs import HOSTILE, SmallRun, questions_of
from starlette.testclient import TestClient

from benchmarks.lib.many_nodes import ManyNodes
from benchmarks.lib.paths import rollouts_path
from rl_swarm.environments.coding.environment import Coding
from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import question_seed
from rl_swarm.protocol.rollouts import Answer, Publication, Sampling
from rl_swarm.protocol.tasks import Task
from rl_swarm.protocol.wire import seal
from rl_swarm.telemetry.schema import HeldOutRecord
from rl_swarm.web.api import create_app

in_a_browser = pytest.mark.skipif(
    CHROMIUM is None and "CI" not in os.environ, reason="there is no Chromium on this machine"
)
LOCAL = "http://localhost"
RIGHT_TEXT = "The sum is easy. <answer>{}</answer> I am sure."
WRONG_TEXT = "The sum is easy. <answer>{}</answer> I am sad."
PROGRAM = "```python\ndef solve(x):\n    # <b>bold</b>\n    return 'text' + 1\n```"


def publish(
    run: SmallRun, identity: Identity, played: int, groups: Sequence[tuple[str, Sequence[tuple[str, float]]]]
) -> None:
    """Publish answers with the rewards that their author claims, by question."""
    publication = Publication(
        peer_id=identity.peer_id, kind="rollouts", swarm=run.manifest.swarm(), node=identity.node, round=played,
        stage=0, timestamp=time.time(), model="tiny", policy_version=played, sampling=Sampling(1.0, 1.0, 0, 24),
        rollouts={
            str(k): [Answer(prompt=prompt, response=text, reward=reward) for text, reward in answers]
            for k, (prompt, answers) in enumerate(groups)
        },
    )  # fmt: skip
    run.files.write(rollouts_path(played, 0, identity.node), seal(publication, identity))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    """A swarm of three nodes that differ in every column, with answers of every kind and events that repeat."""
    run = SmallRun(tmp_path_factory.mktemp("tables") / "calm-run", nodes=3, total=60)
    first, second, third = run.identities
    for _ in range(25):
        run.play("<answer>no</answer>")
    for score, identity in zip((0.4, 0.9, 0.6), run.identities, strict=True):
        run.score(identity, "now", score)
    for identity in run.identities:
        run.journals[identity.node].event("checkpoint", round=20)
    for _ in range(3):
        run.journals[first.node].event("rejected", node=second.node, reason="signature", detail=HOSTILE)
    run.journals[third.node].event("failed", error=HOSTILE)
    last = run.state.round - 1
    seeds = [question_seed(run.manifest, last, third.peer_id, k) for k in range(2)]
    one, two = questions_of("chain_sum,gcd").questions(seeds)
    mixed = [
        (WRONG_TEXT.format(one.answer), 0.0),
        (RIGHT_TEXT.format(one.answer), 1.0),
        (RIGHT_TEXT.format(one.answer), 1.0),
        ("half of it", 0.4),
        (HOSTILE, -0.5),
    ]
    all_wrong = [(PROGRAM, 0.0), (f"Not at all.\n\n{PROGRAM}\nThat is it.", 0.0)]
    publish(run, third, last, [(one.prompt, mixed), (two.prompt, all_wrong)])
    for identity in (first, second):  # nothing to learn from
        seeds = [question_seed(run.manifest, last, identity.peer_id, k) for k in range(2)]
        asked = questions_of("chain_sum,gcd").questions(seeds)
        publish(run, identity, last, [(q.prompt, [("same", 0.0), ("same", 0.0)]) for q in asked])
    return run


@pytest.fixture(scope="module")
def client(played: SmallRun) -> Iterator[TestClient]:
    with TestClient(create_app(Follower(RunView(played.root))), LOCAL) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened() as found:
        yield found


@pytest.fixture(scope="module")
def watched(played: SmallRun) -> Iterator[str]:
    process = start(played.root.parent, "watch", "calm-run", "--port", "19800")
    yield address_of(process)
    process.terminate()
    assert process.wait(120) == 0


@pytest.fixture
def visit(browser: Browser, watched: str) -> Iterator[Visit]:
    made = Visit(browser, watched)
    yield made
    made.close()


def names(page: Page) -> list[str]:
    return page.locator(".board tbody .node a").all_inner_texts()


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
    assert f"{third} saved a checkpoint in round 20" in told("checkpoint")
    assert told("rejected") == [f"{first} refused a rollout of {second}: it is not signed by that node"] * 3
    assert f"{second} reached its best test score so far, 90% (before: 20%)" in told("best_score")
    assert told("failed") == [f"{third} failed: {HOSTILE}"]
    taught = told("taught")
    assert len(taught) == 10 and "wrote answers that 2 other nodes learned from in round 24" in taught[0]
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


def coding_run(folder: Path) -> SmallRun:
    """A swarm whose one node has answered a programming task: rightly, wrongly and without a program."""
    run = SmallRun(folder / "coding", nodes=1, total=3, environment="coding", tasks="beginner")
    (identity,) = run.identities
    (question,) = Coding((Task("beginner"),)).questions([question_seed(run.manifest, 0, identity.peer_id, 0)])
    right = f"Here it is.\n\n```python\n{question.answer}\n```"
    wrong = f"```python\n{question.answer}\n    # wrong\n```".replace("return", "yield")
    publish(run, identity, 0, [(question.prompt, [(right, 1.2), (wrong, 0.2), ("I do not know.", -0.8)])])
    return run


@in_a_browser
def test_a_click_and_a_key_sort_the_leaderboard(visit: Visit, client: TestClient) -> None:
    page = visit.open("#/")
    expect(page.locator(".board tbody tr")).to_have_count(3)

    def expected(column: str, descending: bool) -> list[str]:
        return [row["name"] for row in listed(client, sort=column, descending=descending)]

    header = page.locator(".board th", has=page.get_by_role("button", name="Test score", exact=True))
    expect(header).to_have_attribute("aria-sort", "descending")
    assert names(page) == expected("held_out_now", True)
    page.get_by_role("button", name="Reward", exact=True).click()
    until(lambda: names(page) == expected("reward", True))
    page.get_by_role("button", name="Reward", exact=True).click()
    until(lambda: names(page) == expected("reward", False))
    expect(page.locator(".board th.rewards")).to_have_attribute("aria-sort", "ascending")
    expect(header).to_have_attribute("aria-sort", "none")
    button = page.get_by_role("button", name="Node", exact=True)
    button.focus()
    page.keyboard.press("Enter")
    until(lambda: names(page) == expected("name", False))
    expect(button).to_be_focused()
    page.keyboard.press("Space")
    until(lambda: names(page) == expected("name", True))
    for column, key in (
        ("Total reward", "total_reward"),
        ("Votes", "wins"),
        ("Trend", "trend"),
        ("Rounds", "participation"),
    ):
        page.get_by_role("button", name=column, exact=True).click()
        until(lambda key=key: names(page) == expected(key, True))  # type: ignore[misc]
    with page.expect_download() as download:
        page.get_by_label("Save leaderboard as CSV").click()
    assert "total_reward" in Path(download.value.path()).read_text()
    page.get_by_role("button", name="What is Votes?").focus()
    expect(page.get_by_role("tooltip").filter(has_text="highest mean reward")).to_be_visible()
    expect(page.locator(".board svg.spark path")).to_have_count(3)
    assert page.locator(".board svg.spark").first.get_attribute("aria-hidden") == "true"


@in_a_browser
def test_pinned_nodes_stay_on_top_and_survive_a_reload(visit: Visit) -> None:
    page = visit.open("#/")
    expect(page.locator(".board tbody tr")).to_have_count(3)
    order = names(page)
    pin = page.get_by_role("button", name=f"Pin {order[2]}")
    pin.focus()
    page.keyboard.press("Enter")
    until(lambda: names(page) == [order[2], *order[:2]])
    expect(pin).to_be_focused()
    expect(pin).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="Test score", exact=True).click()
    until(lambda: names(page) == [order[2], order[1], order[0]])
    page.reload()
    until(lambda: names(page) == [order[2], *order[:2]])
    page.evaluate("localStorage.setItem('pinned nodes', '{\"not\": [\"a list\"]}')")
    page.reload()
    until(lambda: names(page) == order)
    page.evaluate("() => { Storage.prototype.setItem = () => { throw new Error('full'); }; }")
    page.get_by_role("button", name=f"Pin {order[1]}").click()
    until(lambda: names(page) == [order[1], order[0], order[2]])
    many = """async () => {
      const { pins } = await import("./static/pins.js");
      for (let k = 0; k < 20; k++) pins.toggle(`n${k}`);
      return pins.all();
    }"""
    assert page.evaluate(many) == [f"n{k}" for k in range(8, 20)]


@in_a_browser
@pytest.mark.parametrize("count", [1500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_rows_are_scrolled_searched_and_saved(browser: Browser, tmp_path: Path, count: int) -> None:
    with ManyNodes(tmp_path / "many", count).served(19900) as url:
        until(lambda: httpx.get(f"{url}/api/nodes", timeout=120).json()["total"] == count, 240)
        visit = Visit(browser, url)
        page = visit.open("#/")
        board = page.locator(".board")
        expect(board.locator("tbody a").first).to_be_visible()
        last = httpx.get(f"{url}/api/nodes?offset={count - 1}", timeout=120).json()["nodes"][0]
        expect(board.locator("table")).to_have_attribute("aria-rowcount", str(count + 1))
        board.get_by_role("region", name="Leaderboard").focus()
        page.keyboard.press("End")
        row = board.locator("tbody tr", has_text=last["name"]).last
        expect(row).to_be_in_viewport()
        expect(row).to_have_attribute("aria-rowindex", str(count + 1))
        assert board.locator("tbody tr").count() < 200
        bottom = board.locator(".long").evaluate("view => view.scrollHeight - view.scrollTop - view.clientHeight")
        assert bottom <= 1, "nothing follows the last row"
        row.locator("a").focus()
        page.keyboard.press("Home")
        until(lambda: board.locator("tbody tr[aria-rowindex='2']").count() == 1)
        expect(board.get_by_role("region", name="Leaderboard")).to_be_focused()  # the row with the focus has gone
        assert not visit.barriers()
        page.get_by_label("Search the leaderboard").fill(last["peer_id"][-12:])
        expect(board.locator("tbody tr")).to_have_count(1)
        expect(board.locator("tbody")).to_contain_text(last["name"])
        expect(board).to_contain_text("1 found")
        page.get_by_label("Search the leaderboard").fill("")
        expect(board.locator("table")).to_have_attribute("aria-rowcount", str(count + 1))
        board.get_by_role("button", name="Node", exact=True).click()
        with page.expect_download() as download:
            page.get_by_label("Save leaderboard as CSV").click()
        saved = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
        assert len(saved) == count and [row["name"] for row in saved] == sorted(row["name"] for row in saved)
        visit.close()


def answers(page: Page, verdict: str) -> Locator:
    return page.locator(f".rollout[open] .answer.{verdict}")


@in_a_browser
def test_the_first_rollout_teaches_and_partial_rewards_look_partial(visit: Visit) -> None:
    page = visit.open("#/rollouts")
    expect(page.locator(".rollout[open]")).to_have_count(1)
    expect(page.locator(".rollout[open] summary .mean")).to_have_text("2 of 5 right, some partly")
    expect(answers(page, "right")).to_have_count(1)
    expect(answers(page, "right")).to_contain_text("2 times")
    expect(answers(page, "wrong")).to_have_count(2)
    part = answers(page, "part")
    expect(part).to_contain_text("Partly right, 40 %")
    assert part.locator(".reward-bar b").evaluate("bar => bar.style.width") == "40%"
    assert part.locator(".box b").evaluate("box => box.style.height") == "40%"
    colours = [
        answers(page, kind).first.evaluate("e => getComputedStyle(e).borderLeftColor")
        for kind in ("right", "part", "wrong")
    ]
    assert len(set(colours)) == 3
    minus = answers(page, "wrong").filter(has_text="-0.500")
    assert minus.locator(".reward-bar b").evaluate("bar => bar.style.width") == "0%"
    expect(minus.locator("pre")).to_contain_text("<script>window.hacked = true</script>")
    assert page.evaluate("window.hacked") is None


@in_a_browser
def test_the_first_answers_of_a_swarm_appear_by_themselves(browser: Browser, tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "young", total=9)
    process = start(tmp_path, "watch", "young", "--port", "19950")
    other = Visit(browser, address_of(process))
    page = other.open("#/rollouts")
    expect(page.get_by_text("No rollouts.")).to_be_visible()
    run.play()
    expect(page.locator(".rollout")).to_have_count(4)
    run.play()
    page.get_by_role("button", name="Show the newest").click()
    expect(page.locator(".rollout")).to_have_count(8)
    other.close()
    process.terminate()
    assert process.wait(120) == 0


@in_a_browser
def test_what_differs_from_the_nearest_right_answer_is_underlined(visit: Visit) -> None:
    page = visit.open("#/rollouts")
    wrong = answers(page, "wrong").filter(has_text="I am sad")
    expect(wrong.locator("mark")).to_have_text(["sad"])
    expect(answers(page, "right").locator("mark")).to_have_count(0)
    expect(page.locator(".rollout[open]")).to_contain_text("Underlined: other words than in the nearest right answer")
    compared = """async (pairs) => {
      const { differences } = await import("./static/differences.js");
      const shown = (one) => ([from, to, missing]) => missing ?? one.slice(from, to);
      return pairs.map(([one, other]) => differences(one, other).map(shown(one)));
    }"""
    cases = {
        ("a b c d", "a b x d"): ["c"],
        ("a b d", "a b c d"): ["c"],
        ("a b", "a b c d"): ["c d"],
        ("", "a"): ["a"],
        ("a  b", "a b"): [],
        ("7", "17"): ["7"],
        ("x1 b x2 d", "b d"): ["x1", "x2"],
        ("Hmm, let me think. Hmm, let me think. Let me think.", "<answer>18</answer>"): [],
        ("ü é\u0000", "ü é\u0000 !"): ["!"],
    }
    assert page.evaluate(compared, [list(pair) for pair in cases]) == list(cases.values())
    long = ["a " * 10_000, "b " * 10_000, " ".join(map(str, range(5000))), " ".join(map(str, range(5000, 0, -1)))]
    assert page.evaluate(compared, [[long[0], long[1]], [long[2], long[3]]]) == [[], []], "too long to compare"


@in_a_browser
def test_code_is_shown_as_code(visit: Visit, browser: Browser, tmp_path: Path) -> None:
    page = visit.open("#/rollouts?round=24&min_reward=0&max_reward=0")
    wordy = page.locator(".rollout .answer", has_text="That is it.")
    page.locator(".rollout summary", has_text="0 of 2 right").last.click()
    expect(wordy.locator("pre")).to_have_count(3)
    expect(wordy.locator("pre.code .comment")).to_have_text("# <b>bold</b>")
    run = coding_run(tmp_path)
    process = start(run.root.parent, "watch", "coding", "--port", "19850")
    other = Visit(browser, address_of(process))
    page = other.open("#/rollouts")
    right, wrong, none = (page.locator(".answer").nth(k) for k in range(3))
    expect(right.locator("pre.code .keyword").first).to_have_text("def")
    expect(right.locator("pre").first).to_have_text("Here it is.")
    expect(right).to_contain_text("passes all")
    expect(wrong).to_contain_text("fails at least 1 of")
    expect(wrong.locator("pre.code mark").first).to_contain_text("yield")
    expect(none).to_contain_text("no program in this answer")
    expect(page.locator(".tests li")).not_to_have_count(0)
    expect(page.locator(".tests li").first).to_contain_text("in the question")
    assert not other.barriers()
    tokens = """async (text) => {
      const { python, parts, shown } = await import("./static/code.js");
      const all = document.createElement("pre");
      all.append(...python(text));
      return [all.textContent === text, [...all.children].map((each) => `${each.className} ${each.textContent}`),
        parts("a\\n```py\\nb\\n```\\nc").map(({ text, code }) => [text, code]), shown(text).textContent.length > 0];
    }"""
    assert page.evaluate(tokens, "def f(): # <b>\n  return 'x\\'' + 1") == [
        True,
        ["keyword def", "defined f", "comment # <b>", "keyword return", "string 'x\\''", "literal 1"],
        [["a\n", None], ["b", "py"], ["c", None]],
        True,
    ]
    for hostile in ("'" * 20_000, '"""' + "\\" * 20_000, "`" * 20_000, "```\n" * 5000, "def " * 5000, "é\x00" * 9000):
        assert page.evaluate(tokens, hostile)[0] is True
    other.close()
    process.terminate()
    assert process.wait(120) == 0


@in_a_browser
def test_repeated_events_are_folded_and_unfold(visit: Visit, played: SmallRun) -> None:
    page = visit.open("#/events")
    feed = page.locator(".happened")
    first, second, third = (identity.name for identity in played.identities)
    saved = feed.locator("section > ol > li", has_text="saved a checkpoint in round 20")
    expect(saved).to_have_count(1)
    expect(saved).to_contain_text("3 nodes saved a checkpoint in round 20.")
    expect(saved.locator(".each li")).to_have_count(0)
    saved.locator("button.count").press("Enter")
    expect(saved.locator(".each li")).to_have_count(3)
    expect(saved.locator("button.count")).to_have_attribute("aria-expanded", "true")
    saved.locator("button.count").press("Enter")
    expect(saved.locator(".each li")).to_have_count(0)
    refused = feed.locator("section > ol > li", has_text="refused")
    expect(refused).to_contain_text(
        f"{first} refused a rollout of {second}: it is not signed by that node, 3 times since"
    )
    expect(feed.locator("section > ol > li", has_text="best test score").first).to_contain_text("so far, ")
    expect(feed.locator("li", has_text=f"{third} failed: <script>")).to_be_visible()
    assert page.evaluate("window.hacked") is None and page.locator("main script, main img").count() == 0
    page.get_by_label("Kind").select_option("checkpoint")
    expect(feed.locator("section > ol > li")).to_have_count(1)
    page.locator("#node").select_option(label=third)
    expect(feed).to_contain_text(f"{third} saved a checkpoint in round 20.")
    page.get_by_label("Kind").select_option("rejected")
    expect(feed).to_have_text("Nothing of that kind.")
    page.get_by_label("Kind").select_option("")
    expect(feed).to_contain_text(f"{third} joined with tiny.")
    expect(feed).not_to_contain_text(f"{first} joined")
    latest = page.locator(".feed li", has_text=third)
    expect(latest.first).to_contain_text("right on")
    expect(latest.locator(".box").first).to_be_visible()


@in_a_browser
def test_events_are_grouped_by_their_time(visit: Visit) -> None:
    page = visit.open("#/events")
    headings = """async () => {
      const { when, grouped } = await import("./static/happenings.js");
      const now = new Date(2026, 10, 19, 15, 30).getTime() / 1000;
      const event = (before, said = "x", node = "a") =>
        ({ timestamp: now - before, event: "e", said, node, name: node, about_name: "", rest: "" });
      const events = [event(1), event(2), event(3, "y"), event(70), event(80, "x", "b")];
      return [
        [0, 59, 60, 299, 300, 3599, 3600, 86400, 1e300].map((before) => when(now - before, now)),
        grouped(events, now).map(([heading, all]) => [heading, all.map((each) => each.events.length)]),
      ];
    }"""
    found, groups = page.evaluate(headings)
    assert found[:7] == [
        "Just now", "Just now", "A few minutes ago", "A few minutes ago", "5 minutes ago", "55 minutes ago",
        "Today, 14:00 to 14:59",
    ]  # fmt: skip
    assert "2026" in found[7] and found[8] == "At an unknown time"
    assert groups == [["Just now", [2, 1]], ["A few minutes ago", [2]]]


@in_a_browser
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 390), ("light", 390), ("dark", 800)])
def test_tables_fit_their_screen_and_are_accessible(browser: Browser, watched: str, scheme: str, width: int) -> None:
    visit = Visit(browser, watched, width, scheme)
    for view, ready in (
        ("#/", ".board tbody a"),
        ("#/rollouts", ".rollout[open]"),
        ("#/events", ".happened button.count"),
    ):
        page = visit.open(view)
        page.locator(ready).first.wait_for()
        if view == "#/events":
            page.locator(ready).first.click()
        assert visit.too_wide() <= 0, f"{view} scrolls sideways at {width}"
        assert not visit.barriers(), view
        if view == "#/":
            shown = page.locator(".board th:visible").count()
            assert shown == (5 if width < 704 else 11), "on a phone the main columns only"
    visit.close()
