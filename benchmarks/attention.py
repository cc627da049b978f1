"""Attention alone, after the projections of a layer, beside softmax attention: forward, and with its gradients.

    python benchmarks/attention.py
    python benchmarks/attention.py --causal --lengths 2048 8192 16384 --check-floors

Contenders of encoders: linear attention, its re-weightings and LAVO; `eager` computes the softmax step by step and
stores its maps, like the softmax attention of the papers, `sdpa` is PyTorch's fused one. With `--causal`: the causal
scan alone, and the causal attention of every family.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import measuring
import summaries
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from luna_hf import LavoConfig, LeapformerConfig
from luna_hf.families.lavo.attention import LavoAttention, LavoCausalAttention, mean_of_parts
from luna_hf.families.leapformer.attention import LeapformerAttention, LeapformerCausalAttention
from luna_hf.ops.attention import softmax_attention
from luna_hf.ops.causal_memory import attend_causal_memory
from luna_hf.ops.context import make_context
from luna_hf.ops.scan import causal_scan

PROTOCOL = (
    "Random normal queries, keys and values in the layout of the projections; no padding, no dropout, random "
    "parameters. Luna's pack weights are softplus of normal numbers, ABC's slot logits normal numbers; LeaPformer "
    "includes the network of its proportions, and LAVO's window has as many tokens as it has slots. forward: no "
    "gradients; backward: forward, and backward to all inputs. Time: wall clock of one call; every round times every "
    "contender at every length, in an order that rotates from round to round; ratios are taken within a round, medians "
    "over rounds; the first round warms up. The process keeps freed memory for the next call. Memory: peak resident "
    "size of one call minus the size before it, each contender, length and call in its own process, where freed blocks "
    "of 1 MiB and more go back to the system."
)
CALLS = ("forward", "backward")
REWEIGHTINGS = {"linear": "none", "cosformer": "cosine", "leapformer": "learned"}
CONTENDERS = {
    False: (*REWEIGHTINGS, "lavo", "eager", "sdpa"),
    True: ("scan", "luna", "abc", "leapformer", "lavo", "sdpa"),
}
PEERS = {False: ["sdpa", "eager"], True: ["sdpa"]}
Inputs = list[Tensor]  # query, key, value: (b, h, n, c); weights of the slots: (b, h, n, slots)


@cache
def make_module(name: str, causal: bool, heads: int, size: int, slots: int) -> nn.Module:
    """The attention of a contender with parameters, which are random."""
    shape = {"hidden_size": heads * size, "num_attention_heads": heads, "attention_probs_dropout_prob": 0.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name in REWEIGHTINGS:
            config = LeapformerConfig(**shape, is_decoder=causal, reweighting=REWEIGHTINGS[name])
            return (LeapformerCausalAttention if causal else LeapformerAttention)(config)
        config = LavoConfig(**shape, is_decoder=causal, num_bases=slots, local_window=slots, attn_implementation="sdpa")
        module = (LavoCausalAttention if causal else LavoAttention)(config)
        module.initialise(config)
        return module


def attend(name: str, causal: bool, inputs: Inputs, training: bool = False) -> Tensor:
    """Outputs of a contender, with b, n, h and c in any order."""
    query, key, value, weights = inputs
    length, slots = query.shape[2], weights.shape[3]
    if name == "eager":
        return softmax_attention(query, key, value, scaling=query.shape[3] ** -0.5)[0]
    if name == "sdpa":
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    if name == "scan":
        return causal_scan(query, key, value)[0]
    if name == "luna":
        steps = torch.arange(1, length + 1, device=query.device)[None]
        return attend_causal_memory(query, key, value, F.softplus(weights), "steps", steps=steps)[0]
    if name == "abc":
        return attend_causal_memory(query, key, value, weights, "softmax")[0]
    module = make_module(name, causal, query.shape[1], query.shape[3], slots).to(query).train(training)
    context = make_context(None, length, query.device, window=slots if name == "lavo" else 0)
    if name == "lavo":
        return mean_of_parts(module.attend(query, key, value, context))[0]
    if causal:
        return module.attend(query, key, value, context)
    return module.read_tokens(query, module.write_tokens(key, value, context), context)


@cache
def make_inputs(length: int, rows: int, heads: int, size: int, slots: int, device: str) -> Inputs:
    """The same numbers for all contenders, tokens before heads in memory as projections leave them."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(rows, length, heads, width) for width in (size, size, size, slots)]
    return [torch.randn(shape, generator=generator).to(device).transpose(1, 2).requires_grad_() for shape in shapes]


def make_action(name: str, length: int, call: str, options: argparse.Namespace) -> Callable[[], None]:
    """The timed call."""
    inputs = make_inputs(length, options.rows, options.heads, options.size, options.slots, options.device)
    if call == "forward":

        @torch.no_grad()
        def forward() -> None:
            attend(name, options.causal, inputs)

        return forward
    used = inputs if name in ("luna", "abc") else inputs[:3]

    def backward() -> None:
        output = attend(name, options.causal, inputs, training=True)
        torch.autograd.grad(output, used, torch.ones_like(output))

    return backward


def peak_memory(call: str, name: str, length: int, options: argparse.Namespace) -> int:
    """Peak bytes of one call beyond its inputs, after one on 16 tokens; run it in a separate process."""
    make_action(name, 16, call, options)()
    return measuring.extra_memory(make_action(name, length, call, options), options.device)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    sizes = {"heads": 12, "size": 64, "slots": 64, "rows": 1, "rounds": 5}
    parser = measuring.make_parser(__doc__, lengths=[1024, 4096], **sizes)
    parser.add_argument("--causal", action="store_true", help="the causal attentions, and the scan")
    options = parser.parse_args(arguments)
    options.lengths = sorted(set(options.lengths))
    if options.dtype != "float32":
        parser.error("--dtype must be float32: the operators are measured as they are tested")
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything."""
    names, entries = CONTENDERS[options.causal], []
    every = dict.fromkeys(options.lengths, names)
    memory = {call: measuring.measure_memory(partial(peak_memory, call), every, options) for call in CALLS}
    measuring.keeping_allocator()
    places = [(length, call, name) for length in options.lengths for call in CALLS for name in names]
    actions = {(length, call, name): make_action(name, length, call, options) for length, call, name in places}
    times = measuring.interleave(actions, options.rounds, options.device)
    for length in options.lengths:
        for call in CALLS:
            rounds = {name: times[length, call, name] for name in names}
            models = summaries.describe(rounds, PEERS[options.causal], peak_memory_bytes=memory[call][length])
            entries.append({"length": length, "call": call, "rows": options.rows, "models": models})
    return {"peers": PEERS[options.causal], "lengths": entries}


def subject(options: argparse.Namespace) -> str:
    """First part of the file name."""
    return "attention-causal" if options.causal else f"attention-{options.heads}-heads-of-{options.size}"


main = measuring.Benchmark(__file__, PROTOCOL, parse, measure, subject, summaries.table).main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
