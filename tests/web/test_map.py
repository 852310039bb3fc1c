"""The map of the swarm in a real browser, served by the real server from a run of known numbers."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from browsing import CHROMIUM, Visit, address_of, opened
from playwright.sync_api import Browser, Page, expect
from processes import QUICK, end, start, until
from small_runs import SmallRun

pytestmark = pytest.mark.skipif(
    CHROMIUM is None and "CI" not in os.environ, reason="there is no Chromium on this machine"
)
ROUNDS = 6
COUNT_FRAMES = """
window.frames = 0;
const asked = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (drawn) => asked((now) => { window.frames += 1; drawn(now); });
"""
HIDE = """(hidden) => {
  Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
COLORS = """(places) => {
  const canvas = document.querySelector(".map-stage canvas"), scale = canvas.width / canvas.clientWidth;
  const pen = canvas.getContext("2d");
  return places.map(([x, y]) => [...pen.getImageData(x * scale, (y - 13) * scale, 1, 1).data].join());
}"""


@dataclass
class Watched:
    """A run and the dashboard that shows it."""

    run: SmallRun
    url: str

    def play(self) -> None:
        """Play a round. Every round is better than the one before."""
        self.run.play(more=0.1 * self.run.state.round)

    def map(self) -> Any:
        return httpx.get(f"{self.url}/api/map", timeout=60).json()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened() as found:
        yield found


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    run = SmallRun(tmp_path / "runs" / "mapped", nodes=3, total=40)
    process = start(run.root.parent, "watch", "mapped", "--port", "18900")
    try:
        made = Watched(run, address_of(process))
        for _ in range(ROUNDS):
            made.play()
        until(lambda: made.map()["round"] == ROUNDS)
        yield made
    finally:
        end(process)


@pytest.fixture
def visit(browser: Browser, watched: Watched) -> Iterator[Visit]:
    made = Visit(browser, watched.url)
    made.page.add_init_script(COUNT_FRAMES)
    yield made
    made.close()


def shown(visit: Visit) -> Page:
    """Open the overview, and wait until the map shows the run."""
    page = visit.open("#/")
    expect(page.locator(".map-time output")).to_have_text(re.compile(r"now, round \d+"))
    expect(page.locator(".map-stage canvas").first).to_have_attribute("aria-label", re.compile(r"Nodes: [1-9]"))
    return page


def until_still(page: Page) -> None:
    """Wait until no frame is drawn for a while."""
    before = -1
    while before != (before := page.evaluate("window.frames")):
        page.wait_for_timeout(500)


def places(page: Page) -> list[tuple[float, float]]:
    """Return where three nodes are: on a circle, the first one on top."""
    box = page.locator(".map-stage").bounding_box()
    assert box is not None
    middle, side = box["width"] / 2, min(box["width"] / 2 - 64, 330)
    return [
        (middle, 19 * 2 + 8),
        (middle + side, box["height"] - 19 * 1.5 - 42),
        (middle - side, box["height"] - 19 * 1.5 - 42),
    ]


def test_an_edge_says_what_the_logs_say(watched: Watched) -> None:
    told, lines = watched.map(), Counter[tuple[str, str, int]]()
    for identity in watched.run.identities:
        log = (watched.run.root / "logs" / identity.node / "metrics.jsonl").read_text().splitlines()
        for line in filter(lambda line: line["kind"] == "round", map(json.loads, log)):
            for author, groups in line["external_by_peer"].items():
                lines[identity.peer_id, author, line["round"]] += groups
    peers = {identity.node: identity.peer_id for identity in watched.run.identities}
    ids = [peers[node] for node in told["nodes"]["node"]]
    shown = Counter[tuple[str, str, int]]()
    for each in told["rounds"]:
        for learner, author, groups in zip(*[iter(each["edges"])] * 3, strict=True):
            shown[ids[learner], ids[author], each["round"]] += groups
    assert shown == lines and len(shown) == 3 * 2 * ROUNDS
    replayed = httpx.get(f"{watched.url}/api/map/replay", timeout=60).json()
    assert [len(frame["edges"]) for frame in replayed["frames"]] == [18] * ROUNDS
    assert replayed["frames"][0]["scores"] != replayed["frames"][-1]["scores"]


def test_a_node_tells_who_taught_it_and_opens_by_a_click(visit: Visit, watched: Watched) -> None:
    page = shown(visit)
    until_still(page)
    names = watched.map()["nodes"]["name"]
    page.locator(".map-stage canvas").last.hover(position=dict(zip("xy", places(page)[0], strict=True)))
    card = page.locator(".map-card")
    for text in (names[0], "Learned from", "Taught", f"In rounds 1 to {ROUNDS}"):
        expect(card).to_contain_text(text)
    for other in names[1:]:
        expect(card.locator("li", has_text=other)).to_have_count(2)
        expect(card.locator("li", has_text=other).first).to_contain_text(str(ROUNDS))
    page.mouse.move(2, 2)
    expect(card).to_be_hidden()
    page.locator(".map-stage canvas").last.click(position=dict(zip("xy", places(page)[1], strict=True)))
    expect(page.locator("h1")).to_contain_text(names[1])


def test_the_keyboard_walks_through_the_nodes(visit: Visit, watched: Watched) -> None:
    page = shown(visit)
    names = watched.map()["nodes"]["name"]
    link = page.get_by_role("link", name="Walk through the nodes")
    link.focus()
    card = page.locator(".map-card strong")
    first = card.inner_text()
    assert first in names
    seen = {first}
    for key in ("ArrowRight", "ArrowLeft", "ArrowLeft", "ArrowUp", "ArrowRight"):
        page.keyboard.press(key)
        seen.add(card.inner_text())
    assert seen == set(names)
    last = card.inner_text()
    expect(page.locator(".map [role=status]")).to_contain_text(f"{last}: score")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_contain_text(last)


def test_a_slider_replays_the_run_and_live_goes_back(visit: Visit, watched: Watched) -> None:
    page = shown(visit)
    until_still(page)
    now = page.evaluate(COLORS, places(page))
    slider, said = page.get_by_label("Round that the map shows"), page.locator(".map-time output")
    slider.fill("0")
    expect(said).to_have_text("round 1")
    until_still(page)
    begin = page.evaluate(COLORS, places(page))
    assert set(begin).isdisjoint(now), "the scores of the first round have other colours"
    page.locator(".map-stage canvas").last.hover(position=dict(zip("xy", places(page)[0], strict=True)))
    number = watched.run.names.index(watched.map()["nodes"]["node"][0])
    expect(page.locator(".map-card")).to_contain_text(f"Score 0.2{5 + number}0")
    expect(page.locator(".map-card")).to_contain_text("In round 1")
    watched.play()  # the past stays in view while the swarm goes on
    expect(slider).to_have_attribute("max", str(ROUNDS + 1))
    expect(said).to_have_text("round 1")
    page.mouse.move(2, 2)
    live = page.get_by_role("button", name="Live", exact=True)
    expect(live).to_have_attribute("aria-pressed", "false")
    live.click()
    expect(said).to_have_text(f"now, round {ROUNDS + 2}")
    expect(live).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="Play").click()
    expect(said).to_have_text(re.compile(r"^round [1-9]"))
    page.get_by_role("button", name="Pause").click()
    stopped = said.inner_text()
    page.wait_for_timeout(1500)
    assert said.inner_text() == stopped
    page.get_by_role("button", name="Play").click()
    expect(said).to_have_text(f"now, round {ROUNDS + 2}")  # after the last round it is live again


def test_it_draws_when_something_changes_and_else_never(visit: Visit, watched: Watched) -> None:
    page = shown(visit)
    until_still(page)
    before = page.evaluate("window.frames")
    page.wait_for_timeout(3000)
    assert page.evaluate("window.frames") == before
    watched.play()
    expect(page.locator(".map-time output")).to_have_text(f"now, round {ROUNDS + 2}")
    until(lambda: page.evaluate("window.frames") > before + 5)  # sparks fly
    until_still(page)
    page.evaluate(HIDE, True)
    before = page.evaluate("window.frames")
    watched.play()
    page.wait_for_timeout(4000)
    assert page.evaluate("window.frames") == before, "nobody sees it"
    page.evaluate(HIDE, False)
    expect(page.locator(".map-time output")).to_have_text(f"now, round {ROUNDS + 3}")
    assert page.evaluate("window.frames") > before
    page.set_viewport_size({"width": 1200, "height": 300})
    page.evaluate("scrollTo(0, document.body.scrollHeight)")  # the map is above what can be seen
    until_still(page)
    before = page.evaluate("window.frames")
    watched.play()
    expect(page.locator(".map-time output")).to_have_text(f"now, round {ROUNDS + 4}")
    page.wait_for_timeout(1500)
    assert page.evaluate("window.frames") == before, "it is out of sight"


def test_without_motion_it_shows_states(browser: Browser, watched: Watched) -> None:
    visit = Visit(browser, watched.url)
    visit.page.emulate_media(reduced_motion="reduce")
    visit.page.add_init_script(COUNT_FRAMES)
    page = shown(visit)
    until_still(page)
    before = page.evaluate("window.frames")
    watched.play()
    expect(page.locator(".map-time output")).to_have_text(f"now, round {ROUNDS + 2}")
    until(lambda: page.evaluate("window.frames") > before)
    until_still(page)
    assert page.evaluate("window.frames") < before + 10, "nothing moves, the colours and edges are drawn at once"
    visit.close()


def test_it_fits_a_phone_and_is_accessible_in_light_and_dark(browser: Browser, watched: Watched) -> None:
    for scheme, width in (("dark", 390), ("light", 1200)):
        visit = Visit(browser, watched.url, width, scheme)
        page = shown(visit)
        page.get_by_role("link", name="Walk through the nodes").focus()
        expect(page.locator(".map-card")).to_be_visible()
        assert visit.too_wide() <= 0
        assert not visit.barriers()
        visit.close()


def test_nodes_of_a_real_swarm_tell_their_phases(browser: Browser, tmp_path: Path) -> None:
    process = start(
        tmp_path, "up", "--run", "runs/real", "--nodes", "3", "--rounds", "4000", *QUICK, "--port", "18950",
        SWARM_WEB="true",
    )  # fmt: skip
    try:
        visit = Visit(browser, address_of(process))
        seen = set[str]()

        def phases_and_edges() -> bool:
            told = httpx.get(f"{visit.url}/api/map", timeout=60).json()
            seen.update(told["nodes"]["phase"])
            return len(seen & {"sampling", "scoring", "collecting", "training"}) > 1 and len(told["rounds"]) > 2

        until(phases_and_edges)
        page = shown(visit)
        expect(page.locator(".map-stage canvas").first).to_have_attribute("aria-label", re.compile("Nodes: 3"))
        page.locator(".map-stage canvas").last.hover(position=dict(zip("xy", places(page)[0], strict=True)))
        expect(page.locator(".map-card")).to_contain_text("Learned from")
        visit.close()
    finally:
        end(process)
