"""What a worker was asked in one cycle: references only, which are read after the cycle."""

from __future__ import annotations

import time
from typing import Any

from gammaray.errors import GammarayError

__all__ = ["Call"]


class Call:
    """The blocks that one worker was sent in one cycle, and its answers.

    Args:
        parent: The `traceparent` that they carry; None when the session is not sampled, and no clock is read.

    Attributes:
        address: host:port of the worker that was asked last.
        error: Class of the last failure, or empty.
        began: `time.perf_counter()` of the first block.
        ended: The same of the end.
        is_notice: Whether the worker was only told that what it had sent ahead is taken.
    """

    __slots__ = ("_parent", "address", "began", "blocks", "ended", "error", "is_notice", "results")

    def __init__(self, parent: str | None = None) -> None:
        self._parent = parent
        self.address = self.error = ""
        self.blocks: list[Any] = []
        self.results: list[Any] = []
        self.began = self.ended = 0.0
        self.is_notice = False

    @property
    def is_over(self) -> bool:
        """Whether the last block was answered or given up."""
        return self.is_notice or len(self.results) == len(self.blocks)

    def sent(self, block: Any) -> None:
        """Note a block and give it the trace context."""
        if self._parent is not None:
            block.trace.traceparent = self._parent
            self.began = self.began or time.perf_counter()
        self.blocks.append(block)

    def told(self, notice: Any) -> None:
        """Note a block that is not answered."""
        self.sent(notice)
        self.is_notice = True

    def answered(self, result: Any) -> None:
        """Note the answer to the last block."""
        self.results.append(result)
        if self._parent is not None:
            self.ended = time.perf_counter()

    def failed(self, error: GammarayError) -> None:
        """Note that the last block came to nothing, or its answer was a failure."""
        self.error = type(error).__name__
        if not self.is_over:
            self.answered(None)
