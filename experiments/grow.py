"""A RoBERTa of twice the width and depth that starts out computing nearly what a trained one does.

Training a small model of four layers from scratch spends most of its time on a plateau; growing a trained model of two
layers avoids it. Features, heads and inner units are doubled as in Net2Net (Chen et al., 2016): the function stays the
same. Behind every layer comes a new one whose two sub-layers add nothing yet; its LayerNorms keep their input but for
the differences in scale between tokens.
"""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, RobertaForMaskedLM

# How unevenly a feature's outgoing weight is split between its two copies; equal copies would stay equal for ever.
SPREAD = 0.25


def widen(model: PreTrainedModel) -> PreTrainedModel:
    """A RoBERTa with a masked-LM head, twice as wide, that computes the same (dropout aside)."""
    config = copy.deepcopy(model.config)
    for name in ("hidden_size", "intermediate_size", "num_attention_heads"):
        setattr(config, name, 2 * getattr(config, name))
    wide = RobertaForMaskedLM(config).to(model.dtype).eval()
    generator = torch.Generator().manual_seed(0)
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    weights = {name: _doubled(name, weight, linear, generator) for name, weight in model.state_dict().items()}
    wide.load_state_dict(weights)
    wide.tie_weights()
    return wide


def _doubled(name: str, weight: Tensor, linear: set[str], generator: torch.Generator) -> Tensor:
    if name in ("lm_head.bias", "lm_head.decoder.bias") or not weight.is_floating_point():
        return weight
    if ("embeddings" in name and weight.ndim == 2) or name == "lm_head.decoder.weight":  # these two are one matrix
        return weight.repeat(1, 2)
    if name.startswith("lm_head.layer_norm"):  # the tied output layer would sum over both copies of a feature
        return weight.repeat(2) / 2
    if name not in linear:
        return weight.repeat(2)
    rows = weight.repeat(2, 1)
    share = 0.5 + SPREAD * torch.randn(rows.shape, generator=generator).to(rows)
    return torch.cat([share * rows, (1 - share) * rows], 1)


@torch.no_grad()
def deepen(model: PreTrainedModel, input_ids: Tensor) -> PreTrainedModel:
    """A RoBERTa with a new layer behind every layer; `input_ids` (b, n) is a text to fit the new LayerNorms to."""
    states = model(input_ids, output_hidden_states=True).hidden_states[1:]
    layers = []
    for layer, output in zip(model.base_model.encoder.layer, states, strict=True):
        new = copy.deepcopy(layer)
        for part in (new.attention.output, new.output):
            part.dense.weight.zero_()
            part.dense.bias.zero_()
            part.LayerNorm.weight.fill_(output.std(-1, unbiased=False).mean())
            part.LayerNorm.bias.fill_(output.mean())
        layers += [layer, new]
    deep = copy.deepcopy(model)
    deep.base_model.encoder.layer = nn.ModuleList(layers)
    deep.config.num_hidden_layers = len(layers)
    return deep
