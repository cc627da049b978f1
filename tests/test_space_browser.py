"""The page of `examples/space` in headless Chromium: every tab works, and mistakes show a message."""

import pytest
from space_browser import CHROMIUM, open_tab, opened, press, run_tab, wait_until_written
from tiny_space import TOPICS, tiny_space

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
    page.locator(f"{box} textarea, {box} input").locator("visible=true").first.fill(text)
    press(page, tab)
    return message(page)


def message(page):
    """The text of the error on the page, which is then closed."""
    toast = page.locator(".toast-body")
    toast.wait_for()
    shown = toast.inner_text()
    page.locator(".toast-close").click()
    toast.wait_for(state="detached")
    return shown


def search(page, question):
    """Ask, and wait for the passages: the best, and the whole document."""
    before = page.locator("#reading").inner_text()
    page.locator("#question textarea, #question input").first.fill(question)
    press(page, "Search a document")
    page.wait_for_function("before => document.querySelector('#reading').innerText !== before", arg=before)
    wait_until_written(page)
    return page.locator("#best").inner_text(), page.locator("#lit").inner_text()


def test_the_example_is_lit_up_from_the_start(page):
    page.locator("#lit p.best").wait_for()
    assert page.locator("#best li").count() == 5
    assert "passes" in page.locator("#reading").inner_text()  # the tiny encoder has 1,024 positions
    before = page.locator("#best").inner_text()
    page.get_by_role("button", name="breakfast").click()  # an example searches at once
    page.wait_for_function("before => document.querySelector('#best').innerText !== before", arg=before)
    page.locator("#best a").last.click()
    assert page.locator("#lit p:target").count() == 1


def test_another_document_is_shown_as_it_is(page, tmp_path):
    open_tab(page, "Search a document")
    page.get_by_text("Search another document").click()
    page.locator("#document textarea").fill("A <b>bold</b> claim & {{value}} or ${value}.")
    best, lit = search(page, "Who is bold?")
    assert "<b>bold</b> claim & {{value}} or ${value}." in lit and "{{value}}" in best
    (tmp_path / "notes.md").write_text("# Notes\n\nA fox reads.", encoding="utf-8")
    page.locator("input[type=file]").set_input_files(tmp_path / "notes.md")
    page.locator("#lit p", has_text="A fox reads.").wait_for()
    assert page.locator("#document textarea").input_value() == "# Notes\n\nA fox reads."
    (tmp_path / "notes.txt").write_bytes(b"caf\xe9")
    page.locator("input[type=file]").set_input_files(tmp_path / "notes.txt")
    assert "UTF-8" in message(page)
    assert "empty" in mistake(page, "Search a document", "#question", " ")


def test_every_model_fills_the_mask(page):
    run_tab(page, "Fill a mask")
    answers = page.locator(".answer >> visible=true").all_inner_texts()
    assert [text.split()[0] for text in answers] == ["luna-mini-en", "abc-mini-en", "roberta-mini-en"]
    assert all(text.count("%") == 5 for text in answers)


@pytest.mark.parametrize(("text", "named"), [("no mask", "no masks"), ("<mask> <mask>", "2 masks"), ("", "empty")])
def test_a_wrong_mask_shows_a_message(page, text, named):
    assert named in mistake(page, "Fill a mask", ".asked", text)


def test_every_classifier_names_its_classes(page):
    run_tab(page, "Classify")
    answer = page.locator(".answer >> visible=true")
    assert all(topic in answer.inner_text() for topic in TOPICS.values())  # of the last model, an adapter
    page.get_by_label("luna-mini-en-sst2").check()  # choosing a model classifies at once
    page.locator(".answer >> visible=true", has_text="positive").wait_for()
    assert "negative" in answer.inner_text() and answer.inner_text().count("%") == 2
    page.get_by_label("Second text").fill("fox " * 300)  # it is read, too
    press(page, "Classify")
    assert "at most 256" in message(page)


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
