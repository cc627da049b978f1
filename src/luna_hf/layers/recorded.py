"""Models and layers that can be copied and pickled after their outputs were recorded."""

from collections import OrderedDict
from typing import Any

from torch import nn
from transformers.utils import output_capturing


class Recorded(nn.Module):
    """A module whose outputs transformers records (`_can_record_outputs`), or the model that has such modules.

    Transformers records with forward hooks that cannot be pickled, and marks the model that has them.
    """

    def __getstate__(self) -> dict[str, Any]:
        """Leave out these hooks and the mark, so that a copy gets its own hooks when it needs them."""
        hooks = OrderedDict(
            (key, hook)
            for key, hook in self._forward_hooks.items()
            if getattr(hook, "__module__", None) != output_capturing.__name__
        )
        state = {**self.__dict__, "_forward_hooks": hooks}
        state.pop("_output_capturing_hooks_installed", None)
        return state
