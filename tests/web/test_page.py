"""The page in a real browser, against real servers: what a person sees, and what must never happen."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright
from processes import QUICK, end, start
from small_runs import HOSTILE, SmallRun

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None and "CI" not in os.environ, reason="there is no Chromium on this machine"
)
PATIENCE = 60_000  # milliseconds, on a busy machine
expect.set_options(timeout=PATIENCE)
VIEWS = ["#/", "#/node/{node}", "#/rollouts", "#/events", "#/runs"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield found
        found.close()


class Visit:
    """A page that is open, and everything that went wrong or out from it."""

    def __init__(self, browser: Browser, url: str, width: int = 1200, scheme: str = "light") -> None:
        self.url = url
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.troubles: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", lambda m: self.troubles.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))

    def open(self, route: str) -> Page:
        self.page.goto(f"{self.url}/{route}")
        expect(self.page.locator("#live")).to_have_text("live")
        return self.page

    def close(self) -> None:
        self.context.close()
        assert self.troubles == []
        assert self.hosts <= {urlsplit(self.url).netloc}, "nothing is asked of any other host"


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    played = SmallRun(tmp_path_factory.mktemp("runs") / "calm-run", nodes=3, total=9)
    for _ in range(4):
        played.play(HOSTILE + "\n" + "So it goes on. " * 200)
    return played


@pytest.fixture(scope="module")
def url(swarm: SmallRun) -> Iterator[str]:
    process = start(swarm.root.parent, "watch", str(swarm.root), "--port", "18700")
    yield address_of(process)
    process.terminate()
    assert process.wait(30) == 0


@pytest.fixture
def visit(browser: Browser, url: str) -> Iterator[Visit]:
    made = Visit(browser, url)
    yield made
    made.close()


def address_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = next(line for line in process.stdout if "http://" in line)
    return "http://" + line.split("http://")[1].split()[0]


def test_the_overview_shows_where_the_swarm_stands(visit: Visit, swarm: SmallRun) -> None:
    page = visit.open("#/")
    expect(page.locator("#phase")).to_have_text("running")
    expect(page.locator("dl.facts")).to_contain_text("4 of 9")
    expect(page.locator("dl.facts")).to_contain_text("3 of 3")
    expect(page.locator("canvas")).to_have_count(2)
    expect(page.locator(".reading").first).to_contain_text("round 3")
    expect(page.locator("table tbody tr")).to_have_count(3)
    assert page.title() == "Overview · calm-run"


def test_search_finds_a_node_and_leads_to_its_page(visit: Visit, swarm: SmallRun) -> None:
    page = visit.open("#/")
    sought = swarm.identities[1]
    page.get_by_label("Search the leaderboard").fill(sought.name.upper())
    expect(page.locator("table tbody tr")).to_have_count(1)
    page.get_by_role("link", name=sought.name).click()
    expect(page.locator("h1")).to_contain_text(sought.name)
    expect(page.locator(".id")).to_have_text(sought.peer_id)
    expect(page.get_by_label("Who learned from it")).to_contain_text(swarm.identities[0].name)
    expect(page.locator("canvas").first).to_be_visible()
    assert page.url.endswith(f"#/node/{sought.node}"), "its link stays"
    page.reload()
    expect(page.locator("h1")).to_contain_text(sought.name)
    page.goto(f"{visit.url}/#/")
    page.get_by_label("Search the leaderboard").fill("nobody")
    expect(page.locator(".empty")).to_have_text("No node has that name.")


def test_what_a_model_writes_stays_text(visit: Visit) -> None:
    page = visit.open("#/rollouts")
    answer = page.locator(".rollout[open] .answer pre").nth(1)
    expect(answer).to_contain_text("<script>window.hacked = true</script>")
    expect(answer).to_contain_text("onerror=")
    assert page.evaluate("window.hacked") is None
    assert page.locator("main script, main img").count() == 0
    visit.open("#/events")
    expect(page.locator(".feed li")).to_have_count(12)
    assert page.evaluate("window.hacked") is None


def test_rollouts_open_fold_and_are_filtered(visit: Visit, swarm: SmallRun) -> None:
    page = visit.open("#/rollouts")
    expect(page.locator(".rollout")).to_have_count(10)
    expect(page.locator(".rollout[open]")).to_have_count(1)
    expect(page.locator(".rollout[open]")).to_contain_text("advantage")
    expect(page.get_by_role("button", name="Show the newest")).to_be_hidden()
    long = page.locator(".rollout[open] pre.folded").first
    folded = long.bounding_box()
    page.get_by_role("button", name="Show all of completion 2").first.click()
    unfolded = page.locator(".rollout[open] .answer pre").nth(1).bounding_box()
    assert folded and unfolded and unfolded["height"] > 2 * folded["height"]
    page.locator(".rollout summary").nth(1).press("Enter")
    expect(page.locator(".rollout[open]")).to_have_count(2)
    page.get_by_role("button", name="Older rollouts").click()
    expect(page.locator(".rollout")).to_have_count(20)
    page.get_by_label("Round").fill("2")
    page.get_by_label("Round").press("Enter")
    expect(page.locator(".rollout")).to_have_count(6)
    page.get_by_label("Reward from").fill("0.3")
    page.get_by_label("Reward from").press("Enter")
    expect(page.locator(".rollout")).to_have_count(3)
    page.get_by_label("Node").select_option(label=swarm.identities[0].name)
    expect(page.locator(".rollout")).to_have_count(1)
    page.reload()
    expect(page.locator(".rollout")).to_have_count(1)


def test_it_fits_a_phone_and_is_accessible_in_light_and_dark(
    browser: Browser, url: str, swarm: SmallRun
) -> None:
    for scheme, width in (("dark", 360), ("light", 1200)):
        visit = Visit(browser, url, width, scheme)
        for view in VIEWS:
            page = visit.open(view.format(node=swarm.names[0]))
            page.locator("main .card").first.wait_for()
            expect(page).to_have_title(re.compile("calm-run"))
            wide = page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert wide <= 0, f"{view} scrolls sideways at {width}"
            found = [
                v for v in Axe().run(page).response["violations"] if v["impact"] in ("serious", "critical")
            ]
            assert not found, [(v["id"], [n["html"] for n in v["nodes"]]) for v in found]
        visit.close()


def test_tables_are_saved_from_the_page(visit: Visit) -> None:
    page = visit.open("#/")
    with page.expect_download() as download:
        page.get_by_label("Save the leaderboard as CSV").click()
    assert download.value.suggested_filename == "leaderboard.csv"
    assert Path(download.value.path()).read_text().startswith("rank,node,name")


def test_a_node_that_dies_is_seen_as_dead_and_a_round_as_played(browser: Browser, tmp_path: Path) -> None:
    """Without reloading. The node is a process that this test ends."""
    sleeper = subprocess.Popen(["sleep", "600"])
    run = SmallRun(tmp_path / "run", nodes=2, total=9, pid=os.getpid())
    run.join(run.identities[1], sleeper.pid)
    run.tick()
    process = start(tmp_path, "watch", "run", "--port", "18800")
    try:
        visit = Visit(browser, address_of(process))
        page = visit.open("#/")
        expect(page.locator("dl.facts")).to_contain_text("2 of 2")
        run.play()
        expect(page.locator(".reading").first).to_contain_text("round 0")
        run.play()
        expect(page.locator(".reading").first).to_contain_text("round 1")
        sleeper.kill()
        sleeper.wait()
        expect(page.locator("dl.facts")).to_contain_text("1 of 2", timeout=30_000)
        page.get_by_role("link", name="Feed").click()
        expect(page.get_by_label("Events", exact=True)).to_contain_text("gone")
        visit.close()
    finally:
        sleeper.kill()
        end(process)


def test_the_curve_of_a_real_swarm_moves(browser: Browser, tmp_path: Path) -> None:
    process = start(tmp_path, "up", "--run", "r", "--nodes", "2", "--rounds", "400", "--port", "18900", *QUICK, SWARM_WEB="true")  # fmt: skip
    try:
        visit = Visit(browser, address_of(process))
        page = visit.open("#/")
        for played in (r"round \d", r"round ([2-9]|\d\d)"):
            expect(page.locator(".reading").first).to_have_text(re.compile(played), timeout=2 * PATIENCE)
        page.get_by_role("link", name="Rollouts").click()
        expect(page.locator(".rollout[open] .answer")).to_have_count(8)
        visit.close()
    finally:
        process.terminate()
        process.wait(60)
