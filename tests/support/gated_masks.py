"""Grammars whose masks a test holds back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from gammaray.grammar.matcher import GrammarState
from services.scheduling.tasks import Reply

PATIENCE_S = 60.0


class Gated:
    """A grammar whose masks are computed when the gate is open."""

    def __init__(self, state: GrammarState, gate: threading.Event) -> None:
        self._state, self._gate = state, gate
        self.num_asked = 0
        self.error: Exception | None = None

    def __len__(self) -> int:
        return len(self._state)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._state.extend(token_ids)

    def truncate(self, length: int) -> None:
        self._state.truncate(length)

    def masks(self, paths: Sequence[Sequence[int]]) -> list[bytes | None]:
        self.num_asked += 1
        assert self._gate.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return self._state.masks(paths)


def steps_until(scheduler: Any, is_done: Callable[[list[Reply]], object]) -> list[Reply]:
    """Step until a condition holds; return the replies."""
    replies: list[Reply] = []
    deadline = time.monotonic() + PATIENCE_S
    while not is_done(replies):
        assert time.monotonic() < deadline, replies
        replies += [reply for _, reply in scheduler.step()]
    return replies
