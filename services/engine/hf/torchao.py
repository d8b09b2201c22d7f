"""Quantises the linear layers of a draft model on a GPU with torchao, if that is installed."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from gammaray.errors import InvalidArgumentError

_CONFIGS = {"int8": "Int8WeightOnlyConfig", "int4": "Int4WeightOnlyConfig"}
_OTHERS = {"int8": "auto", "int4": "auto or int8"}


def quantise_module(module: PreTrainedModel, weights: str) -> None:
    """Replace the weights of a model's linear layers by torchao's integers, in place.

    Args:
        module: The model.
        weights: "int8" or "int4".

    Raises:
        InvalidArgumentError: torchao is not installed, or has no kernel for such weights on this device.
    """
    try:
        import torchao.quantization as torchao  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise InvalidArgumentError(
            "draft_weights", weights, f"auto: {weights} on a GPU needs the package torchao ({error})"
        ) from None
    config: Any = getattr(torchao, _CONFIGS[weights], None)
    try:
        if config is None:
            raise NotImplementedError(f"it has no {_CONFIGS[weights]}")
        torchao.quantize_(module, config())
    except (ImportError, NotImplementedError, RuntimeError, AssertionError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InvalidArgumentError(
            "draft_weights", weights, f"{_OTHERS[weights]}: torchao cannot run {weights} here ({reason})"
        ) from error
