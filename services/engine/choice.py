"""Which engine computes a worker's model."""

from __future__ import annotations

from importlib.util import find_spec

import torch

__all__ = ["uses_vllm"]


def uses_vllm(engine: str, device: str) -> bool:
    """Return whether vLLM serves a model.

    Args:
        engine: The setting `engine`; "auto" takes vLLM where it is installed and there is a GPU.
        device: The setting `device`.
    """
    if engine != "auto":
        return engine == "vllm"
    return device != "cpu" and torch.cuda.is_available() and find_spec("vllm") is not None
