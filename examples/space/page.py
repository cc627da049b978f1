"""The page: four tabs over the functions beside this file."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gradio as gr
from filling import fill
from loading import Checkpoints, Loaded
from matplotlib.figure import Figure
from slot_maps import draw, explain, read_slots
from speed import HEADER, LENGTHS, ROUNDS, draw_speed, measure, peak_bytes, table
from writing import draw_state, explain_state, write

from luna_hf.scripting import UserError

# Fonts of the browser: the theme's own would be downloaded.
THEME = gr.themes.Soft(font=["system-ui", "sans-serif"], font_mono=["monospace"])
INTRODUCTION = """# luna_hf: attention with bounded memory
Each token reads a fixed number of *slots* that summarise the text, and its neighbours, instead of all other tokens. The
models here are small and know little of the world.
"""
# One event at a time: others would disturb a measurement.
QUEUE = {"concurrency_id": "models", "concurrency_limit": 1}
SENTENCES = [
    "She opened the <mask> and looked out at the rain.",
    "The capital of France is <mask>.",
    "The river flows into the <mask> near the city.",
]
SLOTS_SENTENCE = "The old captain sold his ship and bought a small house by the sea."


@contextmanager
def errors_on_the_page() -> Iterator[None]:
    """Show a user's mistake on the page, not in the log."""
    try:
        yield
    except UserError as error:
        raise gr.Error(str(error), duration=None, print_exception=False) from error


def build(checkpoints: Checkpoints) -> gr.Blocks:
    """The page for these models; `Generate` needs a causal one."""
    with gr.Blocks(title="luna_hf", analytics_enabled=False) as page:
        gr.Markdown(INTRODUCTION)
        with gr.Tab("Fill a mask"):
            _fill_tab(checkpoints.masked)
        with gr.Tab("What the slots read"):
            _slots_tab(checkpoints.lunas)
        with gr.Tab("Speed"):
            _speed_tab(checkpoints.lunas[0])
        if checkpoints.causal:
            with gr.Tab("Generate"):
                _generate_tab(checkpoints.causal[0])
    return page


def _fill_tab(models: list[Loaded]) -> None:
    gr.Markdown("Write `<mask>` for one word. Every model guesses it, with a probability for each guess.")
    text = gr.Textbox(SENTENCES[0], label="Text with one mask", elem_id="masked-text")
    gr.Examples(SENTENCES, text)
    button = gr.Button("Fill the mask", variant="primary")
    with gr.Row():
        answers = [gr.Label(label=loaded.name, elem_classes="answer") for loaded in models]

    def guess(text: str) -> list[dict[str, float]]:
        with errors_on_the_page():
            return [fill(loaded, text) for loaded in models]

    gr.on([button.click, text.submit], guess, text, answers, **QUEUE)


def _slots_tab(models: list[Loaded]) -> None:
    gr.Markdown("In each layer, the slots first take in the words (*pack*); then the words read the slots (*unpack*).")
    with gr.Row():
        text = gr.Textbox(SLOTS_SENTENCE, label="Text", scale=3)
        name = gr.Dropdown([loaded.name for loaded in models], label="Model", interactive=True)
        most = max(loaded.model.config.num_hidden_layers for loaded in models)
        choices = [("mean of all layers", 0), *((f"layer {layer}", layer) for layer in range(1, most + 1))]
        layer = gr.Dropdown(choices, value=0, label="Layer", interactive=True)
    button = gr.Button("Look into the slots", variant="primary")
    words, plot = gr.Markdown(), gr.Plot(show_label=False, elem_id="slots-plot")

    def look(text: str, name: str, layer: int) -> tuple[str, Figure]:
        (loaded,) = (loaded for loaded in models if loaded.name == name)
        with errors_on_the_page():
            maps = read_slots(loaded, text, layer or None)
        return explain(maps), draw(maps)

    gr.on([button.click, text.submit, layer.input, name.input], look, [text, name, layer], [words, plot], **QUEUE)


def _speed_tab(luna: Loaded) -> None:
    config = luna.model.config
    peak_bytes(lambda: None)  # the profiler logs an error if it first starts outside the main thread
    gr.Markdown(
        f"An encoder of the size of {luna.name} ({config.num_hidden_layers} layers of width {config.hidden_size}, "
        f"{config.projection_length} slots) and a RoBERTa of the same size read one text, on one core of the machine "
        f"that serves this page. Times are processor times, medians of {ROUNDS} rounds in which the models take turns; "
        "memory is the most that tensors take at once beyond the weights. The weights are random."
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
