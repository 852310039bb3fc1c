"""Makes the pictures of docs/dashboard.md, of a swarm that runs meanwhile: `.venv/bin/python scripts/screenshots.py`

Needs the extra `dev`, and Chromium. Takes about three minutes on two cores.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

from playwright.sync_api import Browser, sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "images"
ROUNDS, SHOT_AT = 60, 31  # as many as a default run of `up` has
PICTURES = {  # name: view, width, height, colours
    "overview": ("#/", 1200, 1070, "light"),
    "node": ("#/node/{node}", 1200, 1240, "light"),
    "rollouts": ("#/rollouts", 1200, 900, "dark"),
    "phone": ("#/", 390, 1100, "light"),
}
MAX_BYTES = 200_000


def told(url: str, path: str) -> dict:
    with urlopen(f"{url}/{path}", timeout=60) as answer:
        return json.load(answer)


def take(browser: Browser, url: str, name: str, node: str) -> None:
    view, width, height, scheme = PICTURES[name]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.goto(f"{url}/{view.format(node=node)}")
    page.locator("canvas, .rollout[open]").first.wait_for()
    page.wait_for_timeout(1500)  # until what is drawn stands
    path = IMAGES / f"dashboard-{name}.png"
    page.screenshot(path=path)
    context.close()
    size = path.stat().st_size
    print(f"{path.name}: {size / 1000:.0f} KB")
    assert size <= MAX_BYTES, "too large for the documentation"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        swarm = subprocess.Popen(
            [sys.executable, "-m", "rl_swarm", "up", "--run", "runs/calm-otter", "--rounds", str(ROUNDS)],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "SWARM_WEB": "true"},
        )
        try:
            assert swarm.stdout is not None
            line = next(line for line in swarm.stdout if "http://" in line)
            url = "http://" + line.split("http://")[1].strip()
            while told(url, "api/overview")["round"] < SHOT_AT:
                time.sleep(0.5)
            arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
            node = told(url, "api/nodes")["nodes"][0]["node"]
            for name in PICTURES:
                take(browser, url, name, node)
            browser.close()
        finally:
            swarm.terminate()
            swarm.communicate()


if __name__ == "__main__":
    main()
