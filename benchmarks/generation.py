"""Decoding, training and translation with a state of constant size, beside GPT-2 and BART with their KV caches.

    python benchmarks/generation.py --check-floors
    python benchmarks/generation.py --kind training
    python benchmarks/generation.py --kind translation --check-floors

`decoding` times one step as in `generate`, after contexts of several lengths; `training` a step on texts of these
lengths; `translation` reading a source up to the first token, and then one token. The models of a kind have the same
size and random weights. See docs/results/speed.md for the protocol.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import measuring
import summaries
import torch
import transformers as hf
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache

from luna_hf import FAMILIES, MemoryCache
from luna_hf.scripting import progress

PROTOCOL = (
    "Every round times every model at every length, in an order that rotates from round to round; ratios are taken "
    "within a round, medians over rounds. decoding: the model's forward of one token of every row, with the cache, an "
    "attention mask of ones and logits for that token, as in generate; a state grows by one token in each round. The "
    "models of this package have read random tokens, in parts of 512; GPT-2's caches are filled with random keys and "
    "values, since reading 16K tokens takes minutes and changes no shape. gpt2: DynamicCache, generate's default, "
    "which copies all keys and values in every step; gpt2-static: StaticCache of exactly the length needed, written "
    "in place, not compiled. training: forward with labels at all positions, backward and fused AdamW on one text. "
    "translation: encoder-decoders with as many layers in the decoder as in the encoder; source: the encoder, and the "
    "decoder's forward of the start token; token: one more token with the cache; bart: sdpa, DynamicCache. State: "
    "bytes of the tensors in the cache. Memory: what is held (state, or weights, gradients and moments), and the peak "
    "resident size of a call beyond it, each model and length in its own process (on an accelerator: peak allocated, "
    "in one process), where freed blocks of 1 MiB and more go back to the system."
)
# Family and fields of this package's causal models; a family without an entry joins with 64 slots.
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "luna-64": ("luna", {"projection_length": 64}),
    "luna-mixed-64": ("luna", {"projection_length": 64, "local_window": 32}),
    "abc-mlp-64": ("abc_memory", {"memory_control": "mlp", "memory_size": 64}),
    "abc-mixed-64": ("abc_memory", {"memory_control": "mlp", "memory_size": 64, "local_window": 32}),
    "abc-window-64": ("abc_memory", {"memory_control": "sliding_window", "memory_size": 64}),
}
_NAMED = {family for family, _ in OWN.values()}
OWN |= {family: (family, measuring.slots_of(family, 64)) for family in FAMILIES if family not in _NAMED}
DYNAMIC, STATIC, BART = "gpt2", "gpt2-static", "bart"  # the first two are one model with two caches
# Models, peers, calls and default lengths of each kind.
KINDS: dict[str, tuple[tuple[str, ...], list[str], tuple[str, ...], list[int]]] = {
    "decoding": (tuple(OWN), [DYNAMIC, STATIC], ("token",), [1024, 2048, 4096, 8192, 16384]),
    "training": (tuple(OWN), [DYNAMIC], ("training step",), [1024, 4096]),
    "translation": (tuple(FAMILIES), [BART], ("source", "token"), [128, 512, 2048, 8192]),
}
PART, WARM_UP = 512, 2  # tokens read at a time; untimed steps


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line, with the longest context and the tokens added to it at most."""
    sizes = {"rows": 1, "layers": 4, "width": 768, "heads": 12, "vocab_size": 50257, "rounds": 20}
    parser = measuring.make_parser(__doc__, **sizes)
    parser.add_argument("--kind", choices=KINDS, default="decoding", help="default: %(default)s")
    parser.add_argument("--lengths", nargs="+", type=measuring.positive, help="default: from 1024, or 128, tokens on")
    options = parser.parse_args(arguments)
    options.lengths = sorted(set(options.lengths or KINDS[options.kind][3]))
    options.longest, options.room = max(16, *options.lengths), WARM_UP + options.rounds + 2
    return options


# ---- models ----


def build(name: str, setting: argparse.Namespace) -> PreTrainedModel:
    """A randomly initialised model in eval mode, without dropout."""
    torch.manual_seed(0)
    positions = setting.longest + setting.room
    none = dict.fromkeys(("bos_token_id", "eos_token_id"))
    if name in (DYNAMIC, STATIC):
        sizes = {"n_embd": setting.width, "n_layer": setting.layers, "n_head": setting.heads, "n_positions": positions}
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config, make = hf.GPT2Config(**sizes, **no_dropout, **none, vocab_size=setting.vocab_size), hf.GPT2LMHeadModel
    elif name == BART:
        sizes = {"layers": setting.layers, "attention_heads": setting.heads, "ffn_dim": 4 * setting.width}
        sizes = {f"{part}_{size}": value for part in ("encoder", "decoder") for size, value in sizes.items()}
        shape = {"d_model": setting.width, "max_position_embeddings": positions, "vocab_size": setting.vocab_size}
        config, make = hf.BartConfig(**sizes, **shape, dropout=0.0), hf.BartForConditionalGeneration
    else:
        translates = setting.kind == "translation"
        family, fields = (name, measuring.slots_of(name, 64)) if translates else OWN[name]
        both = {"is_encoder_decoder": True, "decoder_layers": setting.layers, "position_embedding_type": "sinusoidal"}
        config = FAMILIES[family].config(
            vocab_size=setting.vocab_size,
            hidden_size=setting.width,
            num_hidden_layers=setting.layers,
            num_attention_heads=setting.heads,
            intermediate_size=4 * setting.width,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **({**both, "max_position_embeddings": positions} if translates else {}),
            **fields,
        )
        make = FAMILIES[family].seq2seq_lm if translates else FAMILIES[family].causal_lm
    with torch.device(setting.device):  # an accelerator draws random weights faster
        model = make(config)
    return model.to(device=setting.device, dtype=getattr(torch, setting.dtype)).eval()


def random_tokens(length: int, setting: argparse.Namespace) -> Tensor:
    """(rows, length) ids."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, setting.vocab_size, (setting.rows, length), generator=generator)
    return ids.to(setting.device)


# ---- states ----


@torch.no_grad()
def read_tokens(model: PreTrainedModel, lengths: Sequence[int], setting: argparse.Namespace) -> dict[int, MemoryCache]:
    """States of a model of this package after the first tokens of a text, by length."""
    cache, states, seen = MemoryCache(model.config), {}, 0
    for length in sorted(lengths):
        for part in random_tokens(max(lengths), setting)[:, seen:length].split(PART, dim=1):
            model(part, cache=cache, use_cache=True, logits_to_keep=1)
        states[length], seen = copy.deepcopy(cache), length
    return states


def fill_cache(name: str, model: PreTrainedModel, length: int, setting: argparse.Namespace) -> Cache:
    """A cache of GPT-2 with random keys and values, the same for both kinds of cache."""
    room = {} if name == DYNAMIC else {"max_cache_len": length + setting.room}
    cache = (StaticCache if room else DynamicCache)(config=model.config, **room)
    generator = torch.Generator(setting.device).manual_seed(length)
    kind = {"device": setting.device, "dtype": getattr(torch, setting.dtype)}
    shape = (setting.rows, setting.heads, length, setting.width // setting.heads)
    for layer in range(setting.layers):
        key, value = (torch.randn(shape, generator=generator, **kind) for _ in range(2))
        cache.update(key, value, layer)
    return cache


def make_states(name: str, model: PreTrainedModel, lengths: Sequence[int], setting: argparse.Namespace) -> Any:
    """The model's caches after contexts of these lengths."""
    if name in OWN:
        return read_tokens(model, lengths, setting)
    return {length: fill_cache(name, model, length, setting) for length in lengths}


def state_bytes(cache: Cache) -> int:
    """Size of all tensors in a cache."""
    if isinstance(cache, MemoryCache):
        return cache.nbytes
    pair = (getattr(cache, f"{part}_attention_cache", None) for part in ("self", "cross"))
    layers = [layer for part in pair if part for layer in part.layers] or cache.layers
    return sum(states.nbytes for layer in layers for states in (layer.keys, layer.values))


# ---- calls ----


def make_step(model: PreTrainedModel, cache: Cache, length: int, setting: argparse.Namespace) -> Callable[[], Tensor]:
    """One decoding step after a context of this length; the next call is the next step."""
    token = random_tokens(1, setting)
    mask = torch.ones(setting.rows, length + setting.room, dtype=torch.long, device=setting.device)
    seen = length

    @torch.no_grad()
    def step() -> Tensor:
        nonlocal seen
        seen += 1
        inputs = {"input_ids": token, "attention_mask": mask[:, :seen], "cache": cache}
        return model(**inputs, use_cache=True, logits_to_keep=1).logits

    return step


def make_training_step(model: PreTrainedModel, setting: argparse.Namespace) -> Callable[[int], None]:
    """A training step on texts of a given length."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True)

    def step(length: int) -> None:
        ids = random_tokens(length, setting)
        optimizer.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    return step


@torch.no_grad()
def read_source(name: str, model: PreTrainedModel, length: int, setting: argparse.Namespace) -> dict[str, Any]:
    """Read a source and the start token; return what the next steps need."""
    source, start = random_tokens(length, setting), random_tokens(1, setting)
    mask = torch.ones_like(source)
    if name == BART:
        state = {"encoder_outputs": model.get_encoder()(source, attention_mask=mask), "attention_mask": mask}
        state["cache"] = EncoderDecoderCache(DynamicCache(), DynamicCache())
        model(decoder_input_ids=start, use_cache=True, **state)
        return state
    cache = MemoryCache(model.config)
    model(source, attention_mask=mask, decoder_input_ids=start, cache=cache, use_cache=True)
    return {"cache": cache}


Actions = dict[str, Callable[[], Any]]


def make_actions(name: str, model: PreTrainedModel, setting: argparse.Namespace) -> tuple[dict[int, Actions], Any]:
    """The timed calls of a model by length, and the bytes of its states by length, if it has any."""
    actions: dict[int, Actions] = {}
    if setting.kind == "training":
        step = make_training_step(model, setting)
        step(16)
        return {length: {"training step": partial(step, length)} for length in setting.lengths}, None
    if setting.kind == "decoding":
        states = make_states(name, model, setting.lengths, setting)
        sizes = {length: state_bytes(states[length]) for length in setting.lengths}
        for length in setting.lengths:
            actions[length] = {"token": make_step(model, states[length], length, setting)}
            for _ in range(WARM_UP):
                actions[length]["token"]()
        return actions, sizes
    read = {length: read_source(name, model, length, setting) for length in setting.lengths}
    sizes = {length: state_bytes(read[length]["cache"]) for length in setting.lengths}

    @torch.no_grad()
    def token(state: dict[str, Any]) -> None:
        model(decoder_input_ids=random_tokens(1, setting), use_cache=True, **state)

    for length in setting.lengths:
        source = partial(read_source, name, model, length, setting)
        actions[length] = {"source": source, "token": partial(token, read[length])}
    return actions, sizes


def peak_memory(name: str, length: int, setting: argparse.Namespace) -> int:
    """Bytes that are held between calls, and the peak of the last call beyond them; run it in a separate process."""
    own = argparse.Namespace(**{**vars(setting), "lengths": [length]})
    model = build(name, own)
    actions, sizes = make_actions(name, model, own)
    held = sizes[length] if sizes else 4 * sum(parameter.nbytes for parameter in model.parameters())
    return held + measuring.extra_memory(list(actions[length].values())[-1], setting.device)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything."""
    own, peers, calls, _ = KINDS[options.kind]
    names = (*own, *peers)
    memory = measuring.measure_memory(peak_memory, dict.fromkeys(options.lengths, names), options)
    models = {name: build(name, options) for name in names if name != STATIC}
    if STATIC in names:
        models[STATIC] = models[DYNAMIC]
    actions, sizes = {}, {}
    for name in names:
        progress(f"context: {name}")
        made, sizes[name] = make_actions(name, models[name], options)
        actions |= {(n, call, name): action for n, by_call in made.items() for call, action in by_call.items()}
    times = measuring.interleave(actions, options.rounds, options.device, warm_up=False)
    entries = []
    for length in options.lengths:
        for call in calls:
            figures = {"peak_memory_bytes": memory[length]} if call == calls[-1] else {}
            if call == "token":
                figures["state_bytes"] = {name: sizes[name][length] for name in names}
            found = summaries.describe({name: times[length, call, name] for name in names}, peers, **figures)
            tokens = options.rows * (1 if call == "token" else length)
            entries.append({"length": length, "call": call, "rows": options.rows, "tokens": tokens, "models": found})
    described = {name: {"parameters": model.num_parameters()} for name, model in models.items()}
    return {"peers": peers, "models": described, "lengths": entries}


def subject(options: argparse.Namespace) -> str:
    """First part of the file name."""
    rows = "" if options.rows == 1 else f"-{options.rows}-rows"
    return f"generation-{options.kind}-{options.layers}-layer{rows}"


main = measuring.Benchmark(__file__, PROTOCOL, parse, measure, subject, summaries.table).main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
