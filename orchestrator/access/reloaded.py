"""Key files that are read again when they change."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Generic, TypeVar

from gammaray.errors import InvalidArgumentError

_log = logging.getLogger(__name__)

RELOAD_PERIOD_S = 0.5

Keys = TypeVar("Keys", bound=Sized)


class ReloadedKeys(Generic[Keys]):
    """The keys of a file. It is read again when it changes; if that fails, the previous keys stay valid."""

    def __init__(self, path: Path, read: Callable[[Path], Keys], name: str) -> None:
        self._path, self._read, self._name = path, read, name
        self._version, self._keys = _version(path), read(path)
        self._look_at = time.monotonic()

    def current(self) -> Keys:
        """Return the keys; a change is seen after at most `RELOAD_PERIOD_S`."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + RELOAD_PERIOD_S
            try:
                version = _version(self._path)
                if version is None or version != self._version:
                    self._keys, self._version = self._read(self._path), version
                    _log.warning("reloaded %d %s from %s", len(self._keys), self._name, self._path)
            except InvalidArgumentError as error:
                _log.error("failed to reload the %s, keeping the current ones: %s", self._name, error)
        return self._keys


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
