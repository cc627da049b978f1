"""The page of `examples/space` in headless Chromium."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

CHROMIUM = shutil.which("chromium")  # Debian's package; nothing is downloaded
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
SECONDS = 600  # for any step, on a busy machine
# Tabs: the button that starts each, and what its result fills.
BUTTONS = {
    "Search a document": ("Search", "#best li"),
    "Fill a mask": ("Fill the mask", ".answer .confidence"),
    "Classify": ("Classify the text", ".answer .confidence"),
    "Speed": ("Measure", "#speed-plot img"),
    "Generate": ("Write", "#state-plot img"),
}


@contextmanager
def opened(checkpoints: Path) -> Iterator[Page]:
    """Serve the page for a folder of checkpoints and open it in a browser."""
    from loading import load_checkpoints
    from page import THEME, build

    blocks = build(load_checkpoints(checkpoints))
    _, address, _ = blocks.launch(theme=THEME, prevent_thread_lock=True, quiet=True)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
            page = browser.new_page(viewport={"width": 1100, "height": 900})
            page.set_default_timeout(1000 * SECONDS)
            page.goto(address)
            page.get_by_role("tab").first.wait_for()
            yield page
            browser.close()
    finally:
        blocks.close()


def open_tab(page: Page, tab: str) -> None:
    """Show a tab."""
    page.get_by_role("tab", name=tab).click()
    page.get_by_role("button", name=BUTTONS[tab][0], exact=True).wait_for()


def press(page: Page, tab: str) -> None:
    """Press the button of the tab that is shown."""
    page.get_by_role("button", name=BUTTONS[tab][0], exact=True).click()


def run_tab(page: Page, tab: str) -> None:
    """Show a tab, press its button, and wait for the whole result."""
    open_tab(page, tab)
    press(page, tab)
    page.locator(f"{BUTTONS[tab][1]} >> visible=true").first.wait_for()
    wait_until_written(page)


def wait_until_written(page: Page) -> None:
    """Wait until no part of the page waits for its result."""
    page.wait_for_function("() => !document.querySelector('.generating, .pending, .progress-text')")
