"""Measures the leaderboard of many nodes: how long a page of it takes, and what scrolling through it costs a browser.

    python -m benchmarks.dashboard.table [--nodes 10000] [--json FILE]

- A page is 100 rows of `/api/nodes`, with its transfer: `first` sorts by a column for the first time since something
  has changed, `next` is another page of the same order.
- Scrolling is one step a frame: 100 pixels as by a wheel, for 300 frames, and then 1500 pixels as by the scroll bar, to
  the last row. The main thread's work is what Chromium counts as tasks (TaskDuration), and rows are the most that stood
  in the page at a time. A frame at 60 Hz lasts 16.7 ms.
"""

import http.client
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import sync_playwright

from benchmarks.lib.command import parser_of, positive, print_table, progress, write_json
from benchmarks.lib.many_nodes import ManyNodes

COLUMNS = ("held_out_now", "reward", "name", "total_reward", "wins", "model")
SPEEDS = {"wheel": (100, 300), "bar": (1500, 100_000)}  # pixels a frame, and at most so many frames
SCROLL = """async ([step, most]) => {
  const view = document.querySelector(".long");
  let rows = 0, frames = 0;
  while (frames < most && view.scrollTop + view.clientHeight < view.scrollHeight - 1) {
    view.scrollTop += step;
    await new Promise(requestAnimationFrame);
    rows = Math.max(rows, view.querySelectorAll("tbody tr").length);
    frames += 1;
  }
  return { rows, frames };
}"""


def milliseconds(url: str, path: str) -> float:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    started = time.perf_counter()
    connection.request("GET", path, headers={"Accept-Encoding": "gzip"})
    response = connection.getresponse()
    response.read()
    spent = 1000 * (time.perf_counter() - started)
    connection.close()
    assert response.status == 200, path
    return spent


def measure_pages(url: str, nodes: int) -> dict[str, float]:
    first = [milliseconds(url, f"/api/nodes?sort={column}&limit=100") for column in COLUMNS]
    following = [
        milliseconds(url, f"/api/nodes?sort={column}&limit=100&offset={offset}")
        for column in COLUMNS
        for offset in range(100, nodes, max(nodes // 10, 100))
    ]
    return {"first": statistics.median(first), "worst": max(first), "next": statistics.median(following)}


def measure_scrolling(url: str) -> dict[str, dict[str, float]]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium, args=options)
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.goto(f"{url}/#/")
        page.locator(".long tbody a").first.wait_for()
        page.wait_for_timeout(2000)
        devtools = page.context.new_cdp_session(page)
        devtools.send("Performance.enable")

        def busy() -> float:
            found = {each["name"]: each["value"] for each in devtools.send("Performance.getMetrics")["metrics"]}
            return float(found["TaskDuration"])

        figures = {}
        for name, speed in SPEEDS.items():
            before, started = busy(), time.perf_counter()
            told: dict[str, float] = page.evaluate(SCROLL, speed)
            spent, elapsed = busy() - before, time.perf_counter() - started
            figures[name] = {**told, "seconds": elapsed, "busy_ms_per_frame": 1000 * spent / told["frames"]}
        browser.close()
    return figures


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--nodes", type=positive, default=10_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="table-") as folder:
        progress(f"writing {given.nodes} nodes …")
        made = ManyNodes(Path(folder) / "many", given.nodes)
        with made.served() as url:
            progress("reading them …")
            milliseconds(url, "/api/overview")
            figures: dict[str, Any] = {"nodes": given.nodes, **measure_pages(url, given.nodes)}
            progress("scrolling …")
            figures["scrolling"] = measure_scrolling(url)
    rows = [
        ["a page by another column", f"median {figures['first']:.0f} ms, worst {figures['worst']:.0f} ms"],
        ["the next page", f"median {figures['next']:.0f} ms"],
        *(
            [
                f"scrolling, {SPEEDS[name][0]} pixels a frame",
                f"{told['busy_ms_per_frame']:.1f} ms of the main thread a frame; at most {told['rows']} rows at a time",
            ]
            for name, told in figures["scrolling"].items()
        ),
    ]
    if given.json != "-":
        print_table(["what", "measured"], rows)
    write_json(given.json, figures)


if __name__ == "__main__":
    main()
