"""Which engine computes a worker's model."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch

from gammaray.config import TargetSettings
from gammaray.errors import InvalidArgumentError

_log = logging.getLogger(__name__)


def uses_vllm(engine: str, device: str) -> bool:
    """Return whether vLLM serves a model.

    Args:
        engine: The setting `engine`; "auto" takes vLLM where it is installed and there is a GPU.
    """
    if engine != "auto":
        return engine == "vllm"
    return device != "cpu" and torch.cuda.is_available() and find_spec("vllm") is not None


def target_uses_vllm(settings: TargetSettings) -> bool:
    """Return whether vLLM serves a target; "auto" does not take it for what it does not serve.

    Args:
        settings: Of the worker; with the engine vllm they name nothing that it does not serve.

    Raises:
        InvalidArgumentError: Several devices or adapters are asked for, and vLLM does not serve the model.
    """
    is_vllm = uses_vllm(settings.engine, settings.device)
    if is_vllm and settings.engine == "auto":
        asked = {
            "deterministic": settings.deterministic,
            "draft_weights": bool(settings.head) and settings.draft_weights != "auto",
        }
        if any(asked.values()):
            names = " and ".join(name for name, is_asked in asked.items() if is_asked)
            _log.warning("the engine is not vllm, which does not serve %s", names)
            is_vllm = False
    if settings.tensor_parallel > 1 and not is_vllm:
        allowed = "1: vLLM, which spreads a model over several, is not the engine here"
        raise InvalidArgumentError("tensor_parallel", settings.tensor_parallel, allowed)
    if settings.lora and not is_vllm:
        raise InvalidArgumentError(
            "lora", settings.lora, "empty: vLLM, which serves adapters, is not the engine"
        )
    return is_vllm
