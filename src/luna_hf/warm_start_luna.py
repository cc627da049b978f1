"""How Luna starts from a trained encoder.

The pack attention reads with the source's queries and keys and hands on token states as they are. The unpack attention
is the source's own: projecting a slot, bias included, is projecting the tokens it was packed from, since attention
weights sum to one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .warm_start_rules import ATTENTION, IDENTITY, POSITIONS, SEGMENTS, ZERO, WarmStartRules, spread_places

TEXT_TOKENS = "embeddings of text tokens at evenly spread positions, before their LayerNorm"

_COPIES = {
    "packed_embeddings.LayerNorm": "embeddings.LayerNorm",
    f"{ATTENTION}.self.pack.query": f"{ATTENTION}.self.query",
    f"{ATTENTION}.self.pack.key": f"{ATTENTION}.self.key",
    f"{ATTENTION}.self.packed_layer_norm": f"{ATTENTION}.output.LayerNorm",
}


@dataclass
class LunaRules(WarmStartRules):
    """Luna's part in a warm start.

    Args:
        slot_tokens: token ids of a text, from which the packed embeddings' tokens are drawn. Without it they are drawn
            from the vocabulary: by Zipf's law where ids go from frequent to rare (RoBERTa and its relatives), uniformly
            elsewhere (BERT, models of this package).

    Other pack heads than the source's (`num_projected_attention_heads`) cut its queries and keys where they were not
    trained to be cut: each pack head then mixes parts of the source's.
    """

    slot_tokens: Sequence[int] | Tensor | None = None

    table = {
        "packed_embeddings.weight": TEXT_TOKENS,
        f"{ATTENTION}.self.pack.value.weight": IDENTITY,
        f"{ATTENTION}.self.pack.value.bias": ZERO,
        **{f"{new}.{kind}": f"{old}.{kind}" for new, old in _COPIES.items() for kind in ("weight", "bias")},
    }
    decided = {"tie_kv": (False, "the source has a key and a value matrix, where a tied Luna has one for both")}

    def check(self) -> None:
        """Refuse sources that are not laid out as RoBERTa.

        Raises:
            ValueError: What Luna needs.
        """
        needed = {"norm_first": False, "position_embedding_type": "learned", "embedding_layer_norm": True}
        if any(getattr(self.config, name) != value for name, value in needed.items()):
            raise ValueError(
                "Luna starts only from post-norm encoders with learned positions and a LayerNorm on the embeddings, "
                "such as RoBERTa; this source differs."
            )

    def make(self, rule: str, layer: str | None, empty: Tensor) -> Tensor:
        """The values that a rule gives; for the packed embeddings, those of tokens at evenly spread positions.

        Raises:
            ValueError: See `draw_tokens`.
        """
        if rule != TEXT_TOKENS:
            return super().make(rule, layer, empty)
        loaded, tokens = self.loaded, self.draw_tokens(len(empty))
        places = spread_places(len(empty), loaded.longest) + loaded.first
        parts = [loaded.embedding[tokens], loaded.tensors[POSITIONS][places]]
        parts += [loaded.tensors[SEGMENTS][:1]] if SEGMENTS in loaded.tensors else []
        return sum(part.float() for part in parts)

    def draw_tokens(self, slots: int) -> Tensor:
        """(slots,) ids: of the text, each token as likely; or of the vocabulary.

        Raises:
            ValueError: The text is empty, or has ids outside the vocabulary.
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
        if not len(ids):
            raise ValueError("`slot_tokens` holds no tokens besides special ones. Give the ids of a text.")
        if ids.min() < 0 or ids.max() >= config.vocab_size:
            raise ValueError(
                f"`slot_tokens` holds ids up to {int(ids.max())}, but the vocabulary has {config.vocab_size}. "
                "Use the source's own tokenizer."
            )
        return ids[torch.randint(len(ids), (slots,), generator=generator)]
