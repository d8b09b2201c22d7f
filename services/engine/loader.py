"""Loads a model into an engine: chooses the runner and checks it against the model's own forward."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from gammaray.config import DraftSettings, WorkerSettings
from gammaray.errors import GammarayError, InvalidArgumentError
from services.engine.cache_budget import DEFAULT_CACHE_BUDGET_BYTES, cache_budget
from services.engine.checks import check_deterministic, check_model
from services.engine.core.batch import Runner
from services.engine.core.device import raise_if_lost
from services.engine.core.drafter import DraftFormat, load_drafter
from services.engine.core.errors import UnsupportedModelError
from services.engine.core.kv_cache import CacheShape
from services.engine.core.model import LoadedModel, load_model
from services.engine.core.quantised import QuantisedMatrix, quantise_model
from services.engine.engine import Engine
from services.engine.hf.probe import ModelLayout, probe_model
from services.engine.hf.runner import TransformersRunner
from services.engine.native.library import load_kernel, use_threads
from services.engine.native.runner import NativeRunner
from services.engine.native.weights import build_native, native_obstacle

_log = logging.getLogger(__name__)


def load_engine(
    model: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    threads: int = 1,
    cache_budget_bytes: int = DEFAULT_CACHE_BUDGET_BYTES,
    deterministic: bool = False,
    engine: str = "auto",
    weights: str = "auto",
    draft_for: str | None = None,
) -> Engine:
    """Load a model and check that it can be served exactly.

    Args:
        model: Directory or hub name; of a drafter also `early-exit:N`.
        device, dtype, threads: As for `load_model`; arithmetic threads of this process.
        cache_budget_bytes: Upper bound of all sessions' keys and values together.
        deterministic: Logits are bit-identical whatever else is in a step, with the compiled kernel alone;
            other models are refused, and the bits are compared at load.
        engine: "native" is the compiled CPU kernel, "transformers" the model's own layers, "auto" the kernel
            where it covers the model.
        weights: "auto" (as `dtype`) or "int8": a draft's setting `draft_weights`. The engine then serves
            the quantised model, whatever `dtype` is; never quantise a target.
        draft_for: The target of a drafter, "" if it is not known; None: the model is no drafter. See
            `services.engine.core.drafter`.

    Raises:
        UnsupportedModelError: It cannot be served exactly; the reason is in the error.
        NotFoundError: There is no such model.
        InvalidArgumentError: Unknown device or dtype, weights or an engine without a kernel, or a drafter
            that needs another target or the name of its target.
    """
    torch.set_num_threads(threads)
    if weights != "auto":
        dtype = "float32"  # its matrices are integers, and the check of the start is strict
    loaded, draft = _load(model, device, dtype, engine, draft_for)
    obstacle = _native_obstacle(loaded, engine)
    if deterministic:
        _check_covered(loaded, obstacle)
    quantised = _quantised(loaded, weights, obstacle)
    with _first_forwards(loaded):
        layout = probe_model(loaded)
    if draft is not None:
        layout = replace(layout, vocab_size=min(layout.vocab_size, draft.vocab_size))
    runner, shape, kernel = _choose_runner(loaded, layout, obstacle, quantised)
    if runner.has_kernel:
        use_threads(threads)
    if weights != "auto":
        kernel = f"{kernel}, {weights} weights"
    sizes = {"vocab_size": layout.vocab_size, "max_context": loaded.max_context}
    built = Engine(runner, shape, cache_budget_bytes, loaded.dtype, model_name=model, kernel=kernel, **sizes)
    _log_kernel(model, kernel, loaded.device.type, obstacle)
    with _first_forwards(loaded):
        check_model(built, loaded, is_quantised=bool(quantised))
    if deterministic:
        check_deterministic(built)
    if draft is not None:
        built.draft_for(draft)
    return built


def _log_kernel(model: str, kernel: str, device: str, obstacle: str) -> None:
    if obstacle and device == "cpu":
        _log.warning("%s runs without the compiled CPU kernel (%s), several times as slowly", model, obstacle)
    else:
        _log.info("%s runs with the kernel %s on %s", model, kernel, device)


def _load(
    model: str, device: str, dtype: str, engine: str, draft_for: str | None
) -> tuple[LoadedModel, DraftFormat | None]:
    if engine == "vllm":
        raise InvalidArgumentError("engine", engine, f"auto, native or transformers for {model}")
    if engine == "native" and device == "auto":
        device = "cpu"
    if draft_for is None:
        return load_model(model, device=device, dtype=dtype), None
    return load_drafter(model, draft_for, device=device, dtype=dtype)


def load_worker_engine(path: str, settings: WorkerSettings, draft_for: str | None = None) -> Engine:
    """Load a model with a worker's settings, or by the free memory; it raises what `load_engine` does."""
    engine = load_engine(
        path,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        deterministic=settings.deterministic,
        engine=settings.engine,
        weights=settings.draft_weights if isinstance(settings, DraftSettings) else "auto",
        draft_for=draft_for,
    )
    budget_mb = settings.cache_budget_mb
    num_bytes = None if budget_mb is None else budget_mb << 20
    engine.budget_bytes = cache_budget(engine.device, num_bytes, settings.cache_memory_share)
    return engine


@contextmanager
def _first_forwards(loaded: LoadedModel) -> Iterator[None]:
    """Run forwards of a model that never ran; one fails where sizes of its configuration contradict."""
    try:
        yield
    except (GammarayError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise_if_lost(error)
        reason = f"its weights do not run on {loaded.device}: {error}"
        raise UnsupportedModelError(loaded.name, reason) from error


def _native_obstacle(loaded: LoadedModel, engine: str) -> str:
    """Return why the compiled kernel does not run a model; empty if it does."""
    if engine == "transformers":
        return "the engine is transformers"
    obstacle = native_obstacle(loaded)
    if engine == "native" and obstacle:
        raise InvalidArgumentError("engine", engine, f"auto or transformers for {loaded.name}: {obstacle}")
    return obstacle


def _check_covered(loaded: LoadedModel, obstacle: str) -> None:
    if loaded.dtype != torch.float32 or loaded.device.type != "cpu":
        reason = f"deterministic mode covers float32 on CPU, not {loaded.dtype} on {loaded.device}"
    elif torch.get_num_threads() != 1:
        reason = f"deterministic mode needs 1 thread, not {torch.get_num_threads()}"
    elif obstacle:
        reason = f"deterministic mode needs the compiled CPU kernel: {obstacle}"
    else:
        return
    raise UnsupportedModelError(loaded.name, reason)


def _quantised(loaded: LoadedModel, weights: str, obstacle: str) -> Mapping[int, QuantisedMatrix]:
    if weights == "auto":
        return {}
    if obstacle:
        allowed = f"auto: {weights} needs the compiled CPU kernel ({obstacle})"
        raise InvalidArgumentError("draft_weights", weights, allowed)
    return quantise_model(loaded.module)


def _choose_runner(
    loaded: LoadedModel, layout: ModelLayout, obstacle: str, quantised: Mapping[int, QuantisedMatrix]
) -> tuple[Runner, CacheShape, str]:
    """Return the fastest runner that covers a model, its cache's shape, and its kernel for `Engine`."""
    joined = CacheShape(layout.num_layers, layout.kv_heads, layout.kv_dim, loaded.dtype, loaded.device)
    apart = replace(joined, rows=2 * joined.rows, dim=joined.dim // 2)  # keys of all heads, then values
    if not obstacle:
        native = build_native(loaded, layout.windows, layout.vocab_size, quantised)
        return NativeRunner(native), replace(apart, dtype=torch.float32), load_kernel().variant
    return TransformersRunner(loaded, layout), joined, f"none: {obstacle}"
