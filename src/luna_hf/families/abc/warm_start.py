"""How ABC starts from a trained encoder: with a control from the source's own attention instead of a random one.

A slot of ABC-MLP is attention with a learned query that does not depend on the text (section 4 of the paper, "pseudo
query"). A trained encoder has such a query for every position: what its attention asks for there. The slots then hold
the surroundings of positions spread evenly over the text, and a token finds its own in the nearest slot.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from ..warm_start_rules import (
    ATTENTION,
    BLUR,
    BLURRED,
    INITIALISED,
    POSITIONS,
    PROJECTION,
    SEGMENTS,
    Layout,
    WarmStartRules,
    spread_places,
)
from .configuration import CONTROLS

OWN_ATTENTION = "the source's own attention from evenly spread positions"

# Fields and options that only some controls use.
_USERS = {
    "memory_size": tuple(control for control in CONTROLS if control != "full"),
    "control_activation": ("mlp",),
    "share_control": ("mlp", "linformer", "random"),
    "control_init": ("mlp", "linformer"),
    "control_seed": ("random",),
    "cluster_iterations": ("cluster",),
}


@dataclass
class AbcRules(WarmStartRules):
    """ABC's part in a warm start.

    Args:
        control_init: how a learned control starts. `"attention"`, the default, starts every slot as the source's
            attention (of the first layer, if layers share the control) from one of `memory_size` evenly spread
            positions. `"random"` initialises it as in a new model, like the paper, and takes far longer to recover. It
            is also random where the control does not weigh tokens by a softmax (`mlp` with relu or sigmoid), or the
            source's embeddings lack learned positions or a norm. The report shows which it was.

    An ABC source keeps its fields unless others are given, and its trained control if kind and shape fit; Linformer's
    shape depends on the longest input.
    """

    control_init: str | None = None

    table = {"control.weight": OWN_ATTENTION, f"{ATTENTION}.self.control.weight": OWN_ATTENTION}
    softmax = {"memory_control": "full"}
    layout = Layout(counts_pad_rows=False, fixed_head_activation=False, ordered_vocabulary=False)

    @staticmethod
    def slots_field(config: PreTrainedConfig) -> str | None:
        """The size of the memory; `None` for full attention."""
        return None if config.memory_control == "full" else "memory_size"

    @staticmethod
    def kind(name: str, config: PreTrainedConfig) -> str:
        """The control that a parameter belongs to, if any."""
        return getattr(config, "memory_control", "") if "control." in name else ""

    @staticmethod
    def without_effect(name: str, config: PreTrainedConfig) -> str:
        """The controls to which a field or option applies, if the config's is not one of them; otherwise empty."""
        users, control = _USERS.get(name), config.memory_control
        return "" if users is None or control in users else f"`memory_control` {', '.join(users)}, not {control}"

    def check(self) -> None:
        """Refuse a start that the control cannot have.

        Raises:
            ValueError: `control_init` is unknown or does not suit the control or the source.
        """
        if self.control_init not in (None, "attention", "random"):
            raise ValueError(f"`control_init` is {self.control_init!r}, but must be 'attention' or 'random'.")
        if self.control_init and (users := self.without_effect("control_init", self.config)):
            raise ValueError(f"`control_init` only applies to {users}. Leave it out.")
        if self.control_init == "attention" and not self.can_attend():
            raise ValueError(
                "`control_init` cannot be 'attention': it needs a control with a softmax, and a post-norm source with "
                "learned positions and a LayerNorm on the embeddings. Leave it out to start at random."
            )

    def can_attend(self) -> bool:
        """Whether the control can start as the source's attention, which must be able to read embedded positions."""
        loaded, config = self.loaded, self.config
        has_positions = loaded.first + loaded.longest == len(loaded.tensors.get(POSITIONS, ()))
        has_norm = "embeddings.LayerNorm.weight" in loaded.tensors and not config.norm_first
        is_softmax = config.memory_control != "mlp" or config.control_activation == "exp"
        return has_positions and has_norm and is_softmax

    def rule(self, template: str) -> str:
        """The rule for a parameter, by its name in `table`."""
        rule = super().rule(template)
        if rule == OWN_ATTENTION and (self.control_init == "random" or not self.can_attend()):
            return INITIALISED
        return rule + BLURRED if rule == OWN_ATTENTION and self.blurs else rule

    def make(self, rule: str, layer: str | None, empty: Tensor) -> Tensor:
        """The values that a rule gives, in any floating-point dtype.

        A learned control (h * m, d) is W of equation 7, such that `W x` are the logits of the source's attention,
        `(W_q s + b_q) . W_k x / sqrt(c)`, where s is the state of a position without a word. The bias of the keys adds
        the same to all tokens of a slot, so the softmax cancels it. Beside a window W starts at a tenth. Linformer's
        control (h * m, N) is the softmax of these logits over all positions.
        """
        if rule.removesuffix(BLURRED) != OWN_ATTENTION:
            return super().make(rule, layer, empty)
        config, longest, heads = self.config, self.loaded.longest, self.config.num_attention_heads
        attention = f"{ATTENTION}.self".replace("{}", layer or "0")
        parts = (f"{attention}.{part}" for part in ("query.weight", "query.bias", "key.weight"))
        query, bias, key = (self.loaded.tensors[part].float() for part in parts)
        states = self.place_states()
        asked = F.linear(states[spread_places(config.memory_size, longest)], query, bias).unflatten(-1, (heads, -1))
        logits = torch.einsum("mhc,hcd->hmd", asked, key.unflatten(0, (heads, -1)))
        sharpness = BLUR if rule.endswith(BLURRED) else 1.0
        weight = (logits * (sharpness * asked.shape[-1] ** -0.5)).flatten(0, 1)
        if config.memory_control == "mlp":
            return weight
        repeats = -(-config.max_position_embeddings // longest)
        return (weight @ states.repeat(repeats, 1)[: config.max_position_embeddings].T).softmax(-1)

    def place_states(self) -> Tensor:
        """(p, d) float32, the first layer's input at positions without a word.

        That is LayerNorm(position + first segment), projected if the source projects its embeddings.
        """
        tensors = self.loaded.tensors
        states = tensors[POSITIONS][self.loaded.first :].float()
        states = states + tensors[SEGMENTS][0].float() if SEGMENTS in tensors else states
        norm, projection = (
            [tensors[f"{name}.{kind}"].float() for kind in ("weight", "bias") if f"{name}.{kind}" in tensors]
            for name in ("embeddings.LayerNorm", PROJECTION)
        )
        states = F.layer_norm(states, states.shape[-1:], *norm, self.config.layer_norm_eps)
        return F.linear(states, *projection) if projection else states
