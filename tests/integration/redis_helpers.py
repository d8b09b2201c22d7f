"""A real Redis for a test module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from orchestrator.redis_server import RedisServer


@contextmanager
def running_redis() -> Iterator[RedisServer]:
    """Run a private server; it holds nothing at first."""
    with TemporaryDirectory() as folder, RedisServer.start(Path(folder)) as server:
        yield server
