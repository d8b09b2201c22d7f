"""What feeds mean: their checks, the positions of their tokens, and the batch that they make."""

from __future__ import annotations

from collections.abc import Sequence

from services.engine.batch import Batch, Feed, Segment
from services.engine.errors import CacheGapError
from services.engine.kv_cache import CacheStore
from services.engine.session_cache import SessionCache

__all__ = ["check_feed", "feed_positions", "is_chain", "plan_batch"]


def plan_batch(feeds: Sequence[Feed], store: CacheStore, vocab_size: int, max_context: int) -> Batch:
    """Check all feeds, make room, drop what they replace and lay them out as one packed row.

    Raises:
        ValueError: A feed is malformed, or a session is fed twice; nothing was changed.
        CacheGapError: A feed starts past its session's cache; nothing was changed.
        CacheFullError: The feeds do not fit the cache budget; nothing was changed.
    """
    wanted: dict[str, int] = {}
    for feed in feeds:
        if feed.session_id in wanted:
            raise ValueError(f"feeds: session {feed.session_id!r} is fed twice in one step")
        check_feed(feed, store.get(feed.session_id), vocab_size, max_context)
        wanted[feed.session_id] = feed.start + feed.num_kept + len(feed.token_ids)
    caches = store.reserve_all(wanted)
    segments: list[Segment] = []
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    for feed, cache in zip(feeds, caches, strict=True):
        cache.truncate(feed.start, feed.num_kept)
        count, row = len(feed.token_ids), len(token_ids)
        where = feed_positions(feed, cache.tree_parents)
        parents = None if feed.num_kept == 0 and is_chain(feed.parents) else feed.parents
        segments.append(Segment(cache, row, count, feed.start, parents, where, feed.num_kept))
        token_ids.extend(feed.token_ids)
        positions.extend(where)
        logit_rows.extend(range(row + count - feed.num_logits, row + count))
    everything = len(logit_rows) == len(token_ids)
    return Batch(segments, token_ids, positions, None if everything else logit_rows)


def check_feed(feed: Feed, cache: SessionCache | None, vocab_size: int, max_context: int) -> None:
    """Check a feed against the model and what is cached of its session.

    Raises:
        ValueError: It is malformed.
        CacheGapError: It starts past the session's cache.
    """
    count = len(feed.token_ids)
    if count == 0:
        raise ValueError(f"token_ids: session {feed.session_id!r} feeds no token, allowed: at least one")
    if min(feed.token_ids) < 0 or max(feed.token_ids) >= vocab_size:
        wrong = next(t for t in feed.token_ids if not 0 <= t < vocab_size)
        raise ValueError(f"token_ids: got {wrong}, allowed: [0, {vocab_size})")
    if not 0 <= feed.num_logits <= count:
        raise ValueError(f"num_logits: got {feed.num_logits}, allowed: [0, {count}]")
    if feed.start < 0:
        raise ValueError(f"start: got {feed.start}, allowed: at least 0")
    last = feed.start + count - 1
    if feed.parents is not None or feed.num_kept:
        _check_tree(feed, cache)
        last = max(feed_positions(feed, cache.tree_parents if cache is not None else ()))
    if last >= max_context:
        raise ValueError(f"token_ids: reach position {last}, allowed: [0, {max_context})")
    held = 0 if cache is None else len(cache.tokens)
    if feed.start > held:
        raise CacheGapError(feed.session_id, held)


def _check_tree(feed: Feed, cache: SessionCache | None) -> None:
    count, parents, num_kept = len(feed.token_ids), feed.parents or (), feed.num_kept
    if len(parents) > count:
        raise ValueError(f"parents: got {len(parents)} nodes, but only {count} tokens are fed")
    held = 0 if cache is None else len(cache.tree_tokens)
    if not 0 <= num_kept <= held:
        raise ValueError(f"num_kept: got {num_kept}, allowed: [0, {held}]")
    if num_kept and cache is not None and (len(parents) < count or feed.start != len(cache.tokens)):
        raise ValueError("num_kept: only nodes may be fed to a tree, behind the whole chain")
    first = -(feed.start + count - len(parents))
    for node, parent in enumerate(parents):
        if not first <= parent < num_kept + node:
            raise ValueError(f"parents[{node}]: got {parent}, allowed: [{first}, {num_kept + node})")


def feed_positions(feed: Feed, kept_parents: Sequence[int]) -> Sequence[int]:
    """Return the absolute position of each token of a feed; nodes of a tree count their depth.

    Args:
        feed: The feed.
        kept_parents: Parents of the nodes that are cached.
    """
    count = len(feed.token_ids)
    if feed.parents is None:
        return range(feed.start, feed.start + count)
    base = feed.start + count - len(feed.parents)
    nodes: list[int] = []
    for parent in (*kept_parents[: feed.num_kept], *feed.parents):
        nodes.append(base + parent + 1 if parent < 0 else nodes[parent] + 1)
    return [*range(feed.start, base), *nodes[feed.num_kept :]]


def is_chain(parents: Sequence[int] | None) -> bool:
    """Return whether each node is the child of the one before it."""
    return parents is None or all(parent == node - 1 for node, parent in enumerate(parents))
