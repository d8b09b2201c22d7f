"""Loads a model as a worker's settings say."""

from __future__ import annotations

from gammaray.config import WorkerSettings
from services.engine.engine import Engine

__all__ = ["load_engine"]


def load_engine(path: str, settings: WorkerSettings) -> Engine:
    """Return the engine of a model in one process.

    Args:
        path: Directory or hub name.
        settings: Of the worker that would serve it.

    Raises:
        UnsupportedModelError: It cannot be served exactly; the reason is in the error.
        NotFoundError: There is no such model.
        InvalidArgumentError: Unknown device or dtype.
    """
    return Engine.load(
        path,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        cache_budget_bytes=settings.cache_budget_mb << 20,
        deterministic=settings.deterministic,
        lean=settings.lean,
        kernel_cache=settings.kernel_cache,
    )
