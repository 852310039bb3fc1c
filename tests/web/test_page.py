"""The page in a real browser, against a swarm that really runs: what a person sees, and what must never happen.

The tests share one swarm of `rl-swarm up` and go through its life in order: it learns, a node dies and comes back,
somebody
stops it from the page, and it is looked at afterwards.
"""

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from subprocess import Popen

import httpx
import pytest
from browsing import CHROMIUM, PATIENCE, Visit, address_of, opened
from msgspec.structs import replace
from playwright.sync_api import Browser, expect
from processes import end, start, state, until
from small_runs import HOSTILE, SmallRun

from benchmarks.lib.paths import rollouts_path
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.rollouts import Publication
from rl_swarm.protocol.wire import seal, unseal
from rl_swarm.storage.files import LocalFiles
from rl_swarm.telemetry.journal import METRICS

pytestmark = pytest.mark.skipif(
    CHROMIUM is None and "CI" not in os.environ, reason="there is no Chromium on this machine"
)
VIEWS = ["#/", "#/node/{node}", "#/rollouts", "#/events", "#/runs"]
TOKEN = "correct-horse-battery"
CHECKPOINTS = 20
SETTINGS = (
    "held_out_questions=8", "held_out_samples=1", f"checkpoint_every={CHECKPOINTS}", "held_out_every=0",
    "temperature=0.9",
)  # fmt: skip


@dataclass
class Real:
    """A swarm on this machine and its dashboard."""

    process: "Popen[str]"
    url: str
    root: Path

    @cached_property
    def identities(self) -> list[Identity]:
        found = [Identity.load(self.root.parent.parent / name) for name in ("swarm.pem", "swarm-2.pem")]
        return sorted(found, key=lambda identity: identity.node)

    @property
    def round(self) -> int:
        return int(state(self.root)["round"])

    def pid(self, node: str) -> int:
        return int(json.loads((self.root / "peers" / f"{node}.json").read_text())["pid"])

    def republish(self, identity: Identity, played: int, text: str) -> None:
        """As a node would that has no good in mind."""
        path, files = rollouts_path(played, 0, identity.node), LocalFiles(self.root)
        told = unseal(files.read(path, 1 << 20), Publication)
        worse = {
            number: [replace(answer, response=text, reward=0.0) if k == 0 else answer for k, answer in enumerate(given)]
            for number, given in told.rollouts.items()
        }  # fmt: skip
        files.write(path, seal(replace(told, rollouts=worse), identity))

    def replay(self, rounds: range) -> None:
        """Lays the rollouts of the first round at the places of coming ones."""
        for identity in self.identities:
            first = (self.root / rollouts_path(0, 0, identity.node)).read_bytes()
            for played in rounds:
                place = self.root / rollouts_path(played, 0, identity.node)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(first)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened() as found:
        yield found


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    here = tmp_path_factory.mktemp("real")
    more = [part for setting in SETTINGS for part in ("--set", setting)]
    process = start(
        here, "up", "--run", "runs/real", "--nodes", "2", "--rounds", "4000", "--local-groups", "2",
        "--external-groups", "2", "--generations", "4", "--port", "18700", *more,
        SWARM_WEB="true", SWARM_WEB_TOKEN=TOKEN,
    )  # fmt: skip
    try:
        made = Real(process, address_of(process), here / "runs" / "real")
        until(lambda: made.round >= 2, 200)
        made.republish(made.identities[0], 0, HOSTILE + "\n" + "So it goes on. " * 200)
        yield made
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait(120)


@pytest.fixture
def visit(browser: Browser, swarm: Real) -> Iterator[Visit]:
    made = Visit(browser, swarm.url)
    yield made
    made.close()


def test_the_overview_shows_where_the_swarm_stands_and_its_curve_moves(visit: Visit) -> None:
    page = visit.open("#/")
    expect(page.locator("#phase")).to_have_text("running")
    expect(page.locator("dl.three")).to_contain_text("of 4000")
    expect(page.locator("dl.facts")).to_contain_text("2 of 2")
    expect(page.locator("figure canvas")).to_have_count(2)
    expect(page.locator("table tbody tr")).to_have_count(2)
    reading = page.locator(".reading").first
    expect(reading).to_have_text(re.compile(r"Round \d+ *Mean of all nodes [01]"))
    latest = reading.locator("span").first
    expect(latest).not_to_have_text(latest.inner_text())
    assert page.title() == "Overview · real"


def test_it_is_used_by_keyboard_while_it_changes(visit: Visit, swarm: Real) -> None:
    page = visit.open("#/")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    link = page.get_by_role("link", name=swarm.identities[1].name)
    link.focus()
    before = page.locator("dl.three dd").first.inner_text()
    page.evaluate("window.drawn = document.querySelector('tbody td')")
    expect(page.locator("dl.three dd").first).not_to_have_text(before)
    until(lambda: page.evaluate("!window.drawn.isConnected"))
    expect(link).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_contain_text(swarm.identities[1].name)


def test_search_finds_a_node_and_leads_to_its_page(visit: Visit, swarm: Real) -> None:
    page = visit.open("#/")
    sought, other = swarm.identities
    page.get_by_label("Search the leaderboard").fill(sought.name.upper())
    expect(page.locator("table tbody tr")).to_have_count(1)
    page.get_by_label("Search the leaderboard").fill(sought.peer_id[-12:])
    expect(page.locator("table tbody tr")).to_have_count(1)
    page.get_by_role("link", name=sought.name).click()
    expect(page.locator("h1")).to_contain_text(sought.name)
    expect(page.locator(".id")).to_have_text(sought.peer_id)
    assert page.url.endswith(f"#/node/{sought.node}"), "its link stays"
    page.reload()
    expect(page.locator("h1")).to_contain_text(sought.name)
    for part in ("Learned from", "Used by"):
        expect(page.get_by_label(part, exact=True)).to_contain_text(other.name)
    page.goto(f"{visit.url}/#/")
    page.get_by_label("Search the leaderboard").fill("nobody")
    expect(page.locator(".empty")).to_have_text("No node matches.")


def test_a_node_shows_its_own_settings_hardware_and_load(visit: Visit, swarm: Real) -> None:
    page = visit.open(f"#/node/{swarm.identities[0].node}")
    expect(page.get_by_label("Hardware", exact=True)).to_contain_text("torch")
    for curve in (
        "Reward while training", "Length of answers", "Entropy", "Gradient norm", "Tokens per second", "Processor",
        "Memory", "Seconds per phase",
    ):  # fmt: skip
        expect(page.locator("figure", has_text=curve).locator("canvas")).to_be_visible()
    page.locator("#settings summary").click()
    row = page.locator("#settings tr", has_text="temperature")
    expect(row).to_contain_text("0.9")
    assert TOKEN not in page.content() and "web_token" not in page.content()
    with page.expect_download() as download:
        page.get_by_label("Save learned from as CSV").click()
    assert Path(download.value.path()).read_text().startswith("node,name,groups")


def test_what_a_model_writes_stays_text(visit: Visit, swarm: Real) -> None:
    page = visit.open(f"#/rollouts?round=0&node={swarm.identities[0].node}")
    answer = page.locator(".rollout[open] .answer pre", has_text="<script>").first
    expect(answer).to_contain_text("<script>window.hacked = true</script>")
    expect(answer).to_contain_text("onerror=")
    assert page.evaluate("window.hacked") is None
    assert page.locator("main script, main img").count() == 0
    swarm.republish(swarm.identities[0], swarm.round - 1, HOSTILE)
    visit.open("#/events")
    expect(page.locator(".feed li").first).to_be_visible()
    assert page.evaluate("window.hacked") is None


def test_a_rollout_opens_with_its_key_and_every_completion(visit: Visit) -> None:
    page = visit.open("#/rollouts")
    expect(page.locator(".rollout")).to_have_count(10)
    expect(page.locator(".rollout[open]")).to_contain_text("4 answers")
    expect(page.locator(".rollout[open]")).to_contain_text("advantage")
    expect(page.locator(".rollout[open] .key")).not_to_contain_text("could not be regenerated")
    page.locator(".rollout summary").nth(1).press("Enter")
    expect(page.locator(".rollout[open]")).to_have_count(2)


def test_it_fits_a_phone_and_is_accessible_in_light_and_dark(browser: Browser, swarm: Real) -> None:
    for scheme, width in (("dark", 360), ("light", 1200)):
        visit = Visit(browser, swarm.url, width, scheme)
        for view in VIEWS:
            page = visit.open(view.format(node=swarm.identities[0].node))
            page.locator("main .card").first.wait_for()
            expect(page).to_have_title(re.compile("real"))
            assert visit.too_wide() <= 0, f"{view} scrolls sideways at {width}"
            assert not visit.barriers(), view
        visit.close()


def test_a_node_that_dies_is_seen_as_dead_within_half_a_minute_and_as_restarted_when_it_is(
    visit: Visit, swarm: Real
) -> None:
    """`up` would start it again at once, so it is held meanwhile."""
    dying = swarm.identities[1]
    page = visit.open("#/")
    expect(page.locator("dl.facts")).to_contain_text("2 of 2")
    until(lambda: swarm.round > CHECKPOINTS and 3 <= swarm.round % CHECKPOINTS <= CHECKPOINTS // 2, 200)
    swarm.process.send_signal(signal.SIGSTOP)
    os.kill(swarm.pid(dying.node), signal.SIGKILL)
    expect(page.locator("dl.facts")).to_contain_text("1 of 2")
    expect(page.locator("tr", has_text=dying.name).locator(".dot")).to_have_attribute("title", "offline")
    swarm.replay(range(swarm.round + 1, swarm.round + 60))
    swarm.process.send_signal(signal.SIGCONT)
    expect(page.locator("dl.facts")).to_contain_text("2 of 2", timeout=2 * PATIENCE)
    page.get_by_role("link", name="Feed").click()
    for kind in ("joined", "offline", "restarted", "skipped", "online", "rejected"):
        page.get_by_label("Kind").select_option(kind)
        expect(page.locator(f".happened .what.{kind}").first).to_be_visible()
    page.get_by_label("Kind").select_option("")
    expect(page.locator(".happened li")).not_to_have_count(0)
    assert not visit.barriers()
    told = httpx.get(f"{swarm.url}/api/nodes/{dying.node}", timeout=60).json()
    assert told["restarts"] == 1 and told["skipped"] == 1 and told["row"]["alive"]


def test_whoever_knows_the_token_stops_the_run_from_the_page(browser: Browser, swarm: Real) -> None:
    assert httpx.post(f"{swarm.url}/api/stop").status_code == 401
    visit = Visit(browser, swarm.url)
    page = visit.open("#/")
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_label("Token").fill("a guess that is wrong")
    page.get_by_role("button", name="Stop the run").click()
    expect(page.get_by_text("Wrong or no token.")).to_be_visible()
    assert not visit.barriers() and swarm.process.poll() is None
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Stop the run").click()
    expect(page.locator("#live")).to_have_text("closed")
    output, _ = swarm.process.communicate(timeout=240)
    assert swarm.process.returncode == 130 and "Stopped at round" in output, output
    assert TOKEN not in (swarm.root / "settings.json").read_text()
    visit.context.close()  # that the server has gone, and that a token was wrong, stands in its console


def test_a_run_that_has_stopped_is_seen_with_all_that_happened(browser: Browser, swarm: Real) -> None:
    if swarm.process.poll() is None:
        swarm.process.terminate()
        swarm.process.wait(120)
    process = start(swarm.root.parent, "watch", "real", "--port", "18750")
    try:
        visit = Visit(browser, address_of(process))
        page = visit.open("#/")
        expect(page.locator("#phase")).to_have_text("stopped")
        expect(page.get_by_role("button", name="Stop")).to_be_hidden()
        page.get_by_role("link", name="Feed").click()
        for kind in ("left", "checkpoint"):
            page.get_by_label("Kind").select_option(kind)
            expect(page.locator(f".happened .what.{kind}")).not_to_have_count(0)
        assert httpx.get(f"{visit.url}/health", timeout=60).json()["status"] == "stale"
        visit.close()
    finally:
        end(process)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    """A run of known numbers, beside another."""
    runs = tmp_path_factory.mktemp("runs")
    calm, other = SmallRun(runs / "calm-run", nodes=3, total=9), SmallRun(runs / "other-run", total=9)
    for _ in range(4):
        calm.play(HOSTILE + "\n" + "So it goes on. " * 200)
        other.play()
    return calm


@pytest.fixture(scope="module")
def watched(played: SmallRun) -> Iterator[str]:
    process = start(played.root.parent, "watch", "calm-run", "--port", "18800")
    yield address_of(process)
    process.terminate()
    assert process.wait(120) == 143


def test_rollouts_fold_and_are_filtered(browser: Browser, watched: str, played: SmallRun) -> None:
    visit = Visit(browser, watched)
    page = visit.open("#/rollouts")
    expect(page.locator(".rollout")).to_have_count(10)
    expect(page.get_by_role("button", name="Show the newest")).to_be_hidden()
    folded = page.locator(".rollout[open] pre.folded").first.bounding_box()
    page.get_by_role("button", name="Show all of completion 2").first.click()
    unfolded = page.locator(".rollout[open] .answer pre").nth(1).bounding_box()
    assert folded and unfolded and unfolded["height"] > 2 * folded["height"]
    page.get_by_role("button", name="Older rollouts").click()
    expect(page.locator(".rollout")).to_have_count(20)
    page.get_by_label("Round").fill("2")
    page.get_by_label("Round").press("Enter")
    expect(page.locator(".rollout")).to_have_count(6)
    page.get_by_label("Minimum reward").fill("0.3")
    page.get_by_label("Minimum reward").press("Enter")
    expect(page.locator(".rollout")).to_have_count(3)
    page.get_by_label("Node").select_option(label=played.identities[0].name)
    expect(page.locator(".rollout")).to_have_count(1)
    page.reload()
    expect(page.locator(".rollout")).to_have_count(1)
    visit.close()


def test_runs_are_laid_over_each_other_and_opened(browser: Browser, watched: str) -> None:
    visit = Visit(browser, watched)
    page = visit.open("#/runs")
    page.get_by_label("Show other-run").check()
    expect(page.locator(".reading .key")).to_have_count(2)
    page.reload()
    expect(page.locator(".reading .key")).to_have_count(2)
    with page.expect_download() as download:
        page.get_by_label("Options of Reward while training").click()
        page.get_by_label("Save Reward while training as CSV").click()
    assert "other-run" in Path(download.value.path()).read_text().splitlines()[0]
    page.get_by_role("link", name="other-run").click()
    expect(page).to_have_title("Overview · other-run")
    expect(page.locator("table tbody tr")).to_have_count(2)
    page.get_by_role("link", name="Runs").click()
    page.get_by_role("link", name="calm-run").click()
    expect(page).to_have_title("Overview · calm-run")
    expect(page.locator("table tbody tr")).to_have_count(3)
    visit.close()


def test_the_page_tells_of_lines_that_cannot_be_read(browser: Browser, watched: str, played: SmallRun) -> None:
    visit = Visit(browser, watched)
    page = visit.open("#/")
    told = page.locator(".notice", has_text="metrics.jsonl: 1 line")
    expect(told).to_be_hidden()
    next(iter(played.journals.values())).logs[METRICS].append(b'{"kind": "round", "rou\n')
    played.play()  # the page looks again when something happens
    expect(told).to_be_visible()
    visit.close()
