"""Watches the operations of torch in a block."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class TorchOperations(TorchDispatchMode):
    """Counts the operations of torch by name, such as `aten.add.Tensor`."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self._views: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations[str(function)] += 1
        if function.is_view:
            self._views.add(str(function))
        return function(*args, **(kwargs or {}))

    def launches(self) -> Counter[str]:
        """Return the operations that launch a kernel, not views and allocations."""
        launching = (name for name in self.operations if name not in self._views and "empty" not in name)
        return Counter({name: self.operations[name] for name in launching})
