"""Loads GGUF files by transformers' own reader, and refuses those that it would load as another model.

transformers skips tensors without a place in the model, and initialises at random what the file lacks, both
without an error; such files are refused here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from gammaray.gguf import check_packages, pretrained_arguments, read_header
from services.engine.core.errors import InvalidModelError, UnsupportedModelError

_log = logging.getLogger(__name__)


def load_gguf_config(name: str) -> PretrainedConfig:
    """Return the configuration that transformers derives from a file's metadata.

    Raises:
        InvalidArgumentError: The file is missing, truncated or corrupt, or the reader is not installed.
        UnsupportedModelError: transformers does not know the architecture, or leaves out what it needs.
    """
    header = read_header(name)
    check_packages(name)
    with pretrained_arguments(name) as (source, arguments):
        try:
            config: PretrainedConfig = AutoConfig.from_pretrained(source, **arguments)
        except Exception as error:  # its kind depends on the file's content
            raise UnsupportedModelError(name, f"transformers cannot read it: {error}") from error
    window = header.metadata.get(f"{header.architecture}.attention.sliding_window", 0)
    if isinstance(window, int) and 0 < window < header.context_length and window != _window(config):
        reason = f"transformers does not read the sliding window of {window} tokens of {header.architecture}"
        raise UnsupportedModelError(name, reason)
    return config


def load_gguf_module(name: str, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model in a file, dequantised to `dtype`, on the CPU, with eager attention.

    Args:
        name: The file.
        config: What `load_gguf_config` returned for it; gguf takes seconds to read the metadata again.
        dtype: Type of the weights.

    Raises:
        InvalidArgumentError: The file is missing, truncated or corrupt, or the reader is not installed.
        UnsupportedModelError: transformers cannot load it, or not all of it.
    """
    header = read_header(name)
    check_packages(name)
    _log.info("%s", header.summary(str(dtype).removeprefix("torch."), dtype.itemsize))
    with pretrained_arguments(name) as (source, arguments):
        try:
            result: Any = AutoModelForCausalLM.from_pretrained(
                source,
                **arguments,
                config=config,
                quantization_config=GgufConfig(dequantize=True),
                dtype=dtype,
                attn_implementation="eager",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        except Exception as error:  # its kind depends on the file's content
            raise UnsupportedModelError(
                name, f"transformers cannot load it as a causal model: {error}"
            ) from error
    module: PreTrainedModel = result[0]
    info: Mapping[str, Any] = result[1]
    if mismatched := sorted(info["mismatched_keys"]):
        key, stored, expected = mismatched[0]
        allowed = f"{list(expected)}, which its metadata say"
        raise InvalidModelError(name, Path(name).name, key, f"the shape {list(stored)}", allowed)
    if missing := sorted(info["missing_keys"]):
        raise UnsupportedModelError(
            name, f"it lacks {len(missing)} weights of the model, such as {missing[0]}"
        )
    num_weights = sum(parameter.numel() for parameter in module.parameters())
    if num_weights != header.num_weights:
        raise UnsupportedModelError(
            name, f"transformers uses {num_weights:,} of its {header.num_weights:,} weights"
        )
    return module


def _window(config: PretrainedConfig) -> int | None:
    window: int | None = getattr(config.get_text_config(), "sliding_window", None)
    return window
