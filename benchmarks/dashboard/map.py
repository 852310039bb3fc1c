"""Measures the work of the map of the swarm in a real browser, for swarms of several sizes.

    python -m benchmarks.dashboard.map [--nodes 100,1000,5000] [--rounds 12] [--json FILE]

For every size a real server shows a synthetic run in Chromium, and two things are measured:

- `frame`: milliseconds of the main thread in one frame of the map while sparks fly: the frame function alone. `task`
  is the longest task of the thread around it, with what the browser itself does for a frame, from its trace.
- `quiet` and `hidden`: frames in five seconds when nothing changes, and when a round ends while the page is hidden.
"""

import json
import os
import platform
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.dashboard.load import served, until_it_listens
from benchmarks.lib.command import parser_of, print_table, progress, write_json
from benchmarks.lib.synthetic_run import History

BAR = 8.0  # milliseconds of a frame, with 1000 nodes
QUIET_SECONDS = 5
ANIMATED_MS = 4000  # after a round that ends
PLAYERS = 400  # nodes of a large swarm that end a round at a time
# Every animation frame of the page is timed; uPlot draws without them, so they are the map's.
TIMED = """
window.frames_ms = [];
const asked = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (drawn) => asked((now) => {
  const began = performance.now();
  drawn(now);
  window.frames_ms.push(performance.now() - began);
});
"""
HIDE = """(hidden) => {
  Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def frames(page: Page) -> list[float]:
    """Return the milliseconds of the frames since the last call."""
    return [float(each) for each in page.evaluate("window.frames_ms.splice(0)")]


def wait_until_still(page: Page) -> None:
    """Wait until the map has drawn no frame for a second."""
    while True:
        page.evaluate("window.frames_ms.length = 0")
        page.wait_for_timeout(1000)
        if not page.evaluate("window.frames_ms.length"):
            return


def play_round(history: History) -> None:
    for node in range(min(PLAYERS, len(history.peers))):
        history.play(node)
    history.end_round()


def task_ms(trace: Path) -> list[float]:
    """Return the milliseconds of the main thread's tasks in which an animation frame was served."""
    events = json.loads(trace.read_text())["traceEvents"]
    fired = [event for event in events if event["name"] == "FireAnimationFrame"]
    tasks = [e for e in events if e["name"] in ("RunTask", "ThreadControllerImpl::RunTask") and "dur" in e]
    found = []
    for event in fired:
        around = [
            e["dur"] / 1000 for e in tasks if e["tid"] == event["tid"] and e["ts"] <= event["ts"] <= e["ts"] + e["dur"]
        ]
        found += [max(around)] if around else []
    return found


def measure(browser: Browser, folder: Path, nodes: int, rounds: int) -> dict[str, Any]:
    history = History(folder / str(nodes), nodes, rounds)
    with served(history.root) as (process, port):
        until_it_listens(process, port)
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.add_init_script(TIMED)
        page.goto(f"http://localhost:{port}/#/")
        page.locator(".map-stage canvas").first.wait_for()
        page.get_by_text(f"now, round {rounds}", exact=True).wait_for(timeout=600_000)
        wait_until_still(page)
        trace = folder / f"{nodes}.json"
        browser.start_tracing(page=page, path=trace, categories=["toplevel", "devtools.timeline"])
        drawn: list[float] = []
        for _ in range(3):
            play_round(history)
            page.wait_for_timeout(ANIMATED_MS)
            drawn += frames(page)
        browser.stop_tracing()
        wait_until_still(page)
        frames(page)
        page.wait_for_timeout(1000 * QUIET_SECONDS)
        quiet = len(frames(page))
        page.evaluate(HIDE, True)
        play_round(history)
        page.wait_for_timeout(1000 * QUIET_SECONDS)
        hidden = len(frames(page))
        page.close()
    tasks = task_ms(trace)
    return {
        "nodes": nodes,
        "frames": len(drawn),
        "frame_median_ms": statistics.median(drawn),
        "frame_p95_ms": quantile(drawn),
        "task_median_ms": statistics.median(tasks) if tasks else None,
        "task_p95_ms": quantile(tasks) if tasks else None,
        "quiet_frames": quiet,
        "hidden_frames": hidden,
    }


def quantile(values: list[float], share: float = 0.95) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def show(sizes: list[dict[str, Any]]) -> None:
    header = ["nodes", "frames", "frame, ms: median, 95 %", "task, ms: median, 95 %", "frames in 5 s: quiet, hidden"]
    rows = [
        [
            str(each["nodes"]),
            str(each["frames"]),
            f"{each['frame_median_ms']:.2f}, {each['frame_p95_ms']:.2f}",
            "–" if each["task_median_ms"] is None else f"{each['task_median_ms']:.2f}, {each['task_p95_ms']:.2f}",
            f"{each['quiet_frames']}, {each['hidden_frames']}",
        ]
        for each in sizes
    ]
    print_table(header, rows)
    print(f"\nThe bar is {BAR:.0f} ms a frame with 1000 nodes, and no frame where nothing changes.")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--nodes", default="100,1000,5000", help="sizes of the swarms (default: 100,1000,5000)")
    parser.add_argument("--rounds", type=int, default=12, help="that every swarm has played (default: 12)")
    given = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("this needs Chromium (apt install chromium).")
    sizes = []
    with tempfile.TemporaryDirectory(prefix="map-") as folder, sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        for nodes in map(int, given.nodes.split(",")):
            progress(f"measuring {nodes} nodes …")
            sizes.append(measure(browser, Path(folder), nodes, given.rounds))
        browser.close()
    figures = {"machine": {"name": platform.processor() or platform.machine(), "cores": os.cpu_count()}, "sizes": sizes}
    if given.json != "-":
        show(sizes)
    write_json(given.json, figures)


if __name__ == "__main__":
    main()
