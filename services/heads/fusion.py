"""Features of the target's hidden states, computed beside the target for a head that is elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from services.engine.native.library import load_kernel
from services.heads.eagle import EagleHead
from services.heads.kernel import KernelMap

__all__ = ["FeatureFusion"]


class FeatureFusion:
    """Makes features of hidden states.

    Args:
        head: The head, on its device, in its type; of its modules only those of `EagleHead.fuse` are used.
        uses_kernel: Use the compiled kernel on a CPU.

    Attributes:
        taps: The hidden states that it reads, by the ids of `Engine.tap`.
        width: Values of a feature.
    """

    def __init__(self, head: EagleHead, *, uses_kernel: bool = True) -> None:
        self.taps, self.width = head.config.taps, head.feature_size
        self._head, self._fc = head, None
        weight = self._weight
        is_covered = weight.device.type == "cpu" and weight.dtype == torch.float32
        if uses_kernel and head.config.is_fused and is_covered:
            library = load_kernel().library
            self._fc = None if library is None else KernelMap(head.fc, library)

    def __call__(self, states: Tensor) -> Tensor:
        """Return features [positions, width] of the target's states [positions, taps, hidden_size]."""
        weight = self._weight
        with torch.inference_mode():
            return self._head.fuse(states.to(weight.device, weight.dtype), self._fc)

    @property
    def _weight(self) -> Tensor:
        return next(self._head.parameters())
