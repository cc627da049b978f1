"""The decoding state of the causal models: a cache in transformers' sense, whose size does not depend on the length."""

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.utils import is_torchdynamo_compiling

from .causal_memory import CausalMemory


class MemoryCacheLayer(CacheLayerMixin):
    """What one layer keeps: tensors by name, each with the batch as its first dimension.

    Without gradients tensors are written in place as long as their shapes stay, so that a compiled decoding step finds
    them at the same addresses. Sums are float32 whatever the type of the model.
    """

    is_croppable = False  # sums cannot be taken apart again
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[str, Tensor] = {}
        # Tensors of the layer that no row changes and that need not be computed at every step, and what they depend on.
        self.constants: dict[str, Tensor] = {}
        self.constant_keys: dict[str, object] = {}

    def write(self, **states: Tensor | None) -> None:
        """Replace the state; `None` is left out."""
        for name, state in states.items():
            if state is None:
                continue
            old = self.states.get(name)
            if old is not None and _may_be_overwritten(old, state):
                old.copy_(state)
            else:
                self.states[name] = state if state.requires_grad else _own(state)
        self.is_initialized = True

    def sums(self) -> CausalMemory | None:
        """The memory that a causal scan left, if any."""
        if "value" not in self.states:
            return None
        return CausalMemory(**{name: self.states.get(name) for name in CausalMemory._fields})

    def lazy_initialization(self, *args: Tensor, **kwargs: Tensor) -> None:
        """Nothing to do: the first `write` makes the tensors."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> None:
        """Refused: keys and values are not what is kept.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("A MemoryCache holds sums, not keys and values: only models of luna_hf use it.")

    def get_seq_length(self) -> int:
        """Not known here: the cache counts."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Only the new tokens have a mask."""
        return query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.states.clear()
        self.constants.clear()
        self.constant_keys.clear()
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put other rows in the place of the rows, as beam search does."""
        self.write(**{name: state.index_select(0, beam_idx.to(state.device)) for name, state in self.states.items()})

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self.write(**{name: state.repeat_interleave(repeats, dim=0) for name, state in self.states.items()})

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        self.write(**{name: state[indices.to(state.device)] for name, state in self.states.items()})


def _may_be_overwritten(old: Tensor, new: Tensor) -> bool:
    """Whether the old tensor can take the new values: not if a gradient may still ask for what it holds."""
    if torch.is_grad_enabled() or old.requires_grad or old.shape != new.shape or old.dtype != new.dtype:
        return False
    return is_torchdynamo_compiling() or not old.is_inference() or torch.is_inference_mode_enabled()


def _own(state: Tensor) -> Tensor:
    # A copy: the state may be part of a larger tensor, which must not stay in memory with it.
    state = state.detach().clone(memory_format=torch.contiguous_format)
    if not is_torchdynamo_compiling():
        torch._dynamo.mark_static_address(state)
    return state


class MemoryCache(Cache):
    """The state of a causal model after some tokens, for `past_key_values`; the same bytes after 16 tokens and 16,000.

    `generate` makes one by itself, and returns it with `return_dict_in_generate=True`. Make one to carry a state from
    call to call:

    ```python
    >>> cache = MemoryCache(model.config)
    >>> for part in input_ids.split(512, dim=1):
    ...     logits = model(part, past_key_values=cache, use_cache=True).logits
    ```

    Args:
        config: of the model.
        compileable: whether `generate` may compile the decoding step (what `cache_implementation="static"` asks for).
    """

    def __init__(self, config: PreTrainedConfig, compileable: bool = False) -> None:
        super().__init__(layers=[MemoryCacheLayer() for _ in range(config.num_hidden_layers)])
        self.compileable = compileable
        self.made_for = state_fields(config)
        # What belongs to the rows and to no layer: columns of input so far, and how many of them were no padding.
        self.rows = MemoryCacheLayer()

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile the decoding step."""
        return self.compileable

    @property
    def is_initialized(self) -> bool:
        """Whether any token was seen."""
        return bool(self.rows.states)

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        layers = (*self.layers, self.rows)
        tensors = [tensor for layer in layers for tensor in (*layer.states.values(), *layer.constants.values())]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first token."""
        return self.rows.states["tokens"].shape[0] if self.is_initialized else -1

    @property
    def tokens(self) -> Tensor | None:
        """(b,) long, tokens of every row that were no padding; `None` before the first."""
        return self.rows.states.get("tokens")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of input so far, padding among them."""
        return int(self.rows.states["columns"][0]) if self.is_initialized else 0

    def count(self, tokens: Tensor, columns: int) -> None:
        """Enter what a forward pass has seen.

        Args:
            tokens: (b,) tokens of every row so far.
            columns: of the pass.
        """
        before = self.rows.states.get("columns", torch.zeros_like(tokens))
        self.rows.write(tokens=tokens, columns=before + columns)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.rows.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Refused, unless there is nothing to remove.

        Raises:
            ValueError: Tokens cannot be taken out of a sum.
        """
        if tokens_to_remove:
            raise ValueError("No token can be taken out of the sums of a MemoryCache. Keep a copy of an earlier one.")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put other rows in the place of the rows, as beam search does."""
        super().reorder_cache(beam_idx)
        self.rows.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        self.rows.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        super().batch_select_indices(indices)
        self.rows.batch_select_indices(indices)


def state_fields(config: PreTrainedConfig) -> dict[str, object]:
    """What two models must have in common for one to go on from the other's state."""
    fields = {name: getattr(config, name) for name in ("model_type", *config.state_fields)}
    if fields.get("position_embedding_type") == "learned":  # an encoder's config, of which a decoder is made
        fields["position_embedding_type"] = "rotary"
    return fields
