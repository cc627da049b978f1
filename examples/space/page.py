"""The page: tabs over the functions beside this file."""

from collections.abc import Callable, Iterator
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
REVIEWS = [
    "A warm and funny film that I would gladly see again.",
    "The plot makes no sense, and two hours felt like four.",
    "Great actors cannot save a script as lazy as this one.",
]
Answer = Callable[[Loaded, str], dict[str, float]]
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
                how = "Write `<mask>` for one word. Each model guesses it, with a probability for each guess."
                _answers_tab(checkpoints.masked, fill, how, "Fill the mask", SENTENCES)
        if checkpoints.classifiers:
            with gr.Tab("Classify"):
                how = "Each model chooses between the classes for which it was finetuned."
                _answers_tab(checkpoints.classifiers, classify, how, "Classify the text", REVIEWS)
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


def _answers_tab(models: list[Loaded], answer: Answer, explanation: str, action: str, texts: list[str]) -> None:
    sizes = ", ".join(f"{loaded.name} ({loaded.size / 1e6:.1f} million parameters)" for loaded in models)
    gr.Markdown(f"{explanation} Here: {sizes}.")
    text = gr.Textbox(texts[0], label="Text", elem_classes="asked")
    examples = gr.Examples(texts, text)
    button = gr.Button(action, variant="primary")
    with gr.Row():
        look = {"show_heading": False, "num_top_classes": 5, "elem_classes": "answer"}
        answers = [gr.Label(label=loaded.name, **look) for loaded in models]

    def run(text: str) -> dict[gr.Label, dict[str, float]]:
        with errors_on_the_page():
            return {label: answer(loaded, text) for label, loaded in zip(answers, models, strict=True)}

    event = {"fn": run, "inputs": text, "outputs": answers, **QUEUE}
    gr.on([button.click, text.submit], **event)
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
