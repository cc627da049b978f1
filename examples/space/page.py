"""The page: tabs over the functions beside this file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradio as gr
from answering import classify, fill
from loading import Checkpoints, Loaded
from matplotlib.figure import Figure
from searching import EXAMPLE, explain, light_up, list_best, search
from speed import HEADER, LENGTHS, ROUNDS, draw_speed, measure, table
from writing import draw_state, explain_state, write

from luna_hf.scripting import UserError

# Fonts of the browser: the theme's own would be downloaded.
THEME = gr.themes.Soft(font=["system-ui", "sans-serif"], font_mono=["monospace"])
INTRODUCTION = """# luna_hf: long texts in linear time
Each token reads its neighbours and a memory of fixed size instead of all other tokens, so that time grows linearly with
the length of the text.
"""
# One event at a time: others would disturb a measurement.
QUEUE = {"concurrency_id": "models", "concurrency_limit": 1}
FRAME = {"container": True, "padding": True, "max_height": 600}
QUESTIONS = [
    "a hidden garden that nobody may enter",
    "How does Dickon get along with animals?",
    "What did she have for breakfast?",
    "things to do outdoors for children",
]
SENTENCES = [
    "She opened the <mask> and looked out at the rain.",
    "The capital of France is <mask>.",
    "The river flows into the <mask> near the city.",
]
TEXTS = [
    "A warm and funny film that I would gladly see again.",
    "Great actors cannot save a script as lazy as this one.",
    "My new card has not arrived yet.",
    "Wake me up at seven tomorrow.",
]
ANSWER = {"show_heading": False, "num_top_classes": 5, "elem_classes": "answer"}
PASSAGES_CSS = """
p { white-space: pre-line; margin: 0 0 0.6em; padding: 0.2em 0.5em; border-radius: 4px; }
p:target { outline: 2px solid darkorange; }
ol { padding-left: 1.5em; list-style: decimal; }
li { margin-bottom: 0.8em; }
li a { font-weight: bold; }
li span { display: -webkit-box; -webkit-line-clamp: 5; -webkit-box-orient: vertical; overflow: hidden; }
"""
# Moves the document to its best passage, but not the page.
SCROLL = """watch("value", () => {
    const best = element.querySelector(".best"), box = element.closest(".html-container")
    if (best) box.scrollTop += best.getBoundingClientRect().top - box.getBoundingClientRect().top - 40
})"""


@contextmanager
def errors_on_the_page() -> Iterator[None]:
    """Show a user's mistake on the page, not in the log."""
    try:
        yield
    except UserError as error:
        raise gr.Error(str(error), duration=None, print_exception=False) from error


def build(checkpoints: Checkpoints) -> gr.Blocks:
    """The page for these models; a tab without a model is left out."""
    with gr.Blocks(title="luna_hf", analytics_enabled=False) as page:
        gr.Markdown(INTRODUCTION)
        if checkpoints.encoders:
            with gr.Tab("Search a document"):
                _search_tab(checkpoints.encoders[0], page)
        if checkpoints.masked:
            with gr.Tab("Fill a mask"):
                _fill_tab(checkpoints.masked)
        if checkpoints.classifiers:
            with gr.Tab("Classify"):
                _classify_tab(checkpoints.classifiers)
        if checkpoints.memories:
            with gr.Tab("Speed"):
                _speed_tab(checkpoints.memories[0])
        if checkpoints.causal:
            with gr.Tab("Generate"):
                _generate_tab(checkpoints.causal[0])
    return page


def _search_tab(loaded: Loaded, page: gr.Blocks) -> None:
    with gr.Row(equal_height=True):
        question = gr.Textbox(QUESTIONS[0], label="What are you looking for?", elem_id="question", scale=5)
        button = gr.Button("Search", variant="primary", scale=1)
    examples = gr.Examples(QUESTIONS, question, label="Questions on the example")
    with gr.Accordion("Search another document", open=False):
        text = gr.Textbox(EXAMPLE, label="Text", lines=6, max_lines=12, elem_id="document")
        upload = gr.UploadButton("Upload a .txt or .md file", file_types=[".txt", ".md"])
    said = gr.Markdown(elem_id="reading")
    with gr.Row():
        best = gr.HTML(css_template=PASSAGES_CSS, elem_id="best", **FRAME)
        lit = gr.HTML(css_template=PASSAGES_CSS, js_on_load=SCROLL, elem_id="lit", **FRAME)

    def run(text: str, question: str) -> tuple[str, str, str]:
        with errors_on_the_page():
            found = search(loaded, text, question)
        return explain(loaded, found), list_best(found), light_up(found)

    def read_file(path: str) -> str:
        with errors_on_the_page():
            try:
                return Path(path).read_text(encoding="utf-8-sig")
            except UnicodeDecodeError as error:
                raise UserError(f"{Path(path).name} is not UTF-8 text. Save it as such.") from error

    event = {"fn": run, "inputs": [text, question], "outputs": [said, best, lit], **QUEUE}
    gr.on([page.load, button.click, question.submit], **event)
    examples.load_input_event.success(**event)
    upload.upload(read_file, upload, text, **QUEUE).success(**event)


def _fill_tab(models: list[Loaded]) -> None:
    gr.Markdown("Write `<mask>` for one word. Each model guesses it, with a probability for each guess.")
    text = gr.Textbox(SENTENCES[0], label="Text", elem_classes="asked")
    examples = gr.Examples(SENTENCES, text)
    button = gr.Button("Fill the mask", variant="primary")
    with gr.Row():
        answers = [gr.Label(label=loaded.name, **ANSWER) for loaded in models]

    def run(text: str) -> dict[gr.Label, dict[str, float]]:
        with errors_on_the_page():
            return {label: fill(loaded, text) for label, loaded in zip(answers, models, strict=True)}

    event = {"fn": run, "inputs": text, "outputs": answers, **QUEUE}
    gr.on([button.click, text.submit], **event)
    examples.load_input_event.success(**event)


def _classify_tab(models: list[Loaded]) -> None:
    gr.Markdown("Each model chooses between the classes for which it was finetuned.")
    named = {loaded.name: loaded for loaded in models}
    name = gr.Radio([*named], value=models[-1].name, label="Model")
    text = gr.Textbox(TEXTS[0], label="Text", elem_classes="asked")
    second = gr.Textbox(label="Second text, only for models that compare two")
    examples = gr.Examples(TEXTS, text)
    button = gr.Button("Classify the text", variant="primary")
    answer = gr.Label(**ANSWER)

    def run(name: str, text: str, second: str) -> dict[str, float]:
        with errors_on_the_page():
            return classify(named[name], text, second)

    event = {"fn": run, "inputs": [name, text, second], "outputs": answer, **QUEUE}
    gr.on([button.click, name.select, text.submit, second.submit], **event)
    examples.load_input_event.success(**event)


def _speed_tab(loaded: Loaded) -> None:
    config = loaded.model.config
    exact = getattr(config, "softmax_length", None)
    gr.Markdown(
        f"An encoder of the shape of {loaded.name} ({config.num_hidden_layers} layers of width {config.hidden_size}) "
        "and a BERT of the same size, which has softmax attention, read one text, on one core of the machine that "
        f"serves this page. {f'Up to {exact} tokens, both have softmax attention. ' if exact else ''}Times are "
        f"processor times, medians of {ROUNDS} rounds in which the models take turns. The weights are random."
    )
    lengths = gr.CheckboxGroup(LENGTHS, value=[n for n in LENGTHS if n <= 4096], label="Lengths in tokens")
    button = gr.Button("Measure", variant="primary")
    plot = gr.Plot(show_label=False, elem_id="speed-plot")
    figures = gr.Dataframe(headers=HEADER, interactive=False, show_label=False)

    def run(lengths: list[int]) -> Iterator[tuple[Figure, list[list[str]]]]:
        measured = []
        with errors_on_the_page():
            for row in measure(config, lengths):
                measured.append(row)
                yield draw_speed(measured), table(measured)

    button.click(run, lengths, [plot, figures], **QUEUE)


def _generate_tab(loaded: Loaded) -> None:
    gr.Markdown(f"{loaded.name} continues a text. Whatever the length, it keeps only a state of one size.")
    prompt = gr.Textbox("The city is", label="Beginning of the text", elem_id="prompt")
    with gr.Row():
        count = gr.Slider(20, 400, value=200, step=20, label="Tokens to add")
        heat = gr.Slider(0, 1.5, value=0.8, step=0.1, label="Temperature (0: always the most probable token)")
    button = gr.Button("Write", variant="primary")
    text, size = gr.Textbox(label="Text", lines=4, elem_id="written"), gr.Markdown(elem_id="state-size")
    plot = gr.Plot(show_label=False, elem_id="state-plot")

    def run(prompt: str, count: int, heat: float) -> Iterator[tuple[Any, ...]]:
        rows = []
        with errors_on_the_page():
            for written in write(loaded, prompt, count, heat):
                rows.append(written)
                yield written.text, explain_state(written), draw_state(rows)

    gr.on([button.click, prompt.submit], run, [prompt, count, heat], [text, size, plot], **QUEUE)
