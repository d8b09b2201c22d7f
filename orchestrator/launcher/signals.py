"""The signals that stop a launcher."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Stop", "StopSignals", "silence"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_set_handler = signal.signal


class Stop(BaseException):
    """SIGINT or SIGTERM came."""


class StopSignals:
    """Raises `Stop` in the main thread at the first SIGINT or SIGTERM; later ones change nothing.

    Attributes:
        came: Whether one came. What fails afterwards fails because of it: an exception that is raised inside
            a library's extension code may come out as another.
    """

    def __init__(self) -> None:
        self.came = False

    def take(self) -> None:
        """Handle the signals from now on, unless one came already."""
        if not self.came:
            for number in _SIGNALS:
                _set_handler(number, self._stop)

    def check(self) -> None:
        """Raise `Stop` if a signal came: what it raised at the time may have been swallowed."""
        if self.came:
            raise Stop

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the handlers while a library starts that would set its own, which end the process at once."""

        def refuse(number: int, handler: Any) -> Any:
            return signal.getsignal(number) if number in _SIGNALS else _set_handler(number, handler)

        signal.signal = refuse  # type: ignore[assignment]
        try:
            yield
        finally:
            signal.signal = _set_handler

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the signals back for a moment that must not be interrupted."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _stop(self, signum: int, _: FrameType | None) -> None:
        self.came = True
        for number in _SIGNALS:
            _set_handler(number, signal.SIG_IGN)  # once is enough: stopping has deadlines of its own
        silence()
        raise Stop


def silence() -> None:
    """Hide what Ray says, to the very end, of processes that are about to end."""
    with open(os.devnull, "w") as nowhere:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(nowhere.fileno(), stream.fileno())
