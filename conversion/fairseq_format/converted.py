"""Loading a Luna of transformers that has a counterpart in the authors' code."""

import pickle

import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

import luna_hf
from luna_hf.scripting import UserError, reason

from .config import check_class

_LOADING_ERRORS = (OSError, SafetensorError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError)


def read_config(source: str) -> PreTrainedConfig:
    """The config of a folder or Hub repository.

    Raises:
        UserError: It is missing, unreadable, or not a Luna's.
    """
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError, TypeError, StrictDataclassError, HFValidationError, HfHubHTTPError) as error:
        raise UserError(
            f"{source} is neither a folder with a readable config.json nor a model on the Hub ({reason(error)})."
        ) from error
    if config.model_type != luna_hf.LunaConfig.model_type:
        raise UserError(f"{source} has the model type {config.model_type!r}, but the authors' code has only 'luna'.")
    check_class((config.architectures or ["a model without a class (`architectures`)"])[0])
    return config


def load(source: str, dtype: torch.dtype | str = "auto") -> tuple[PreTrainedModel, list[str]]:
    """The model of a folder or Hub repository in eval mode, and the problems of its weights.

    Args:
        source: folder or Hub repository.
        dtype: type of the parameters; `"auto"` keeps that of the stored weights, whatever the config says.

    Raises:
        UserError: It cannot be read, or the authors have no such model.
    """
    config = read_config(source)
    config.dtype = None
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its warnings are the problems returned here
    try:
        model, info = getattr(luna_hf, config.architectures[0]).from_pretrained(
            source, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except _LOADING_ERRORS as error:
        raise UserError(
            f"The weights of {source} cannot be loaded ({reason(error)}). Copy or download it again."
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    problems = [f"the weight {name} is missing" for name in sorted(info["missing_keys"])]
    problems += [f"the weight {name} is not part of the model" for name in sorted(info["unexpected_keys"])]
    problems += [
        f"the weight {name} is {tuple(stored)}, but {tuple(wanted)} by config.json"
        for name, stored, wanted in sorted(info["mismatched_keys"])
    ]
    return model.eval(), problems
