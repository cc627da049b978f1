"""The figures of the documentation: drawn from committed results, small, and described where a page shows them."""

import re

import figures
import pytest
import reads
from helpers import ROOT, SENTENCES, tiny_model, tiny_tokenizer
from PIL import Image
from test_docs import TEXTS

LARGEST = 150_000  # bytes
FAMILIES = "encoder-forward-1-layer-families-cpu-float32"


def test_figures_are_drawn_from_the_committed_results(tmp_path):
    assert figures.main(["--output", str(tmp_path)]) == 0
    for path in tmp_path.iterdir():
        assert path.stat().st_size < LARGEST, path.name
        fresh, committed = (Image.open(folder / path.name).info for folder in (tmp_path, figures.IMAGES))
        assert fresh[figures.DIGEST] == committed[figures.DIGEST], "run `python benchmarks/figures.py`"
    (last,) = (row for row in figures.load(FAMILIES)["lengths"] if row["length"] == 16384)
    speed = last["models"]["luna-tied"]["speed_over"]["roberta"]["median"]
    assert f"Luna {speed:.1f}x" in [text.get_text() for text in figures.draw_speed().axes[0].texts]


@pytest.mark.parametrize("page", TEXTS)
def test_images_exist_and_say_what_they_show(page):
    for alternative, image in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", TEXTS[page]):
        assert len(alternative) >= 20, image
        assert (ROOT / page).parent.joinpath(image).exists(), image


def test_shares_of_the_attention():
    options = {"local_window": 8, "num_selected_tokens": 6, "num_selection_queries": 4, "softmax_length": 0}
    model = tiny_model("luna", vocab_size=400, max_position_embeddings=128, attn_implementation="eager", **options)
    found = reads.measure(model, tiny_tokenizer(), [" ".join(SENTENCES), " ".join(SENTENCES[::-1])])
    assert len(found["layers"]) == model.config.num_hidden_layers
    for row in (found["text"], *found["layers"]):
        shares = [row[part] for part in ("window", "first", "selected", "slots")]
        assert min(shares) >= 0 and sum(shares) == pytest.approx(1, abs=1e-5)
    assert all(0 < len(layer["most_read"]) <= reads.WORDS for layer in found["layers"])
