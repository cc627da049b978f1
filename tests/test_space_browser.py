"""The page of `examples/space` in headless Chromium: every tab works, and mistakes show a message."""

import pytest
from space_browser import CHROMIUM, open_tab, opened, press, run_tab
from tiny_space import tiny_space

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with opened(tiny_space(tmp_path_factory.mktemp("space"), longest=256)) as page:
        yield page


def picture(page, name):
    return page.locator(f"#{name}-plot img").get_attribute("src")


def wait_for_another_picture(page, name, before):
    page.wait_for_function(
        "([name, before]) => document.querySelector(`#${name}-plot img`)?.src !== before", arg=[name, before]
    )


def mistake(page, tab, box, text):
    """What the page says about a text."""
    open_tab(page, tab)
    page.locator(f"{box} textarea, {box} input").first.fill(text)
    press(page, tab)
    toast = page.locator(".toast-body")
    toast.wait_for()
    shown = toast.inner_text()
    page.locator(".toast-close").click()
    toast.wait_for(state="detached")
    return shown


def test_every_model_fills_the_mask(page):
    run_tab(page, "Fill a mask")
    answers = page.locator(".answer").all_inner_texts()
    assert [text.split()[0] for text in answers] == ["luna-mini-en", "abc-mini-en", "roberta-mini-en"]
    assert all(text.count("%") == 5 for text in answers)


@pytest.mark.parametrize(("text", "named"), [("no mask", "no masks"), ("<mask> <mask>", "2 masks"), ("", "empty")])
def test_a_wrong_mask_shows_a_message(page, text, named):
    assert named in mistake(page, "Fill a mask", "#masked-text", text)


def test_the_picture_of_the_slots_changes_with_the_layer(page):
    run_tab(page, "What the slots read")
    before = picture(page, "slots")
    page.get_by_label("Layer").click()
    page.get_by_role("option", name="layer 2").click()
    wait_for_another_picture(page, "slots", before)


def test_speed_is_drawn_length_by_length(page):
    open_tab(page, "Speed")
    for length in ("1024", "2048", "4096"):
        page.get_by_label(length, exact=True).uncheck()
    run_tab(page, "Speed")
    before = picture(page, "speed")
    page.get_by_label("1024", exact=True).check()
    press(page, "Speed")
    wait_for_another_picture(page, "speed", before)


def test_the_text_grows_and_the_state_does_not(page):
    run_tab(page, "Generate")
    assert page.locator("#written textarea").input_value().startswith("The city is")
    assert "bytes" in page.locator("#state-size").inner_text()
    assert "empty" in mistake(page, "Generate", "#prompt", " ")
