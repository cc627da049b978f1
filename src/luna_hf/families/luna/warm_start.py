"""How Luna starts from a trained encoder.

The pack attention reads with the source's queries (beside a window, a tenth of them) and keys, and passes token
states on unchanged. The unpack attention is the source's own: because attention weights sum to one, projecting a slot
(bias included) equals projecting the tokens that it was packed from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..warm_start_rules import (
    ATTENTION,
    BLUR,
    BLURRED,
    IDENTITY,
    POSITIONS,
    SEGMENTS,
    ZERO,
    WarmStartRules,
    spread_places,
)

PACK_QUERY = f"{ATTENTION}.self.pack.query"

TEXT_TOKENS = "embeddings of text tokens at evenly spread positions, before their LayerNorm"

_COPIES = {
    "packed_embeddings.LayerNorm": "embeddings.LayerNorm",
    PACK_QUERY: f"{ATTENTION}.self.query",
    f"{ATTENTION}.self.pack.key": f"{ATTENTION}.self.key",
    f"{ATTENTION}.self.packed_layer_norm": f"{ATTENTION}.output.LayerNorm",
}


@dataclass
class LunaRules(WarmStartRules):
    """Luna's part in a warm start.

    Args:
        slot_tokens: token ids of a text, from which the tokens of the packed embeddings are drawn. By default they are
            drawn from the vocabulary: by Zipf's law if ids are ordered by frequency (RoBERTa and its relatives),
            otherwise uniformly (BERT, models of this package).

    A number of pack heads (`num_projected_attention_heads`) other than the source's splits its queries and keys at
    untrained boundaries: each pack head then mixes parts of several source heads.
    """

    slot_tokens: Sequence[int] | Tensor | None = None

    table = {
        "packed_embeddings.weight": TEXT_TOKENS,
        f"{ATTENTION}.self.pack.value.weight": IDENTITY,
        f"{ATTENTION}.self.pack.value.bias": ZERO,
        **{f"{new}.{kind}": f"{old}.{kind}" for new, old in _COPIES.items() for kind in ("weight", "bias")},
    }
    decided = {
        "tie_kv": (False, "the source has separate matrices for key and value, a tied Luna one for both"),
        "pack_activation": ("softplus", "only decoders use it"),
    }
    text_option = "slot_tokens"

    def check(self) -> None:
        """Refuse sources with another layout than RoBERTa's.

        Raises:
            ValueError: The source is pre-norm, or lacks learned positions or a LayerNorm on the embeddings, or its
                embeddings are projected.
        """
        config = self.config
        needed = {"norm_first": False, "position_embedding_type": "learned", "embedding_layer_norm": True}
        # Slots start as embeddings.
        for name, value in {**needed, "embedding_size": config.hidden_size}.items():
            found = config.embedding_width() if name == "embedding_size" else getattr(config, name)
            if found != value:
                raise ValueError(
                    f"The source has `{name}` {found!r}, but Luna only starts from encoders with {value!r}, such as "
                    "RoBERTa. Choose another source, or start ABC."
                )

    def rule(self, template: str) -> str:
        """The rule for a parameter, by its name in `table`."""
        rule = super().rule(template)
        return rule + BLURRED if self.blurs and template.startswith(PACK_QUERY) else rule

    def make(self, rule: str, layer: str | None, empty: Tensor) -> Tensor:
        """The values that a rule gives; the packed embeddings are tokens at evenly spread positions.

        Raises:
            ValueError: See `draw_tokens`.
        """
        if rule.endswith(BLURRED):
            return BLUR * super().make(rule.removesuffix(BLURRED), layer, empty)
        if rule != TEXT_TOKENS:
            return super().make(rule, layer, empty)
        loaded, tokens = self.loaded, self.draw_tokens(len(empty))
        places = spread_places(len(empty), loaded.longest) + loaded.first
        parts = [loaded.embedding[tokens], loaded.tensors[POSITIONS][places]]
        parts += [loaded.tensors[SEGMENTS][:1]] if SEGMENTS in loaded.tensors else []
        return sum(part.float() for part in parts)

    def draw_tokens(self, slots: int) -> Tensor:
        """(slots,) ids, drawn uniformly from the text, or from the vocabulary.

        Raises:
            ValueError: The text is empty or has ids outside the vocabulary.
        """
        config, generator = self.loaded.config, torch.Generator().manual_seed(self.seed)
        special = [config.pad_token_id, config.bos_token_id, config.eos_token_id]
        special = torch.tensor([token for token in special if isinstance(token, int)])
        given = self.slot_tokens
        ids = torch.arange(config.vocab_size) if given is None else torch.as_tensor(given, dtype=torch.long).flatten()
        ids = ids[~torch.isin(ids, special)]
        if given is None:
            ranks = torch.arange(1, len(ids) + 1, dtype=torch.float64)
            weights = 1 / ranks if self.loaded.layout.ordered_vocabulary else torch.ones_like(ranks)
            return ids[torch.multinomial(weights, slots, replacement=True, generator=generator)]
        if not len(ids) or ids.min() < 0 or ids.max() >= config.vocab_size:
            raise ValueError(
                f"`slot_tokens` must hold ids below {config.vocab_size}, and more than special tokens. Pass a text's."
            )
        return ids[torch.randint(len(ids), (slots,), generator=generator)]
