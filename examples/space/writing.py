"""Let a causal Luna continue a text, with the size of its state beside that of a key-value cache."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from loading import Loaded
from matplotlib.figure import Figure
from transformers import PreTrainedConfig

from luna_hf import MemoryCache
from luna_hf.scripting import UserError

PART = 20  # tokens between two updates of the page


class Written(NamedTuple):
    """The text so far, and what the model keeps of it."""

    text: str
    tokens: int
    state_bytes: int  # of the model's state, as it is in memory
    cache_bytes: int  # that keys and values of as many tokens would take


def cache_bytes(config: PreTrainedConfig, tokens: int) -> int:
    """Bytes of the keys and values of a softmax model with the same layers and width, in float32."""
    return 2 * config.num_hidden_layers * config.hidden_size * tokens * torch.finfo(torch.float32).bits // 8


def write(loaded: Loaded, prompt: str, new_tokens: int, temperature: float) -> Iterator[Written]:
    """Continue a prompt, part by part.

    Args:
        loaded: a causal Luna.
        prompt: the beginning of the text.
        new_tokens: number of tokens to add.
        temperature: 0 takes the most probable token each time; higher values take more risks.

    Raises:
        UserError: The prompt is empty.
    """
    if not prompt.strip():
        raise UserError("The prompt is empty. Write how the text begins.")
    model, tokenizer = loaded.model, loaded.tokenizer
    # No end token: the text goes on.
    ids = tokenizer(prompt.rstrip(), return_tensors="pt", add_special_tokens=False).input_ids
    ids = torch.cat([torch.tensor([[tokenizer.bos_token_id]]), ids], dim=1)
    state, longest = MemoryCache(model.config), ids.shape[1] + new_tokens
    # Without an end, the text reaches the length at which the sizes of state and cache differ.
    goes_on = {"suppress_tokens": [tokenizer.eos_token_id]}
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 40} if temperature else {"do_sample": False}
    while ids.shape[1] < longest:
        options = {"max_new_tokens": min(PART, longest - ids.shape[1]), **goes_on, **sampling}
        ids = model.generate(ids, attention_mask=torch.ones_like(ids), cache=state, **options)
        text = tokenizer.decode(ids[0], skip_special_tokens=True)
        yield Written(text, ids.shape[1], state.nbytes, cache_bytes(model.config, ids.shape[1]))


def explain_state(written: Written) -> str:
    """The size of the state in words, as Markdown."""
    state, cache = written.state_bytes, written.cache_bytes
    return (
        f"After **{written.tokens:,} tokens** the state takes **{state:,} bytes**, as after the first token. "
        f"The keys and values of a softmax model of this shape would take **{cache:,} bytes**, {cache / state:.1f} "
        "times as much, and grow with every token."
    )


def draw_state(written: Sequence[Written]) -> Figure:
    """Size of state and key-value cache against the number of tokens."""
    figure = Figure(figsize=(11, 3.6), dpi=130, layout="constrained")
    axes = figure.subplots()
    tokens = [row.tokens for row in written]
    style = {"marker": "o", "linewidth": 2}
    axes.plot(tokens, [row.state_bytes / 1024 for row in written], color="tab:orange", label="Luna's state", **style)
    cache = [row.cache_bytes / 1024 for row in written]
    axes.plot(tokens, cache, color="tab:blue", label="key-value cache of a softmax model", **style)
    axes.set_title("What the model keeps of the text", fontsize=12, fontweight="bold")
    axes.set(xlabel="tokens so far", ylabel="KiB")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
