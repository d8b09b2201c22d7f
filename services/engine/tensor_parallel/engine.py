"""An engine whose model is sharded over several devices: tensor parallelism of transformers, one rank each.

Rank 0 is the worker's own process: it owns the sessions, the scheduler and the gRPC server. The others are
child processes (`services.engine.tensor_parallel.rank_main`), each with an engine for its share of the heads.

Rank 0 sends them each step before running it itself, together with the cache operations since the last one
(rollbacks, tree paths, forks, releases). Growth, eviction and refusal of caches depend on nothing else, so
all ranks do the same; the sums over devices happen inside the model's forward. After them every rank has
whole hidden states, so rank 0 alone records those that `tap` names.

When a rank dies, or a forward fails on any of them, the ranks' states may differ: the engine is lost, raises
EngineLostError, and the worker ends and must be restarted.

Sums over devices are rounded in a different order than on one, so logits differ in the last bits (by about
1e-5 in float32). A token that wins by less may differ from that on one device: a tie, as between any two
batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from gammaray.errors import InvalidArgumentError
from services.engine.cache_budget import DEFAULT_CACHE_BUDGET_BYTES
from services.engine.checks import check_model
from services.engine.core.batch import Batch, GumbelDraw, SequenceInput
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
    """Check a model's heads and tensor-parallel plan, and this machine's devices.

    Args:
        model: Directory or hub name.
        num_ranks: Number of devices.
        device: "auto", "cpu" or "cuda".

    Raises:
        InvalidArgumentError: Heads are not divisible by `num_ranks`, or there are too few devices.
        UnsupportedModelError: transformers has no tensor-parallel plan for this architecture.
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
        # transformers uses the accelerator if there is one.
        raise InvalidArgumentError("device", device, "auto or cuda with tensor_parallel on this machine")
    if num_devices and num_ranks > num_devices:
        raise InvalidArgumentError(
            "tensor_parallel", num_ranks, f"at most {num_devices}, the devices of this worker"
        )


EngineT = TypeVar("EngineT", bound=Engine)

Operation = tuple[str, tuple[Any, ...]]
"""Name and arguments of an Engine's method that changes a cache."""


class ParallelEngine(Engine):
    """Rank 0; built by `load_parallel`. One per process, used by one thread; must be closed."""

    _ranks: Ranks
    _pending: list[Operation] | None = None  # None while loading, which each rank does by itself

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
            num_ranks: Number of devices; at least 2.
            device: "auto", "cpu" or "cuda".
            dtype: As for `services.engine.loader.load_engine`.
            threads: Arithmetic threads of each rank.
            cache_budget_bytes: Upper bound of keys and values in each rank.
            timeout_s: How long one rank waits for another, while loading and in a step.

        Raises:
            InvalidArgumentError: The model's heads cannot be shared evenly, or there are too few devices.
            UnsupportedModelError: It cannot be served exactly in this way; the reason is in the error.
            NotFoundError: There is no such model.
            FailedPreconditionError: This process already has a parallel engine.
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
        engine.step_timeout_s = timeout_s
        engine._pending = []
        return engine

    def step(
        self,
        feeds: Sequence[SequenceInput],
        within: AbstractContextManager[object] | None = None,
        draws: Sequence[GumbelDraw | None] = (),
    ) -> list[Tensor]:
        """Run one forward on all ranks, see `Engine.step`.

        Raises:
            EngineLostError: A rank ended or failed; the engine cannot be used any more.
        """
        if feeds and self._pending is not None:
            # Refused steps are sent, too, because they change which session was used last.
            self._ranks.send((self._pending, list(feeds)))
            self._pending = []
        return super().step(feeds, within, draws)

    def truncate(self, session_id: str, length: int, num_nodes: int = 0) -> None:
        """See `Engine.truncate`."""
        self._on_all_ranks(super().truncate, session_id, length, num_nodes)

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
        """See `Engine.retain`; the other ranks do the same with the next step."""
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
        """Check that the other ranks still run.

        Raises:
            EngineLostError: A rank has ended.
        """
        reason = self._ranks.why_lost()
        if reason:
            raise EngineLostError(reason)

    def close(self) -> None:
        """End the other ranks; the engine cannot be used afterwards."""
        self._ranks.stop()
        leave_group()

    def _on_all_ranks(self, method: Callable[..., None], *arguments: Any) -> None:
        method(*arguments)  # if this raises, the operation is not sent
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
    """Load this rank's share of the model; all ranks must call this at the same time.

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
