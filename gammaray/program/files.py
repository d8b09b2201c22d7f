"""Files that are written whole or not at all, and locks between processes."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file that takes the place of `path` in the end; an error deletes it."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def try_lock(file: IO[Any], *, is_shared: bool = False) -> bool:
    """Lock an open file until it is closed, unless another process has it; return whether it is locked."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
