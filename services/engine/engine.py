"""The engine: one model, many sessions, one forward per step over everything they feed.

A step takes any mix of feeds: prompt chunks, single tokens, chains and trees of proposed tokens. What was
fed stays cached per session; rollback, forks and tree paths only move lengths and copy slots. Not
thread-safe: one thread owns an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.engine.batch import Batch, Feed, Segment
from services.engine.checks import check_deterministic, check_model
from services.engine.deterministic import check_covered
from services.engine.errors import CacheGapError
from services.engine.general import GeneralRunner
from services.engine.kv_cache import CacheShape, CacheStore
from services.engine.lean import LeanRunner
from services.engine.lean_weights import build_lean, has_lean_path
from services.engine.model import load_model
from services.engine.probe import probe_model

__all__ = ["Engine", "EngineStats", "Feed", "Runner"]

DEFAULT_CACHE_BUDGET_BYTES = 2 * 2**30


@dataclass(frozen=True)
class EngineStats:
    """What the cache holds.

    Attributes:
        num_sessions: Sessions with a cache.
        cache_bytes: Bytes allocated for them.
        cache_budget_bytes: Upper bound of `cache_bytes`.
        num_evictions: Sessions evicted since the start.
    """

    num_sessions: int
    cache_bytes: int
    cache_budget_bytes: int
    num_evictions: int


class Runner(Protocol):
    """Computes one packed forward."""

    def forward(self, batch: Batch) -> Tensor:
        """Return the wanted rows' logits [rows, vocab_size] in float32 and fill the new slots."""
        ...


class Engine:
    """One model and the caches of its sessions; build it with `load`.

    Attributes:
        model_name: Directory or hub name.
        vocab_size: Token ids lie in [0, vocab_size).
        max_context: Positions lie in [0, max_context).
        num_layers: Depth of the model.
        device: Where it runs; logits are returned there.
    """

    def __init__(
        self, runner: Runner, store: CacheStore, *, model_name: str, vocab_size: int, max_context: int
    ) -> None:
        self.model_name = model_name
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.num_layers = store.shape.num_layers
        self.device = store.shape.device
        self._runner = runner
        self._store = store

    @classmethod
    def load(
        cls,
        model: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        threads: int = 1,
        cache_budget_bytes: int = DEFAULT_CACHE_BUDGET_BYTES,
        deterministic: bool = False,
        lean: bool = True,
    ) -> Engine:
        """Load a model and check that it can be served exactly.

        Args:
            model: Directory or hub name.
            device: "auto", "cpu", "cuda" or "cuda:N".
            dtype: "auto" (float32 on CPU, bfloat16 elsewhere), "float32", "bfloat16" or "float16".
            threads: Arithmetic threads of this process.
            cache_budget_bytes: Upper bound of all sessions' keys and values together.
            deterministic: Logits do not depend, to the last bit, on what else is in a step; see
                `services.engine.deterministic` for what is covered.
            lean: Use the lean path where the architecture has one.

        Raises:
            UnsupportedModelError: It cannot be served exactly; the reason is in the error.
            NotFoundError: There is no such model.
            InvalidArgumentError: Unknown device or dtype.
        """
        torch.set_num_threads(threads)
        loaded = load_model(model, device=device, dtype=dtype)
        if deterministic:
            check_covered(loaded)
        layout = probe_model(loaded)
        rows, dim = layout.kv_heads, layout.kv_dim
        runner: Runner
        if lean and has_lean_path(loaded):
            weights = build_lean(loaded, layout.windows, layout.vocab_size, invariant=deterministic)
            runner = LeanRunner(weights, exact_trees=deterministic)
            rows, dim = 2 * rows, dim // 2
        else:
            runner = GeneralRunner(loaded, layout, fixed_shapes=deterministic)
        shape = CacheShape(layout.num_layers, rows, dim, loaded.dtype, loaded.device)
        engine = cls(
            runner,
            CacheStore(shape, cache_budget_bytes),
            model_name=model,
            vocab_size=layout.vocab_size,
            max_context=loaded.max_context,
        )
        check_model(engine, loaded)
        if deterministic:
            check_deterministic(engine)
        return engine

    def step(self, feeds: Sequence[Feed]) -> list[Tensor]:
        """Run one forward over all feeds.

        Returns:
            For each feed its logits [num_logits, vocab_size] in float32.

        Raises:
            ValueError: A feed is malformed, or a session is fed twice; nothing was changed.
            CacheGapError: A feed starts past its session's cache; nothing was changed.
            CacheFullError: The step does not fit the cache budget; nothing was changed.
        """
        if not feeds:
            return []
        batch = self._plan(feeds)
        logits = self._run(batch)
        for feed, segment in zip(feeds, batch.segments, strict=True):
            cache, num_nodes = segment.cache, len(feed.parents or ())
            cache.tokens.extend(feed.token_ids[: segment.count - num_nodes])
            if feed.parents is not None:
                cache.tree_tokens = list(feed.token_ids[segment.count - num_nodes :])
                cache.tree_parents = list(feed.parents)
        if len(feeds) == 1:
            return [logits]
        return list(logits.split([feed.num_logits for feed in feeds]))

    def length(self, session_id: str) -> int:
        """Return how many tokens of the session's chain are cached; 0 when unknown or evicted."""
        cache = self._store.get(session_id)
        return 0 if cache is None else len(cache.tokens)

    def tokens(self, session_id: str) -> Sequence[int]:
        """Return the session's cached tokens in chain order; a view that the next call may change."""
        cache = self._store.get(session_id)
        return () if cache is None else cache.tokens

    def truncate(self, session_id: str, length: int) -> None:
        """Keep the first `length` tokens of a session; no cost beyond the tokens dropped.

        Raises:
            ValueError: `length` is negative.
        """
        if length < 0:
            raise ValueError(f"length: got {length}, allowed: at least 0")
        cache = self._store.get(session_id)
        if cache is not None:
            cache.truncate(length)

    def keep_path(self, session_id: str, base: int, path: Sequence[int]) -> None:
        """After nodes were fed at `base`, keep those of `path` as positions base, base + 1, ...

        Args:
            session_id: The session.
            base: Position of the first node: the number of tokens before the proposal.
            path: Indices of the nodes that stand, root first; empty to drop all.

        Raises:
            CacheGapError: The session has no cache.
            ValueError: `base` or `path` do not fit what was fed.
        """
        cache = self._store.get(session_id)
        if cache is None:
            raise CacheGapError(session_id, 0)
        cache.keep_path(base, path)

    def fork(self, source: str, copy: str, length: int) -> None:
        """Make `copy`'s cache the first `length` tokens of `source`'s.

        Raises:
            CacheGapError: `source` holds fewer.
            CacheFullError: Both together exceed the budget.
        """
        self._store.fork(source, copy, length)

    def longest_prefix(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Return the session whose cache shares the longest prefix with `token_ids`, and its length."""
        return self._store.longest_prefix(token_ids)

    def release(self, session_id: str) -> None:
        """Forget a session and free its cache; unknown ones are ignored."""
        self._store.release(session_id)

    def stats(self) -> EngineStats:
        """Return what the cache holds."""
        store = self._store
        return EngineStats(len(store), store.used_bytes, store.budget_bytes, store.num_evictions)

    def _run(self, batch: Batch) -> Tensor:
        with torch.inference_mode():
            logits = self._runner.forward(batch)
        # Tensors born in inference mode cannot be written to outside of it; callers may want to.
        return logits.clone() if logits.is_inference() else logits

    def _plan(self, feeds: Sequence[Feed]) -> Batch:
        """Check all feeds, make room, drop what they replace and lay them out as one packed row."""
        wanted: dict[str, int] = {}
        for feed in feeds:
            if feed.session_id in wanted:
                raise ValueError(f"feeds: session {feed.session_id!r} is fed twice in one step")
            self._check(feed)
            wanted[feed.session_id] = feed.start + len(feed.token_ids)
        caches = self._store.reserve_all(wanted)
        segments: list[Segment] = []
        token_ids: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        for feed, cache in zip(feeds, caches, strict=True):
            cache.truncate(feed.start)
            count, row = len(feed.token_ids), len(token_ids)
            where = feed_positions(feed)
            parents = None if _is_chain(feed.parents) else feed.parents
            segments.append(Segment(cache, row, count, feed.start, parents, where))
            token_ids.extend(feed.token_ids)
            positions.extend(where)
            logit_rows.extend(range(row + count - feed.num_logits, row + count))
        everything = len(logit_rows) == len(token_ids)
        return Batch(segments, token_ids, positions, None if everything else logit_rows)

    def _check(self, feed: Feed) -> None:
        count = len(feed.token_ids)
        if count == 0:
            raise ValueError(f"token_ids: session {feed.session_id!r} feeds no token, allowed: at least one")
        if min(feed.token_ids) < 0 or max(feed.token_ids) >= self.vocab_size:
            wrong = next(t for t in feed.token_ids if not 0 <= t < self.vocab_size)
            raise ValueError(f"token_ids: got {wrong}, allowed: [0, {self.vocab_size})")
        if not 0 <= feed.num_logits <= count:
            raise ValueError(f"num_logits: got {feed.num_logits}, allowed: [0, {count}]")
        if feed.start < 0:
            raise ValueError(f"start: got {feed.start}, allowed: at least 0")
        parents = feed.parents
        if parents is not None:
            if len(parents) > count:
                raise ValueError(f"parents: got {len(parents)} nodes, but only {count} tokens are fed")
            for node, parent in enumerate(parents):
                if not -1 <= parent < node:
                    raise ValueError(f"parents[{node}]: got {parent}, allowed: [-1, {node})")
        last = max(feed_positions(feed)) if parents is not None else feed.start + count - 1
        if last >= self.max_context:
            raise ValueError(f"token_ids: reach position {last}, allowed: [0, {self.max_context})")
        held = self.length(feed.session_id)
        if feed.start > held:
            raise CacheGapError(feed.session_id, held)


def feed_positions(feed: Feed) -> Sequence[int]:
    """Absolute position of each token of a feed; nodes of a tree count their depth."""
    count = len(feed.token_ids)
    if feed.parents is None:
        return range(feed.start, feed.start + count)
    base = feed.start + count - len(feed.parents)
    positions = list(range(feed.start, base))
    nodes: list[int] = []
    for parent in feed.parents:
        nodes.append(base if parent < 0 else nodes[parent] + 1)
    return positions + nodes


def _is_chain(parents: Sequence[int] | None) -> bool:
    return parents is None or all(parent == node - 1 for node, parent in enumerate(parents))
