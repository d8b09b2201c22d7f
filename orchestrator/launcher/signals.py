"""The signals that stop a launcher."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_set_handler = signal.signal


class Stop(BaseException):
    """SIGINT or SIGTERM was received."""


class StopSignals:
    """Raises `Stop` in the main thread at the first SIGINT or SIGTERM; later ones are ignored.

    Later errors are attributed to a signal that `came`: a library may turn the exception into another one.
    """

    def __init__(self) -> None:
        self.came = False

    def take(self) -> None:
        """Install the handlers, unless a signal was already received."""
        if not self.came:
            for number in _SIGNALS:
                _set_handler(number, self._stop)

    def check(self) -> None:
        """Raise `Stop` if a signal was received, since a library may have swallowed the first `Stop`."""
        if self.came:
            raise Stop

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep a library from replacing the handlers by its own, which would end the process at once."""

        def refuse(number: int, handler: Any) -> Any:
            return signal.getsignal(number) if number in _SIGNALS else _set_handler(number, handler)

        signal.signal = refuse  # type: ignore[assignment]
        try:
            yield
        finally:
            signal.signal = _set_handler

    @contextmanager
    def held(self) -> Iterator[None]:
        """Block the signals during a section that must not be interrupted."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _stop(self, signum: int, _: FrameType | None) -> None:
        self.came = True
        for number in _SIGNALS:
            _set_handler(number, signal.SIG_IGN)  # stopping has its own deadlines
        silence()
        raise Stop


def silence() -> None:
    """Redirect stdout and stderr to /dev/null, to hide what Ray prints during shutdown."""
    with open(os.devnull, "w") as nowhere:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(nowhere.fileno(), stream.fileno())
