"""Loads a model as a worker's settings say."""

from __future__ import annotations

from gammaray.config import WorkerSettings
from services.engine.cache_budget import CacheBudget
from services.engine.engine import Engine

__all__ = ["limit_cache", "load_engine"]


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
    engine = Engine.load(
        path,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        deterministic=settings.deterministic,
        lean=settings.lean,
        kernel_cache=settings.kernel_cache,
    )
    limit_cache(engine, settings)
    return engine


def limit_cache(engine: Engine, settings: WorkerSettings) -> None:
    """Give a loaded engine the cache budget that its worker's settings say, or that is free."""
    given = settings.cache_budget_mb
    budget = CacheBudget(None if given is None else given << 20, settings.cache_memory_share)
    engine.limit_cache(budget.on(engine.device))
