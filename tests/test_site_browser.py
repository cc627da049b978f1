"""The documentation site in headless Chromium: pages render, search finds, links work, and nothing else is loaded."""

import functools
import http.server
import threading

import pytest
from playwright.sync_api import sync_playwright
from space_browser import CHROMIUM, FLAGS
from test_site import PAGES, build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    handler.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def page(browser, address):
    page = browser.new_page()
    page.failed, page.asked = [], set()
    page.on("response", lambda response: page.failed.append(response.url) if response.status >= 400 else None)
    page.on("request", lambda request: page.asked.add(request.url))
    page.on("pageerror", lambda error: page.failed.append(str(error)))
    yield page
    assert not page.failed
    assert all(url.startswith((address, "data:", "blob:")) for url in page.asked)
    page.close()


def test_every_page_shows_its_title_and_pictures(page, address):
    for name in sorted(PAGES):
        page.goto(address + name.replace("README.md", "index.md").replace(".md", ".html"))
        assert page.locator("article h1").inner_text()
        broken = "Array.from(document.images).filter(image => image.complete && !image.naturalWidth).length"
        assert page.evaluate(broken) == 0, name


def test_search_finds_a_page_and_opens_it(page, address):
    page.goto(address)
    page.get_by_placeholder("Search").fill("late chunking")
    found = page.locator(".md-search-result__link", has_text="Search inside long documents").first
    found.wait_for()
    found.click()
    page.wait_for_url("**/late-chunking.html*")


def test_links_lead_to_pages_code_and_dark_mode(page, address):
    page.goto(address + "convert-training.html")
    page.locator('article a[href*="minilm.yaml"]').first.click()
    page.locator("article .highlight").wait_for()
    assert "model_name" in page.locator("article").inner_text()
    assert page.locator("article .highlight button").count()  # copies the code
    page.locator("label[for=__palette_1]").click()
    page.wait_for_function("document.body.dataset.mdColorScheme === 'slate'")
