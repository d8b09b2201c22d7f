"""An engine whose model is spread over several devices: tensor parallelism of transformers, one rank each.

Rank 0 is the worker's own process: it owns the sessions, the scheduler and the gRPC server. The others are
child processes (`services.engine.tensor_parallel.rank_main`) with an engine of their own for their share of
the heads.

Rank 0 tells them each step before it takes it itself, with what happened to the caches since the last one
(rollbacks, tree paths, forks, releases). Caches grow, evict and refuse by rules that depend on nothing else,
so all ranks do the same; the sums over devices happen inside the model's forward.

When a rank dies, or a forward fails on any of them, they may no longer agree: the engine is lost, says so
with EngineLostError, and the worker ends, to be started anew.

Sums over devices are rounded in another order than on one, so logits differ in the last bits (by some 1e-5 in
float32). A token that wins by less may be another one than on one device: a tie, as between any two batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from gammaray.errors import InvalidArgumentError
from services.engine.checks import check_model
from services.engine.core.batch import Batch, SequenceInput
from services.engine.core.cache_budget import DEFAULT_CACHE_BUDGET_BYTES
from services.engine.core.errors import EngineLostError, UnsupportedModelError
from services.engine.core.kv_cache import CacheShape, CacheStore, Source
from services.engine.core.model import load_config, load_model
from services.engine.engine import Engine
from services.engine.hf.probe import probe_model
from services.engine.hf.runner import TransformersRunner
from services.engine.tensor_parallel.ranks import (
    READY,
    STARTED,
    Ranks,
    RankSpec,
    check_alone,
    join_group,
    leave_group,
    meeting_place,
)

__all__ = ["ParallelEngine", "build_rank", "check_parallel"]


def check_parallel(model: str, num_ranks: int, device: str) -> None:
    """Check a model's heads and plan, and this machine's devices.

    Args:
        model: Directory or hub name.
        num_ranks: Devices to spread it over.
        device: "auto", "cpu" or "cuda".

    Raises:
        InvalidArgumentError: Heads do not divide, or there are too few devices.
        UnsupportedModelError: transformers does not say how to share this architecture.
        NotFoundError: There is no such model.
    """
    config = load_config(model).get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % num_ranks:
            raise InvalidArgumentError(
                "tensor_parallel", num_ranks, f"a divisor of {heads}, the {name} of {model}"
            )
    if not getattr(config, "base_model_tp_plan", None):
        raise UnsupportedModelError(
            model, f"transformers has no tensor-parallel plan for {config.model_type}"
        )
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices and device == "cpu":
        # transformers takes the accelerator where there is one.
        raise InvalidArgumentError("device", device, "auto or cuda with tensor_parallel on this machine")
    if num_devices and num_ranks > num_devices:
        raise InvalidArgumentError(
            "tensor_parallel", num_ranks, f"at most {num_devices}, the devices of this worker"
        )


EngineT = TypeVar("EngineT", bound=Engine)

Operation = tuple[str, tuple[Any, ...]]
"""Name and arguments of an Engine's method that changes a cache."""


class ParallelEngine(Engine):
    """Rank 0; build it with `load_parallel`. One per process, used by one thread, closed at the end."""

    _ranks: Ranks
    _pending: list[Operation] | None = None  # None while it loads: each rank does that by itself

    @classmethod
    def load_parallel(
        cls,
        model: str,
        *,
        num_ranks: int,
        device: str = "auto",
        dtype: str = "auto",
        threads: int = 1,
        cache_budget_bytes: int = DEFAULT_CACHE_BUDGET_BYTES,
        timeout_s: float = 300.0,
    ) -> ParallelEngine:
        """Start the other ranks, load a share of the model in each, and check that it can be served exactly.

        Args:
            model: Directory or hub name.
            num_ranks: Devices to spread it over; at least 2.
            device: "auto", "cpu" or "cuda".
            dtype: As for `services.engine.loader.load_engine`.
            threads: Arithmetic threads of each rank.
            cache_budget_bytes: Upper bound of keys and values in each rank.
            timeout_s: How long one rank waits for another, while loading and in a step.

        Raises:
            InvalidArgumentError: The model's heads cannot be shared evenly, or there are too few devices.
            UnsupportedModelError: It cannot be served exactly so; the reason is in the error.
            NotFoundError: There is no such model.
            FailedPreconditionError: There is a parallel engine in this process already.
            EngineLostError: A rank failed to start.
        """
        check_parallel(model, num_ranks, device)
        check_alone()
        spec = RankSpec(
            model, num_ranks, device, dtype, threads, cache_budget_bytes, timeout_s, meeting_place()
        )
        ranks = Ranks.start(spec)
        try:
            ranks.wait(STARTED)
            join_group(spec, 0)
            engine = build_rank(spec, cls)
            ranks.wait(READY)
        except BaseException:
            ranks.stop()
            leave_group()
            raise
        engine._ranks = ranks
        engine._pending = []
        return engine

    def step(
        self, feeds: Sequence[SequenceInput], within: AbstractContextManager[object] | None = None
    ) -> list[Tensor]:
        """Run one forward on all ranks, see `Engine.step`.

        Raises:
            EngineLostError: A rank is gone or failed; nothing can be done with this engine any more.
        """
        if feeds and self._pending is not None:
            # A step that is refused is told too: it counts for which session was used last.
            self._ranks.send((self._pending, list(feeds)))
            self._pending = []
        return super().step(feeds, within)

    def truncate(self, session_id: str, length: int) -> None:
        """See `Engine.truncate`."""
        self._on_all_ranks(super().truncate, session_id, length)

    def keep_path(self, session_id: str, base: int, path: Sequence[int], keep: Sequence[int] = ()) -> None:
        """See `Engine.keep_path`."""
        self._on_all_ranks(super().keep_path, session_id, base, list(path), list(keep))

    def fork(self, source: Source, copy: str, length: int) -> None:
        """See `Engine.fork`."""
        self._on_all_ranks(super().fork, source, copy, length)

    def release(self, session_id: str) -> None:
        """See `Engine.release`; the other ranks free theirs with the next step."""
        self._on_all_ranks(super().release, session_id)

    def retain(self, session_id: str, salt: str) -> None:
        """See `Engine.retain`; the other ranks, too, do it with the next step."""
        self._on_all_ranks(super().retain, session_id, salt)

    def forget(self, session_id: str) -> None:
        """See `Engine.forget`; the other ranks free theirs with the next step."""
        self._on_all_ranks(super().forget, session_id)

    def drop_retained(self) -> None:
        """See `Engine.drop_retained`; the other ranks free theirs with the next step."""
        self._on_all_ranks(super().drop_retained)

    def limit_cache(self, num_bytes: int) -> None:
        """See `Engine.limit_cache`; the bound is that of each rank."""
        self._on_all_ranks(super().limit_cache, num_bytes)

    def check(self) -> None:
        """Look whether the other ranks still run.

        Raises:
            EngineLostError: One does not.
        """
        reason = self._ranks.why_lost()
        if reason:
            raise EngineLostError(reason)

    def close(self) -> None:
        """End the other ranks; the engine is of no use afterwards."""
        self._ranks.stop()
        leave_group()

    def _on_all_ranks(self, method: Callable[..., None], *arguments: Any) -> None:
        method(*arguments)  # what is refused here is not told
        if self._pending is not None:
            self._pending.append((method.__name__, arguments))

    def _run(self, batch: Batch, within: AbstractContextManager[object]) -> Tensor:
        try:
            return super()._run(batch, within)
        except Exception as error:
            if self._pending is None:
                raise
            reason = self._ranks.why_lost() or f"{type(error).__name__}: {error}"
            raise EngineLostError(reason) from error


def build_rank(spec: RankSpec, engine_class: type[EngineT]) -> EngineT:
    """Load this rank's share of the model; all ranks call it at the same time.

    Returns:
        An engine of `engine_class`, checked against the model's own forward.

    Raises:
        UnsupportedModelError: It cannot be served exactly.
    """
    torch.set_num_threads(spec.threads)
    loaded = load_model(spec.model, device=spec.device, dtype=spec.dtype, num_ranks=spec.num_ranks)
    layout = probe_model(loaded)
    shape = CacheShape(layout.num_layers, layout.kv_heads, layout.kv_dim, loaded.dtype, loaded.device)
    engine = engine_class(
        TransformersRunner(loaded, layout),
        CacheStore(shape, spec.cache_budget_bytes),
        model_name=spec.model,
        vocab_size=layout.vocab_size,
        max_context=loaded.max_context,
        kernel="none: the model is spread over several devices",
    )
    check_model(engine, loaded)
    return engine
