"""Makes the pictures of the dashboard, of runs that really run meanwhile: `.venv/bin/python scripts/screenshots.py`

Needs the extra `dev`, Chromium and about eight minutes on two cores. `--only NAME` makes some of them. Each picture of
the gallery shows one view or state four times: on a desktop and on a phone, light and dark.
"""

import argparse
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import psutil
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks/

IMAGES = ROOT / "docs" / "images"
ROUNDS, SHOT_AT = 60, 31  # as many as a default run of `up` has
DESKTOP, PHONE = (1280, 900), (390, 844)
WINDOWS = [(*DESKTOP, "light"), (*DESKTOP, "dark"), (*PHONE, "light"), (*PHONE, "dark")]
GALLERY_HEIGHT = 600  # pixels of a picture in the gallery
COLOURS = 200
MAX_BYTES = 400_000
RECORDED_SECONDS, FRAMES_PER_SECOND, RECORDING_WIDTH, MAX_RECORDING = 20, 8, 640, 4_000_000
SETTLE = 1800  # milliseconds until what is drawn stands
VIEWS = {
    "overview": "#/", "node": "#/node/{node}", "rollouts": "#/rollouts", "feed": "#/events", "runs": "#/runs",
}  # fmt: skip
PICTURES = {  # of docs/dashboard.md: view, width, height, colours
    "dashboard-overview": ("#/", 1200, 1250, "light"),
    "dashboard-node": ("#/node/{node}", 1200, 1240, "light"),
    "dashboard-rollouts": ("#/rollouts", 1200, 900, "dark"),
    "dashboard-phone": ("#/", 390, 1100, "light"),
}
SIZES = {"100-nodes": (100, 60), "5000-nodes": (5000, 12)}  # nodes, rounds


class Studio:
    """Takes pictures, and starts the programs that they are of."""

    def __init__(self, browser: Browser, folder: Path, only: list[str]) -> None:
        self.browser, self.folder, self.only = browser, folder, only

    def wants(self, *names: str) -> bool:
        return not self.only or any(name in self.only for name in names)

    @contextmanager
    def program(self, *arguments: str, web: bool = False) -> Iterator[tuple["subprocess.Popen[str]", str]]:
        """Start a command, and yield it with the address of its dashboard."""
        environ = {**os.environ, "SWARM_WEB": str(web).lower()}
        command = [sys.executable, "-m", "rl_swarm", *arguments]
        made = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, text=True, env=environ)
        try:
            assert made.stdout is not None
            line = next((line for line in made.stdout if "http://" in line), "http:// ")
            yield made, "http://" + line.split("http://")[1].split(maxsplit=1)[0].strip() if "//" in line else ""
        finally:
            if made.poll() is None:
                made.terminate()
            made.communicate()

    @contextmanager
    def pages(self, url: str, view: str = "#/") -> Iterator[list[Page]]:
        """Open a view in every window."""
        contexts = [
            self.browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            for width, height, scheme in WINDOWS
        ]
        opened = [context.new_page() for context in contexts]
        for page in opened:
            page.goto(f"{url}/{view}")
        opened[0].wait_for_timeout(SETTLE)
        try:
            yield opened
        finally:
            for context in contexts:
                context.close()

    def gallery(self, name: str, pages: list[Page]) -> None:
        """Lay the windows beside each other."""
        shots = [Image.open(io.BytesIO(page.screenshot())).convert("RGB") for page in pages]
        shots = [shot.resize((shot.width * GALLERY_HEIGHT // shot.height, GALLERY_HEIGHT)) for shot in shots]
        sheet = Image.new("RGB", (sum(shot.width + 12 for shot in shots) - 12, GALLERY_HEIGHT), "#9ca3af")
        left = 0
        for shot in shots:
            sheet.paste(shot, (left, 0))
            left += shot.width + 12
        kept(sheet, IMAGES / "gallery" / f"{name}.png")

    def take(self, name: str, url: str, view: str = "#/") -> None:
        if self.wants(name):
            with self.pages(url, view) as pages:
                self.gallery(name, pages)


def kept(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.relative_to(ROOT)}: {size / 1000:.0f} KB", flush=True)
    assert size <= MAX_BYTES, "too large for the documentation"


def told(url: str, path: str) -> dict:
    with urlopen(f"{url}/{path}", timeout=60) as answer:
        return json.load(answer)


def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.2)


def record(studio: Studio, url: str, path: Path) -> None:
    """Record the map while the swarm runs."""
    context = studio.browser.new_context(viewport={"width": 1000, "height": 900}, color_scheme="dark")
    page = context.new_page()
    page.goto(f"{url}/#/")
    place = page.locator(".card.map").first
    place.wait_for()
    page.wait_for_timeout(SETTLE)
    frames = []
    begun = time.monotonic()
    while time.monotonic() < begun + RECORDED_SECONDS:
        time.sleep(max(0.0, begun + len(frames) / FRAMES_PER_SECOND - time.monotonic()))
        frame = Image.open(io.BytesIO(place.screenshot())).convert("RGB")
        frames.append(frame.resize((RECORDING_WIDTH, frame.height * RECORDING_WIDTH // frame.width)))
    seconds = time.monotonic() - begun
    context.close()
    palette = frames[len(frames) // 2].quantize(96, dither=Image.Dither.NONE)
    drawn = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    pause = round(1000 * seconds / len(frames))
    drawn[0].save(path, save_all=True, append_images=drawn[1:], duration=pause, loop=0, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} KB, {seconds:.0f} s", flush=True)
    assert path.stat().st_size <= MAX_RECORDING


def pictures_of_a_run(studio: Studio) -> None:
    """Show a default run: while it is played, and as it is when it ends under an open page."""
    with studio.program("up", "--run", "runs/earlier", "--rounds", "20", "--seed", "7", web=True) as (swarm, _):
        swarm.wait()
    # It goes on for longer than its pictures take.
    with studio.program("up", "--run", "runs/calm-otter", "--rounds", "400", web=True) as (swarm, url):
        if studio.wants("map"):
            until(lambda: told(url, "api/overview")["round"] >= 3)
            record(studio, url, IMAGES / "map.gif")
        until(lambda: told(url, "api/overview")["round"] >= SHOT_AT)
        node = told(url, "api/nodes")["nodes"][0]["node"]
        for name, view in VIEWS.items():
            studio.take(name, url, view.format(node=node))
        for name, (view, width, height, scheme) in PICTURES.items():
            if studio.wants(name):
                context = studio.browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
                page = context.new_page()
                page.goto(f"{url}/{view.format(node=node)}")
                page.wait_for_timeout(SETTLE)
                kept(Image.open(io.BytesIO(page.screenshot())).convert("RGB"), IMAGES / f"{name}.png")
                context.close()
        if studio.wants("stopped"):
            with studio.pages(url) as pages:
                swarm.send_signal(signal.SIGINT)
                pages[0].locator(".notice", has_text="was stopped").wait_for()
                pages[0].wait_for_timeout(SETTLE)
                studio.gallery("stopped", pages)


def pictures_of_states(studio: Studio) -> None:
    short = ("--nodes", "3", "--set", "held_out_questions=20")
    if studio.wants("finished"):
        with (
            studio.program("up", "--run", "runs/short", "--rounds", "25", *short, web=True) as (swarm, url),
            studio.pages(url) as pages,
        ):
            pages[0].locator(".notice", has_text="has finished").wait_for(timeout=120_000)
            pages[0].wait_for_timeout(SETTLE)
            studio.gallery("finished", pages)
    if not studio.wants("crashed", "damaged", "gone"):
        return
    with studio.program("up", "--run", "runs/hard", "--rounds", "400", *short, web=True) as (swarm, url):
        until(lambda: told(url, "api/overview")["round"] >= 12)
        crashed = [psutil.Process(swarm.pid), *psutil.Process(swarm.pid).children(recursive=True)]
        for each in crashed:
            each.kill()
        psutil.wait_procs(crashed)
    with studio.program("watch", "runs/hard", "--port", "18900") as (server, url):
        studio.take("crashed", url)
        log = sorted((studio.folder / "runs" / "hard").glob("logs/*/metrics.jsonl"))[0]
        with log.open("ab") as file:
            file.write(b"\x00" * 20 + b"\n" + b"{half a line\n")
        studio.take("damaged", url)
        if studio.wants("gone"):
            with studio.pages(url) as pages:
                server.kill()
                pages[0].locator(".notice", has_text="does not answer").wait_for()
                pages[0].wait_for_timeout(SETTLE)
                studio.gallery("gone", pages)


def pictures_of_others(studio: Studio) -> None:
    """Show a swarm without nodes, an experiment, and swarms too large to run here, with invented histories."""
    if studio.wants("waiting"):
        command = [sys.executable, "-m", "rl_swarm", "coordinate", "drive/early", "--rounds", "60"]
        (studio.folder / "drive").mkdir()
        coordinator = subprocess.Popen(command, cwd=studio.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until((studio.folder / "drive" / "early" / "manifest.json").exists)
            with studio.program("watch", "drive/early", "--port", "18910") as (_, url):
                studio.take("waiting", url)
        finally:
            coordinator.terminate()
            coordinator.wait()
    if studio.wants("experiment"):
        kept_experiment = ROOT / "docs" / "results" / "sapo-small-choice.jsonl.xz"
        with studio.program("watch", str(kept_experiment), "--port", "18920") as (_, url):
            studio.take("experiment", url, "")
    from benchmarks.lib.synthetic_run import History

    for name, (nodes, played) in SIZES.items():
        if studio.wants(name):
            History(studio.folder / "runs" / name, nodes, played)
            with studio.program("watch", f"runs/{name}", "--port", "18930") as (_, url):
                until(lambda url=url, nodes=nodes: told(url, "api/overview")["nodes"] >= nodes)
                studio.take(name, url)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", action="append", default=[], metavar="NAME", help="one picture; may be repeated")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        studio = Studio(browser, Path(folder), given.only)
        if studio.wants("map", "stopped", *VIEWS, *PICTURES):
            pictures_of_a_run(studio)
        pictures_of_states(studio)
        pictures_of_others(studio)
        browser.close()


if __name__ == "__main__":
    main()
