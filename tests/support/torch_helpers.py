"""Watches the operations of torch in a block."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class TorchOperations(TorchDispatchMode):
    """Counts the operations of torch by name, such as `aten.add.Tensor`.

    Attributes:
        operations: How often each one was called.
        on_device: Likewise, of those with no result on the host.
        on_host: Names of those whose result is on the host, one per tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.on_device: Counter[str] = Counter()
        self.on_host: list[str] = []
        self._views: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.operations[str(function)] += 1
        if function.is_view:
            self._views.add(str(function))
        tensors = made if isinstance(made, tuple | list) else [made]
        num_host = sum(isinstance(one, torch.Tensor) and one.device.type == "cpu" for one in tensors)
        self.on_host += [str(function)] * num_host
        self.on_device[str(function)] += num_host == 0
        return made

    def launches(self, *, on_device: bool = False) -> Counter[str]:
        """Return the operations that launch a kernel, not views and allocations: all, or a device's."""
        return Counter(
            {
                name: count
                for name, count in (self.on_device if on_device else self.operations).items()
                if name not in self._views and "empty" not in name
            }
        )
