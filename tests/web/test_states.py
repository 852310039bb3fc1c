"""What the page says when a run does not just go on, of real runs that finish, stop, crash, or lose their server."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from browsing import CHROMIUM, Visit, address_of, opened
from playwright.sync_api import Browser, Locator, Page, expect
from processes import QUICK, end, family, start, state, until

pytestmark = pytest.mark.skipif(
    CHROMIUM is None and "CI" not in os.environ, reason="there is no Chromium on this machine"
)
UP = ["up", "--run", "runs/one", "--nodes", "2", "--local-groups", "2", "--external-groups", "2", *QUICK]
NO_SERVER = re.compile("ERR_CONNECTION|ERR_INCOMPLETE|ERR_EMPTY")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened() as found:
        yield found


def notice(page: Page, title: str) -> Locator:
    return page.locator(".notice", has_text=re.compile(title))


def seen(browser: Browser, url: str) -> Visit:
    """Open the overview; that a server is gone is no trouble here."""
    visit = Visit(browser, url)
    visit.page.goto(f"{url}/#/")
    return visit


def forgive(visit: Visit) -> None:
    visit.troubles = [trouble for trouble in visit.troubles if not NO_SERVER.search(trouble)]
    assert visit.barriers() == []
    visit.close()


def test_a_page_that_is_open_when_the_run_ends_says_so_and_keeps_what_it_shows(browser: Browser, tmp_path: Path):
    process = start(tmp_path, *UP, "--rounds", "15", "--port", "18810", SWARM_WEB="true")
    try:
        visit = seen(browser, address_of(process))
        expect(visit.page.locator("#phase")).to_have_text("running")
        expect(notice(visit.page, "The run has finished")).to_contain_text("rl-swarm watch runs/one")
        expect(visit.page.locator("#phase")).to_have_text("finished")
        expect(visit.page.locator("#live")).to_have_text("closed")
        expect(visit.page.locator("dl.three")).to_contain_text("15 of 15")
        process.communicate(timeout=240)
        assert process.returncode == 0
        forgive(visit)
    finally:
        end(process)


def test_who_stops_a_run_reads_how_to_go_on(browser: Browser, tmp_path: Path):
    process = start(tmp_path, *UP, "--rounds", "4000", "--port", "18811", SWARM_WEB="true")
    try:
        visit = seen(browser, address_of(process))
        until(lambda: state(tmp_path / "runs/one")["round"] >= 2)
        process.send_signal(signal.SIGINT)
        said = notice(visit.page, "The run was stopped in round")
        expect(said).to_contain_text("rl-swarm up --resume runs/one")
        expect(visit.page.locator("#phase")).to_have_text("stopped")
        process.communicate(timeout=240)
        assert process.returncode == 130
        forgive(visit)
    finally:
        end(process)


def test_a_crash_a_damaged_log_and_a_server_that_goes_and_comes(browser: Browser, tmp_path: Path):
    run = tmp_path / "runs" / "one"
    process = start(tmp_path, *UP, "--rounds", "4000", "--no-web")
    until(lambda: state(run)["round"] >= 2)
    killed = [psutil.Process(process.pid), *family(process)]
    for each in killed:
        each.kill()
    process.communicate(timeout=240)
    psutil.wait_procs(killed[1:], timeout=240)
    (log,) = (path for path in sorted(run.glob("logs/*/metrics.jsonl"))[:1])
    with log.open("ab") as file:
        file.write(b"what no node writes\n" * 3)

    server = start(tmp_path, "watch", "runs/one", "--port", "18812")
    try:
        url = address_of(server)
        visit = seen(browser, url)
        said = notice(visit.page, "The run has crashed")
        expect(said).to_contain_text("last heard of")
        expect(said.locator("li a")).to_have_count(2)
        expect(said).to_contain_text("rl-swarm up --resume runs/one")
        said.locator("summary").click()
        expect(said.locator("pre")).to_contain_text("round")
        expect(visit.page.locator("#phase")).to_have_class("pill crashed")
        expect(notice(visit.page, "cannot be read")).to_contain_text(f"logs/{log.parent.name}/metrics.jsonl: 3 lines")
        rows = visit.page.locator("table tbody tr")
        expect(rows).to_have_count(2)

        server.send_signal(signal.SIGINT)
        expect(visit.page.locator("#live")).to_have_text("closed")
        server.communicate(timeout=240)
        expect(notice(visit.page, "The dashboard was closed")).to_contain_text("rl-swarm watch runs/one")
        expect(rows).to_have_count(2)
        forgive(visit)

        server = start(tmp_path, "watch", "runs/one", "--port", "18812")
        visit = seen(browser, address_of(server))
        expect(notice(visit.page, "The run has crashed")).to_be_visible()
        server.kill()
        server.communicate(timeout=240)
        expect(notice(visit.page, "The dashboard does not answer since")).to_contain_text("rl-swarm watch runs/one")
        server = start(tmp_path, "watch", "runs/one", "--port", "18812")
        assert address_of(server) == url
        expect(notice(visit.page, "The run has crashed")).to_be_visible()
        expect(visit.page.locator("#live")).to_have_text("live")
        forgive(visit)
    finally:
        end(server)


def test_a_swarm_without_nodes_says_what_it_waits_for(browser: Browser, tmp_path: Path):
    (tmp_path / "drive").mkdir()
    coordinator = start(tmp_path, "coordinate", "drive/s", "--rounds", "3")
    try:
        until(lambda: (tmp_path / "drive/s/manifest.json").exists())
        server = start(tmp_path, "watch", "drive/s", "--port", "18813")
        try:
            visit = seen(browser, address_of(server))
            expect(notice(visit.page, "Waiting for the first node")).to_be_visible()
            expect(visit.page.locator("#phase")).to_have_text("waiting")
            forgive(visit)
        finally:
            end(server)
    finally:
        end(coordinator)
