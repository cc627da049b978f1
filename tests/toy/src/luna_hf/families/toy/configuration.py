"""Configuration of the toy mechanism."""

from huggingface_hub.dataclasses import strict

from ...configuration import BoundedMemoryConfig


@strict
class ToyConfig(BoundedMemoryConfig):
    r"""
    Configuration of the toy models. In addition to the fields of all families (see `BoundedMemoryConfig`):

    Args:
        num_slots: number of slots per head.
    """

    model_type = "toy"
    state_fields = (*BoundedMemoryConfig.state_fields, "num_slots")
    slots_field = "num_slots"

    minimum = {**BoundedMemoryConfig.minimum, "num_slots": 1}

    num_slots: int = 64


__all__ = ["ToyConfig"]
