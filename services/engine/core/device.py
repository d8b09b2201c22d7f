"""What a CUDA device can do; tests replace `device_capability` to stand for a card that is not there."""

from __future__ import annotations

import torch

__all__ = ["device_capability"]


def device_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device, such as (9, 0); None for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
