"""The decoding state of causal models: a transformers `Cache` of constant size."""

import json
import zlib

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.utils import is_torchdynamo_compiling

# States within that of a decoder.
_PARTS = ("source", "written")
# Name of the saved tensor that tells which models can load a state.
_MADE_FOR = "made_for"
# Prefix of the names of what a decoder keeps of the source.
SOURCE = "source_"


class MemoryCacheLayer(CacheLayerMixin):
    """State of one layer: named tensors with the batch as their first dimension.

    Without gradients, tensors are updated in place while their shapes stay the same, because a compiled decoding step
    needs them at fixed addresses. Running sums are float32 whatever the model's dtype.
    """

    is_croppable = False  # tokens cannot be removed from a sum
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[str, Tensor] = {}
        # Tensors that do not depend on the input, kept from step to step, and the keys that they are valid for.
        self.constants: dict[str, Tensor] = {}
        self.constant_keys: dict[str, object] = {}

    def write(self, **states: Tensor | None) -> None:
        """Replace the named tensors; `None` leaves one unchanged."""
        may_overwrite = not torch.is_grad_enabled()  # no backward pass needs the old tensor
        # Outside of inference mode, its tensors cannot be written; a compiler cannot trace the question.
        any_tensor = is_torchdynamo_compiling() or torch.is_inference_mode_enabled()
        for name, state in states.items():
            if state is None:
                continue
            old = self.states.get(name)
            fits = old is not None and old.shape == state.shape and old.dtype == state.dtype and not old.requires_grad
            if may_overwrite and fits and (any_tensor or not old.is_inference()):
                old.copy_(state)
            else:
                self.states[name] = state if state.requires_grad else _own(state)
        self.is_initialized = True

    def lazy_initialization(self, *args: Tensor, **kwargs: Tensor) -> None:
        """Do nothing: the first `write` creates the tensors."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> None:
        """Not supported: the state does not consist of keys and values.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("A MemoryCache holds no keys and values and works only with luna_hf models.")

    def get_seq_length(self) -> int:
        """Return 0: lengths are counted by `MemoryCache`, not per layer."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset of the mask, which covers only the new tokens."""
        return query_length, 0

    def get_max_length(self) -> int:
        """Return -1, for no maximum."""
        return -1

    def reset(self) -> None:
        """Discard the state."""
        self.__init__()

    def detach(self) -> None:
        """Cut the state off from the graph of gradients, in place."""
        self.states = {name: _own(state) for name, state in self.states.items()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows, for beam search."""
        self.write(**{name: state.index_select(0, beam_idx.to(state.device)) for name, state in self.states.items()})

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self.write(**{name: state.repeat_interleave(repeats, dim=0) for name, state in self.states.items()})

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows by index."""
        self.write(**{name: state[indices.to(state.device)] for name, state in self.states.items()})


def _own(state: Tensor) -> Tensor:
    # Copied, because a view would keep the larger tensor behind it in memory.
    state = state.detach().clone(memory_format=torch.contiguous_format)
    if not is_torchdynamo_compiling():
        torch._dynamo.mark_static_address(state)
    return state


class MemoryCache(Cache):
    """Decoding state of a causal model, its `cache`; as large after 16 tokens as after 16,000.

    That of an encoder-decoder also contains the memory that the source was written to, which is as large for 16 source
    tokens as for 16,000.

    `generate` creates one and returns it with `return_dict_in_generate=True`. Create one to carry the state from call
    to call:

    ```python
    >>> cache = MemoryCache(model.config)
    >>> with torch.no_grad():
    ...     for part in input_ids.split(512, dim=1):
    ...         logits = model(part, cache=cache).logits
    ```

    With gradients, a backward pass reaches back to the first token. `detach` ends it at the last `detach`. A state
    belongs to the weights that it was made with.

    Args:
        config: the model's configuration.
        compileable: whether `generate` may compile the decoding step, as with `cache_implementation="static"`.
    """

    is_unfinished = False  # whether a pass has begun, and has not ended

    def __init__(self, config: PreTrainedConfig, compileable: bool = False) -> None:
        self.made_for_source = None
        if config.is_encoder_decoder and not config.is_decoder:
            self.made_for_source = config.encoder_part() if config.source_is_causal else None
            config = config.decoder_part()
        super().__init__(layers=[MemoryCacheLayer() for _ in range(config.num_hidden_layers)])
        self.compileable = compileable
        self.made_for = config
        # Input columns and real tokens so far, and a checksum of their ids, per row; they belong to no layer.
        self.rows = MemoryCacheLayer()
        # Where the source is causal: the states of its encoder, and of the cross-attentions that its tokens write to.
        self.source: MemoryCache | None = None
        self.written: MemoryCache | None = None

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile the decoding step."""
        return self.compileable

    @property
    def is_initialized(self) -> bool:
        """Whether any token has been processed."""
        return "tokens" in self.rows.states

    @property
    def has_source(self) -> bool:
        """Whether the state of an encoder-decoder contains the memory of the source, or of its first tokens."""
        return self.written is not None or any(name.startswith(SOURCE) for name in self.layers[0].states)

    @property
    def parts(self) -> list["MemoryCache"]:
        """The states of the source, where it is causal."""
        return [part for part in (self.source, self.written) if part is not None]

    def note_source(self, checksum: Tensor) -> None:
        """Record the checksum (b,) of a whole source, by which `generate` knows it again."""
        self.rows.write(source=checksum)

    @property
    def source_checksum(self) -> Tensor | None:
        """The checksum (b,) of the source, or of what has been read of it; `None` if unknown."""
        rows = self.rows if self.source is None else self.source.rows
        return rows.states.get("source" if self.source is None else "checksum")

    @property
    def nbytes(self) -> int:
        """Total size of all tensors in bytes."""
        layers, parts = (*self.layers, self.rows), sum(part.nbytes for part in self.parts)
        own = (tensor for layer in layers for tensor in (*layer.states.values(), *layer.constants.values()))
        return parts + sum(tensor.nbytes for tensor in own)

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first token or source."""
        for state in (self.rows.states or self.layers[0].states).values():
            return state.shape[0]
        return max((part.batch_size for part in self.parts), default=-1)

    @property
    def tokens(self) -> Tensor | None:
        """Number of real tokens of each row, (b,) long; `None` before the first token."""
        tokens = self.rows.states.get("tokens")
        return None if tokens is None else tokens.clone()  # which the next pass does not change

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of input columns so far, padding included."""
        return int(self.rows.states["columns"][0]) if self.is_initialized else 0

    def begin(self) -> None:
        """Note that something begins to write to the layers, which `finish` or `count` ends.

        Raises:
            ValueError: An earlier pass has not ended, so that some layers have read more than others.
        """
        self.check_finished()
        self.is_unfinished = True

    def check_finished(self) -> None:
        """Refuse a state that is half written; errors as of `begin`."""
        for part in (self, self.source, self.written):
            if part is not None and part.is_unfinished:
                raise ValueError(
                    "A pass with the state in `cache` has failed midway, and left it unusable. Create another state, "
                    "or load one from before."
                )

    def finish(self) -> None:
        """Note that a pass has written to all layers."""
        self.is_unfinished = False

    def count(self, tokens: Tensor, columns: int, checksum: Tensor | int = -1) -> None:
        """Record a forward pass, which has written to all layers.

        Args:
            tokens: (b,) real tokens of each row so far, including this pass.
            columns: number of input columns of this pass.
            checksum: (b,) checksum of the ids in this pass; negative if unknown.
        """
        seen, before = self.rows.states.get("columns"), self.rows.states.get("checksum")
        if seen is None:
            seen = before = torch.zeros_like(tokens)
        checksum = (before + checksum).masked_fill((before < 0) | (checksum < 0), -1)
        self.rows.write(tokens=tokens, columns=seen + columns, checksum=checksum)
        self.is_unfinished = False

    def reset(self) -> None:
        """Discard the state."""
        super().reset()
        self.rows.reset()
        self.finish()
        self.source = self.written = None

    def crop(self, tokens_to_remove: int) -> None:
        """Not supported, unless there is nothing to remove.

        Raises:
            ValueError: `tokens_to_remove` is not 0.
        """
        if tokens_to_remove:
            raise ValueError("Tokens cannot be removed from a MemoryCache; keep a copy from before they were added.")

    def detach(self) -> None:
        """Cut the state off from the graph of gradients, for truncated back-propagation through a long text."""
        for layer in self.layers:
            layer.detach()
        for part in self.parts:
            part.detach()

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the tensors of the state by name, which later passes do not change.

        Raises:
            ValueError: A pass has failed midway.
        """
        self.check_finished()
        places = {**{f"layers.{place}": layer for place, layer in enumerate(self.layers)}, "rows": self.rows}
        states = ((f"{place}.{name}", state) for place, layer in places.items() for name, state in layer.states.items())
        found = {name: state.detach().clone() for name, state in states}
        for name in _PARTS:
            part = getattr(self, name)
            found |= {} if part is None else {f"{name}.{key}": state for key, state in part.state_dict().items()}
        return {**found, _MADE_FOR: self._fingerprint(len(found))}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Replace the state by that of `state_dict`, of the same model.

        Raises:
            ValueError: The tensors are no state of the model.
        """
        tensors = dict(tensors)
        made_for = tensors.pop(_MADE_FOR, None)  # states of earlier versions have none
        if made_for is not None and not torch.equal(made_for.cpu(), self._fingerprint(len(tensors))):
            raise ValueError("The tensors are the state of another model, or not all of them. Load it with that model.")
        layers = {"rows": self.rows, **{f"layers.{place}": layer for place, layer in enumerate(self.layers)}}
        parts: dict[str, MemoryCache] = {}
        for name in tensors:
            if name.split(".")[0] not in _PARTS and name.rpartition(".")[0] not in layers:
                raise ValueError(f"The state of this model has no tensor {name!r}. Load a state that was made by it.")
        for name, config in zip(_PARTS, (self.made_for_source, self.made_for), strict=True):
            own = {key.removeprefix(f"{name}."): state for key, state in tensors.items() if key.startswith(f"{name}.")}
            if own and config is None:
                raise ValueError("The tensors are the state of a model with a causal source. Load it with that model.")
            if own:
                parts[name] = MemoryCache(config)
                parts[name].load_state_dict(own)
        self.reset()  # after all checks
        for name, tensor in tensors.items():
            place, _, own = name.rpartition(".")
            if place in layers:
                layers[place].write(**{own: tensor})
        for name, part in parts.items():
            setattr(self, name, part)

    def _fingerprint(self, count: int) -> Tensor:
        """A checksum of the fields that models must agree on to share a state, and the number of its tensors."""
        fields = json.dumps(state_fields(self.made_for), sort_keys=True, default=str)
        return torch.tensor([zlib.crc32(fields.encode()), count])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows, for beam search."""
        self.begin()
        super().reorder_cache(beam_idx)
        for part in (self.rows, *self.parts):
            part.reorder_cache(beam_idx)
        self.finish()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self.begin()
        super().batch_repeat_interleave(repeats)
        for part in (self.rows, *self.parts):
            part.batch_repeat_interleave(repeats)
        self.finish()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows by index."""
        self.begin()
        super().batch_select_indices(indices)
        for part in (self.rows, *self.parts):
            part.batch_select_indices(indices)
        self.finish()


def state_fields(config: PreTrainedConfig) -> dict[str, object]:
    """Return the fields, with their values, that models must agree on to share a state."""
    fields = {name: getattr(config, name) for name in ("model_type", *config.state_fields)}
    is_learned = fields.get("position_embedding_type") == "learned"
    if is_learned and not config.is_encoder_decoder:  # an encoder's config, converted by `as_decoder`
        fields["position_embedding_type"] = config.positions[True][0]
    return fields
