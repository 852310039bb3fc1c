"""The leaderboard, the rollouts and the feed in a real browser: order, pins, thousands of rows, answers, sentences."""

import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browsing import CHROMIUM, Visit, address_of, opened
from playwright.sync_api import Browser, Locator, Page, expect
from processes import start, until
from small_runs import SmallRun
from starlette.testclient import TestClient
from varied_runs import coding_run, varied_run

from benchmarks.lib.many_nodes import ManyNodes
from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.web.api import create_app

pytestmark = pytest.mark.skipif(
    CHROMIUM is None and "CI" not in os.environ, reason="there is no Chromium on this machine"
)
LOCAL = "http://localhost"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    return varied_run(tmp_path_factory.mktemp("tables") / "calm-run")


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
    assert process.wait(120) == 143


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
    page.evaluate("localStorage.setItem('rl-swarm.pins', '{\"not\": [\"a list\"]}')")
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
    assert process.wait(120) == 143


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


def test_code_is_shown_as_code(visit: Visit, browser: Browser, tmp_path: Path) -> None:
    page = visit.open("#/rollouts?round=24&min_reward=0&max_reward=0")
    wordy = page.locator(".rollout .answer", has_text="That is it.")
    expect(page.locator(".rollout summary", has_text="0 of 2 right")).to_have_count(5)
    page.evaluate("() => document.querySelectorAll('.rollout').forEach((each) => { each.open = true; })")
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
    assert process.wait(120) == 143


def test_repeated_events_are_folded_and_unfold(visit: Visit, played: SmallRun) -> None:
    page = visit.open("#/events")
    feed = page.locator(".happened")
    first, second, third = (identity.name for identity in played.identities)
    saved = feed.locator("section > ol > li", has_text="saved a checkpoint in round 21")
    expect(saved).to_have_count(1)
    expect(saved).to_contain_text("3 nodes saved a checkpoint in round 21.")
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
    expect(feed).to_contain_text(f"{third} saved a checkpoint in round 21.")
    page.get_by_label("Kind").select_option("rejected")
    expect(feed).to_have_text("Nothing of that kind.")
    page.get_by_label("Kind").select_option("")
    expect(feed).to_contain_text(f"{third} joined with tiny.")
    expect(feed).not_to_contain_text(f"{first} joined")
    latest = page.locator(".feed li", has_text=third)
    expect(latest.first).to_contain_text("right on")
    expect(latest.locator(".box").first).to_be_visible()


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
