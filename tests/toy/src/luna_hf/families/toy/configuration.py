"""Configuration of the toy mechanism."""

from huggingface_hub.dataclasses import strict

from ...configuration import BoundedMemoryConfig


@strict
class ToyConfig(BoundedMemoryConfig):
    r"""
    Configuration of the toy models. In addition to the fields of all families (see `BoundedMemoryConfig`):

    Args:
        num_slots (`int`, defaults to 64):
            Number of slots per head.
    """

    model_type = "toy"
    state_fields = (*BoundedMemoryConfig.state_fields, "num_slots")
    slots_field = "num_slots"

    num_slots: int = 64

    def validate_values(self) -> None:
        """Validate every field, at construction and again when the config is saved."""
        super().validate_values()
        self._require("num_slots", lambda value: value >= 1, "at least 1")


__all__ = ["ToyConfig"]
