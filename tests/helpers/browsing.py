"""Opens the page in a real browser."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PATIENCE = 60_000  # milliseconds, on a busy machine
expect.set_options(timeout=PATIENCE)


@contextmanager
def opened() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield found
        found.close()


class Visit:
    """Holds an open page, and everything that went wrong or out from it."""

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
        expect(self.page.locator("#live")).to_have_text(re.compile("live|finished"))
        return self.page

    def too_wide(self) -> int:
        """Return by how many pixels the page scrolls sideways."""
        return self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def barriers(self) -> list[tuple[str, list[str]]]:
        """Return the accessibility violations that axe finds."""
        found = Axe().run(self.page).response["violations"]
        serious = [each for each in found if each["impact"] in ("serious", "critical")]
        return [(each["id"], [node["html"] for node in each["nodes"]]) for each in serious]

    def close(self) -> None:
        self.context.close()
        assert self.troubles == []
        assert self.hosts <= {urlsplit(self.url).netloc}, "nothing is asked of any other host"


def address_of(process: "subprocess.Popen[str]") -> str:
    """Return the address that a dashboard prints."""
    assert process.stdout is not None
    for line in process.stdout:
        if "http://" in line:
            return "http://" + line.split("http://")[1].split()[0]
    raise AssertionError("it did not tell its address")
