"""The charts of the page in a real browser: zoom, smoothing, legend, crosshair, full screen, pictures and tables."""

import csv
import io
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from browsing import Visit, address_of, opened
from playwright.sync_api import Browser, Locator, Page, expect
from processes import end, start
from small_runs import SmallRun
from test_page import pytestmark as needs_chromium

from benchmarks.lib.synthetic_run import History
from rl_swarm.monitor import snapshot
from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.monitor.runs import Runs
from rl_swarm.node import run_settings
from rl_swarm.node.settings import NodeSettings

pytestmark = needs_chromium
FEW, CROWD, PLAYED = 4, 20, 120
PNG = b"\x89PNG\r\n\x1a\n"


@dataclass
class Charts:
    """A dashboard of one run, and how its rounds go on."""

    url: str
    history: History

    def play(self) -> None:
        for node in range(len(self.history.peers)):
            self.history.play(node)
        self.history.end_round()

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.url}/api/{path}", timeout=60).json()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened() as found:
        yield found


def watching(root: Path, name: str, nodes: int, port: int) -> Iterator[Charts]:
    history = History(root / name, nodes, PLAYED)
    process = start(root, "watch", name, "--port", str(port))
    try:
        yield Charts(address_of(process), history)
    finally:
        end(process)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Charts]:
    yield from watching(tmp_path_factory.mktemp("few"), "few", FEW, 18900)


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Charts]:
    yield from watching(tmp_path_factory.mktemp("crowd"), "crowd", CROWD, 18920)


@pytest.fixture
def visit(browser: Browser, few: Charts) -> Iterator[Visit]:
    made = Visit(browser, few.url)
    yield made
    made.close()


def figure(page: Page, title: str) -> Locator:
    return page.locator("figure", has_text=title)


def opened_at(visit: Visit, route: str = "#/", title: str = "Reward while training") -> tuple[Page, Locator]:
    page = visit.open(route)
    shown = figure(page, title)
    expect(shown.locator("canvas")).to_be_visible()
    return page, shown


def scale(chart: Locator, name: str = "x") -> list[float]:
    found: list[float] = chart.evaluate(
        "(figure, name) => [figure.chart.plot.scales[name].min, figure.chart.plot.scales[name].max]", name
    )
    return found


def values(chart: Locator, entry: int = 0, what: str = "values") -> list[float]:
    found: list[float] = chart.evaluate("(figure, [k, what]) => figure.chart.entries[k][what]", [entry, what])
    return found


def drag(page: Page, chart: Locator, begin: float, stop: float) -> None:
    """Drag over a part of the plot."""
    chart.scroll_into_view_if_needed()
    box = chart.locator(".u-over").bounding_box()
    assert box
    height = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + begin * box["width"], height)
    page.mouse.down()
    page.mouse.move(box["x"] + stop * box["width"], height, steps=5)
    page.mouse.up()


def options(chart: Locator) -> Locator:
    chart.locator(".options summary").click()
    return chart.locator(".options .panel")


def test_a_zoom_survives_new_rounds_is_followed_by_the_other_chart_and_is_reset(visit: Visit, few: Charts) -> None:
    page, reward = opened_at(visit)
    score = figure(page, "Test score")
    expect(reward.locator(".reset")).to_be_hidden()
    drag(page, reward, 0.25, 0.5)
    expect(reward.locator(".reset")).to_be_visible()
    expect(score.locator(".reset")).to_be_visible()
    zoomed, before = scale(reward), reward.evaluate("figure => figure.chart.data.rounds.length")
    assert 20 < zoomed[0] < 40 < 50 < zoomed[1] < 70 and scale(score) == zoomed
    few.play()
    page.wait_for_function("n => document.querySelector('figure').chart.data.rounds.length > n", arg=before)
    assert scale(reward) == zoomed == scale(score)
    score.locator(".reset").click()
    expect(reward.locator(".reset")).to_be_hidden()
    assert scale(reward) == [1, reward.evaluate("figure => figure.chart.data.rounds.at(-1)")]
    drag(page, reward, 0.25, 0.5)
    expect(reward.locator(".reset")).to_be_visible()
    reward.locator(".u-over").dblclick()
    expect(reward.locator(".reset")).to_be_hidden()
    drag(page, reward, 0.25, 0.5)
    page.get_by_role("link", name="Runs").click()
    page.get_by_role("link", name="Overview").click()
    expect(reward.locator("canvas")).to_be_visible()
    expect(reward.locator(".reset")).to_be_hidden()


def test_rounds_count_from_one_and_scores_from_before_training(visit: Visit, few: Charts) -> None:
    page, reward = opened_at(visit)
    assert reward.evaluate("figure => figure.chart.data.rounds.slice(0, 3)") == [1, 2, 3]
    assert few.get("curves?metric=reward_local")["rounds"][:3] == [0, 1, 2], "the API counts from 0"
    played = few.get("overview")["round"]
    expect(page.locator("dl.three dd").first).to_have_text(f"{played + 1} of {PLAYED + 1000}")
    expect(reward.locator(".at")).to_have_text(f"Round {played}")
    score = figure(page, "Test score")
    expect(score.locator(".at")).to_have_text("After round 100")
    score.locator(".plot").press("ArrowLeft")
    score.locator(".plot").press("ArrowLeft")
    expect(score.locator(".at")).to_have_text("Before training")
    page = visit.open("#/rollouts?round=4")
    expect(page.get_by_label("Round")).to_have_value("5")


def test_the_smoothed_end_is_the_tile_and_smoothing_is_a_mean_of_the_last_rounds(visit: Visit, few: Charts) -> None:
    page, reward = opened_at(visit)
    about, lines = few.get("overview"), few.get("curves?metric=reward_local")
    assert values(reward)[-1] == pytest.approx(about["reward"], abs=1e-9)
    tile = page.locator(".fact", has=page.get_by_text("Reward", exact=True)).locator("dd").first
    expect(reward.locator(".key.mean .value")).to_have_text(tile.text_content() or "")
    for rounds in (5, 1, 100):
        options(reward).get_by_label("Smoothing").select_option(str(rounds))
        reward.locator(".options summary").click()
        raw = lines["mean"]
        expected = [statistics.fmean(raw[max(0, k + 1 - rounds) : k + 1]) for k in range(len(raw))]
        assert values(reward) == pytest.approx(expected)
        behind = reward.evaluate("figure => figure.chart.parts.filter(part => part.part === 'raw').length")
        assert behind == (rounds > 1), "the raw line is behind"
    page.reload()
    expect(reward.locator("canvas")).to_be_visible()
    expect(options(reward).get_by_label("Smoothing")).to_have_value("100")
    assert "?" not in page.url, "a link shows others what they chose themselves"


def test_a_tile_of_a_swarm_elsewhere_is_the_end_of_its_curve_too(tmp_path: Path) -> None:
    from dataclasses import replace

    from rl_swarm.network.address import open_address

    run = SmallRun(tmp_path / "run", nodes=2, total=9)
    for _ in range(3):
        run.play()
    follower = Follower(RunView(replace(open_address(run.root), is_url=True, here=tmp_path / "here")))
    follower.poll()
    lines = snapshot.lines(follower, "reward_local")
    assert snapshot.overview(follower).reward == lines.recent == lines.mean[-1] == 0.25


def test_the_tile_is_the_end_of_the_curve_while_some_nodes_are_a_round_behind(visit: Visit, few: Charts) -> None:
    page, reward = opened_at(visit)
    before = few.get("curves")["rounds"]
    few.history.play(0)
    page.wait_for_function("n => document.querySelector('figure').chart.data.rounds.length > n", arg=len(before))
    lines, about = few.get("curves"), few.get("overview")
    assert [line["values"][-1] for line in lines["lines"]].count(None) == FEW - 1
    assert values(reward)[-1] == pytest.approx(about["reward"], abs=1e-12)
    own = [[value for value in line["values"] if value is not None][-20:] for line in lines["lines"]]
    assert about["reward"] == pytest.approx(statistics.fmean(map(statistics.fmean, own)))
    for node in range(1, FEW):
        few.history.play(node)
    few.history.end_round()


def test_an_axis_is_logarithmic_where_all_values_are_positive(visit: Visit, few: Charts) -> None:
    page, reward = opened_at(visit)
    assert scale(reward, "y")[0] == 0, "shares begin at 0"
    options(reward).get_by_label("Logarithmic axis").check()
    assert reward.evaluate("figure => figure.chart.plot.scales.y.distr") == 3 and scale(reward, "y")[0] > 0
    page.keyboard.press("Escape")
    expect(reward.locator(".options .panel")).to_be_hidden()
    page.reload()
    expect(reward.locator("canvas")).to_be_visible()
    assert reward.evaluate("figure => figure.chart.plot.scales.y.distr") == 3
    _, distance = opened_at(visit, f"#/node/{few.history.peers[0].node}", "Distance from the first model")
    expect(options(distance).get_by_label("Logarithmic axis")).to_be_disabled()
    expect(distance.get_by_text("Only where all values are above 0.")).to_be_visible()


def test_lines_are_switched_off_and_on_by_mouse_and_keyboard(visit: Visit, few: Charts) -> None:
    page, reward = opened_at(visit)
    named = reward.locator(".key.line")
    expect(named).to_have_count(FEW)
    assert {row["name"] for row in few.get("nodes")["nodes"]} == {
        reward.evaluate("(figure, k) => figure.chart.entries[k].name", k + 3) for k in range(FEW)
    }
    drawn = reward.evaluate("figure => figure.chart.parts.length")
    named.first.click()
    expect(named.first).to_have_attribute("aria-pressed", "false")
    assert reward.evaluate("figure => figure.chart.parts.length") == drawn - 1
    named.nth(1).focus()
    page.keyboard.press("Space")
    expect(named.nth(1)).to_have_attribute("aria-pressed", "false")
    expect(named.nth(1)).to_be_focused()
    page.reload()
    expect(named.first).to_have_attribute("aria-pressed", "false")
    named.first.click()
    named.nth(1).click()
    assert reward.evaluate("figure => figure.chart.parts.length") == drawn


def test_one_crosshair_runs_through_all_charts_of_a_page(visit: Visit, few: Charts) -> None:
    page, reward = opened_at(visit, f"#/node/{few.history.peers[0].node}")
    entropy = figure(page, "Entropy")
    expect(entropy.locator("canvas")).to_be_visible()
    reward.scroll_into_view_if_needed()
    box = reward.locator(".u-over").bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 3, box["y"] + 30)
    here = reward.locator(".at").inner_text()
    assert here not in (f"Round {PLAYED}", "Latest")
    expect(entropy.locator(".at")).to_have_text(here)
    played = int(here.split()[1]) - 1
    told = few.get(f"nodes/{few.history.peers[0].node}/curves?metric=entropy")["metrics"]["entropy"]
    mean = statistics.fmean(told[max(0, played - 19) : played + 1])
    expect(entropy.locator(".key .value")).to_have_text(f"{mean:.3g}")
    page.mouse.move(5, 5)
    expect(entropy.locator(".at")).not_to_have_text(here)


def test_a_chart_is_zoomed_by_keyboard_and_by_two_fingers(visit: Visit) -> None:
    _, reward = opened_at(visit)
    plot, whole = reward.locator(".plot"), scale(reward)
    plot.press("+")
    first, last = scale(reward)
    assert last - first == pytest.approx((whole[1] - whole[0]) / 2) and first > whole[0]
    plot.press("-")
    expect(reward.locator(".reset")).to_be_hidden()
    assert scale(reward) == whole
    plot.press("+")
    plot.press("Escape")
    assert scale(reward) == whole
    stretched = reward.evaluate("""async figure => {
        const { plot, place } = figure.chart;
        const box = plot.over.getBoundingClientRect();
        const tell = (kind, pointerId, share) => place.dispatchEvent(new PointerEvent(kind, {
            pointerId, pointerType: 'touch', clientX: box.x + share * box.width, clientY: box.y + 9, bubbles: true }));
        tell('pointerdown', 1, 0.4);
        tell('pointerdown', 2, 0.6);
        const held = [0.4, 0.6].map(share => plot.posToVal(share * box.width, 'x'));
        tell('pointermove', 1, 0.2);
        tell('pointermove', 2, 0.8);
        await new Promise(requestAnimationFrame);
        const under = [0.2, 0.8].map(share => figure.chart.plot.posToVal(share * box.width, 'x'));
        tell('pointerup', 1, 0.2);
        tell('pointerup', 2, 0.8);
        return { held, under };
    }""")
    assert stretched["under"] == pytest.approx(stretched["held"], abs=0.5), "what a finger holds stays below it"
    expect(reward.locator(".reset")).to_be_visible()


def test_all_curves_of_a_node_are_smoothed_together(visit: Visit, few: Charts) -> None:
    node = few.history.peers[0].node
    page, reward = opened_at(visit, f"#/node/{node}")
    entropy = figure(page, "Entropy")
    tile = page.locator(".fact", has=page.get_by_text("Reward", exact=True)).locator("dd").first
    expect(reward.locator(".key", has_text="its own answers").locator(".value")).to_have_text(tile.text_content() or "")
    page.get_by_label("Smoothing of all curves").select_option("5")
    told = few.get(f"nodes/{node}/curves?metric=entropy")["metrics"]["entropy"]
    assert values(entropy)[-1] == pytest.approx(statistics.fmean(told[-5:]))
    assert reward.evaluate("figure => figure.chart.parts.filter(part => part.part === 'raw').length") == 3
    mean = few.get("curves?metric=reward_local")["mean"]
    assert values(reward, 2)[-1] == pytest.approx(statistics.fmean(mean[-5:])), "that of all nodes, to compare with"


def test_a_chart_fills_the_screen(visit: Visit) -> None:
    page, reward = opened_at(visit)
    height = reward.evaluate("figure => figure.chart.plot.height")
    reward.get_by_label("Full screen: Reward while training").click()
    page.wait_for_function("document.fullscreenElement === document.querySelector('figure')")
    page.wait_for_function("n => document.querySelector('figure').chart.plot.height > 1.5 * n", arg=height)
    reward.get_by_label("Full screen: Reward while training").click()
    page.wait_for_function("document.fullscreenElement === null")
    page.wait_for_function("n => document.querySelector('figure').chart.plot.height === n", arg=height)


def test_a_chart_is_saved_as_picture_and_as_table(visit: Visit) -> None:
    page, reward = opened_at(visit)
    options(reward)
    with page.expect_download() as download:
        reward.get_by_label("Save Reward while training as PNG").click()
    assert download.value.suggested_filename == "reward-while-training.png"
    assert Path(download.value.path()).read_bytes().startswith(PNG)
    with page.expect_download() as download:
        reward.get_by_label("Save Reward while training as CSV").click()
    rows = list(csv.reader(io.StringIO(Path(download.value.path()).read_text())))
    assert rows[0][:5] == ["round", "mean", "10th percentile", "median", "90th percentile"]
    assert {len(row) for row in rows} == {5 + FEW} and rows[1][0] == "0"


def test_the_band_holds_all_nodes_not_the_best(crowd: Charts) -> None:
    lines = crowd.get("curves?metric=reward_local&limit=200")
    best = crowd.get("curves?metric=reward_local&limit=2")
    assert (lines["nodes"], best["nodes"], len(best["lines"])) == (CROWD, CROWD, 2)
    assert [best[name] for name in ("mean", "low", "median", "high")] == [
        lines[name] for name in ("mean", "low", "median", "high")
    ]
    for k in (0, 7, PLAYED - 1):
        column = [line["values"][k] for line in lines["lines"]]
        tenths = statistics.quantiles(column, n=10, method="inclusive")
        assert lines["low"][k] == pytest.approx(tenths[0], rel=1e-5)
        assert lines["high"][k] == pytest.approx(tenths[8], rel=1e-5)
        assert lines["median"][k] == pytest.approx(statistics.median(column), rel=1e-5)
        assert lines["mean"][k] == pytest.approx(statistics.fmean(column), rel=1e-5)
    last = crowd.get("nodes?limit=100")["nodes"][-1]
    pinned = crowd.get(f"curves?limit=0&node={last['node']}&node=nobody")
    assert [line["name"] for line in pinned["lines"]] == [last["name"]]
    assert httpx.get(f"{crowd.url}/api/curves?{'&'.join(['node=x'] * 13)}").status_code == 422


def test_of_a_crowd_the_band_the_mean_and_pinned_nodes_are_drawn(browser: Browser, crowd: Charts) -> None:
    visit = Visit(browser, crowd.url)
    page, reward = opened_at(visit)
    expect(reward.locator(".key.mean")).to_contain_text("Mean of all nodes")
    expect(reward.locator(".key.band")).to_contain_text("10th–90th percentile of all nodes")
    expect(reward.locator(".key.line")).to_have_count(0)
    told = crowd.get("curves?metric=reward_local&limit=0")
    assert values(reward, 1, "low")[0] == told["low"][0] and values(reward, 1, "high")[0] == told["high"][0]
    last = crowd.get("nodes?limit=100")["nodes"][-1]
    toggle = "node => import('./static/pins.js').then((pins) => pins.toggle(node))"
    assert page.evaluate(toggle, last["node"]) is True
    expect(reward.locator(".key.line")).to_have_text([f"{last['name']} {values(reward, 3)[-1]:.3f}"])
    page.reload()
    expect(reward.locator(".key.line")).to_contain_text(last["name"])
    assert page.evaluate(toggle, last["node"]) is False
    expect(reward.locator(".key.line")).to_have_count(0)
    visit.close()


def test_charts_are_accessible_and_fit_in_light_and_dark(browser: Browser, few: Charts) -> None:
    for scheme, width in (("dark", 390), ("light", 1200)):
        visit = Visit(browser, few.url, width, scheme)
        for route in ("#/", f"#/node/{few.history.peers[0].node}", "#/runs"):
            _, reward = opened_at(visit, route)
            expect(options(reward)).to_be_visible()
            assert visit.too_wide() <= 0 and not visit.barriers(), route
        visit.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that were started with different settings, and one without."""
    root = tmp_path_factory.mktemp("folder")
    for name, seed in (("one", 1), ("two", 2)):
        run = SmallRun(root / name, nodes=2, total=9)
        settings = NodeSettings.of(seed=seed, identity_path="/home/ada/swarm.pem", generations=4)
        run_settings.keep(settings, run.root, run.manifest, run.owner)
        for _ in range(3):
            run.play()
    SmallRun(root / "bare", nodes=3, total=9).play()
    return root


def test_settings_of_runs_are_compared_and_secrets_are_not_shown(folder: Path) -> None:
    follower = Follower(RunView(folder / "one"))
    follower.poll()
    table = Runs(follower).settings(["one", "two", "one", "none", "../one"])
    rows = {row.name: row for row in table.settings}
    assert table.runs == ["one", "two"]
    assert rows["seed"].values == ["1", "2"] and rows["seed"].differs and rows["seed"].about
    assert rows["generations"].values == ["4", "4"] and not rows["generations"].differs
    assert "identity_path" not in rows and "ada" not in json.dumps([row.values for row in table.settings])
    bare = Runs(follower).settings(["one", "bare"])
    assert {row.name: row.values for row in bare.settings}["nodes in the swarm"] == ["2", "3"]
    assert {row.name: row.values for row in bare.settings}["seed"] == ["1", None]


def test_runs_show_any_curve_in_steady_colours_and_where_settings_differ(browser: Browser, folder: Path) -> None:
    process = start(folder, "watch", "one", "--port", "18940")
    try:
        visit = Visit(browser, address_of(process))
        page = visit.open("#/runs")
        page.get_by_label("Show two").check()
        page.get_by_label("Show bare").check()
        chart = page.locator("figure")
        expect(chart.locator(".key")).to_have_count(3)
        colors = "figure => Object.fromEntries(figure.chart.entries.map(({name, color}) => [name, color]))"
        before = chart.evaluate(colors)
        page.get_by_label("Show one").uncheck()
        expect(chart.locator(".key")).to_have_count(2)
        assert chart.evaluate(colors) == {name: before[name] for name in ("two", "bare")}
        page.get_by_label("Show one").check()
        page.get_by_label("Show bare").uncheck()
        expect(chart.locator(".key")).to_have_count(2)
        page.locator("#metric").select_option("seconds.generate")
        expect(page.locator("figure h2")).to_contain_text("Seconds: generate")
        differences = page.get_by_label("Differences in settings", exact=True)
        expect(differences.locator("tbody tr")).to_have_count(1)
        expect(differences.locator("tbody tr")).to_contain_text("seed")
        page.get_by_label("Show equal settings too").check()
        expect(differences.locator("tr", has_text="generations").first).to_be_visible()
        with page.expect_download() as download:
            page.get_by_label("Save settings of the chosen runs as CSV").click()
        assert Path(download.value.path()).read_text().startswith("setting,two,one,differs")
        page.reload()
        expect(page.locator("figure h2")).to_contain_text("Seconds: generate")
        rows = page.get_by_label("Runs in this folder").locator("tbody tr")
        page.get_by_role("button", name="Sort by Nodes").click()
        expect(rows.first).to_contain_text("bare")
        page.get_by_role("button", name="Sort by Nodes").press("Enter")
        expect(rows.last).to_contain_text("bare")
        visit.close()
    finally:
        end(process)
