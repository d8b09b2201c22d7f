"""Keys and values in pages of one pool, for the captured path.

A cache is a list of pages. Forks and retained caches share pages by reference; whoever writes into a page
that has another owner takes a copy of it first. All copies and writes are enqueued on one stream, in order: a
page that was freed may therefore be reused at once, while a replayed step may still read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set

import torch

from services.engine.core.errors import CacheFullError
from services.engine.core.kv_cache import BLOCK, CacheShape, CacheStore, Source
from services.engine.core.session_cache import SessionCache

__all__ = ["PagePool", "PagedCache", "PagedStore"]


class PagePool:
    """Pages of BLOCK slots, and how many caches own each.

    Args:
        shape: The entry of one token.
        num_pages: Pages that are allocated.

    Attributes:
        data: [num_pages, num_layers, rows, BLOCK, dim]; a page has no defined contents until it is written.
        owners: [num_pages] caches that own a page; 0 for free ones.
        sessions: [num_pages] how many of these are caches of sessions, not retained ones.
        num_used: Pages with an owner.
        num_live: Pages that a session owns.
    """

    def __init__(self, shape: CacheShape, num_pages: int) -> None:
        size = (num_pages, shape.num_layers, shape.rows, BLOCK, shape.dim)
        self.data = torch.empty(size, dtype=shape.dtype, device=shape.device)
        self.owners = [0] * num_pages
        self.sessions = [0] * num_pages
        self.num_used = self.num_live = 0
        self._free = list(range(num_pages - 1, -1, -1))

    def new(self) -> int:
        """Return a free page, which then has no owner; IndexError without any."""
        return self._free.pop()

    def own(self, page: int) -> None:
        """Add a session to a page's owners."""
        self.num_used += self.owners[page] == 0
        self.owners[page] += 1
        self.num_live += self.sessions[page] == 0
        self.sessions[page] += 1

    def leave(self, page: int) -> None:
        """Count one of a page's sessions as a retained cache."""
        self.sessions[page] -= 1
        self.num_live -= self.sessions[page] == 0

    def disown(self, page: int) -> None:
        """Remove a retained cache from a page's owners."""
        self.owners[page] -= 1
        if self.owners[page] == 0:
            self.num_used -= 1
            self._free.append(page)


class PagedCache(SessionCache):
    """One session's slots: slot s is slot s % BLOCK of page `pages[s // BLOCK]`.

    Args:
        pool: Where the pages are; `data` is the pool's.
        own: Makes the pages of the slots from one to before another this cache's alone.

    Attributes:
        pages: Pages in the order of slots.
        offsets: int64 [at least len(pages)] on the host: first number of each page in the pool.
    """

    def __init__(self, pool: PagePool, own: Callable[[PagedCache, int, int], None]) -> None:
        super().__init__(pool.data)
        self.pages: list[int] = []
        self.offsets = torch.zeros(32, dtype=torch.int64)
        self._pool, self._own = pool, own

    @property
    def capacity(self) -> int:
        """Number of slots of its pages."""
        return len(self.pages) * BLOCK

    def add(self, pages: Sequence[int]) -> None:
        """Append pages, of which this session becomes an owner."""
        start, end = len(self.pages), len(self.pages) + len(pages)
        if end > len(self.offsets):
            self.offsets = torch.cat([self.offsets, self.offsets.new_zeros(max(end, start))])
        for page in pages:
            self._pool.own(page)
        self.pages.extend(pages)
        self.offsets[start:end] = torch.tensor(pages, dtype=torch.int64) * self.data[0].numel()

    def replace(self, index: int) -> None:
        """Take a copy in place of a shared page."""
        shared, copy = self.pages[index], self._pool.new()
        self.data[copy] = self.data[shared]
        self._pool.own(copy)
        self._pool.leave(shared)
        self._pool.disown(shared)
        self.pages[index] = copy
        self.offsets[index] = copy * self.data[0].numel()

    def trim(self) -> None:
        """Drop the tree and the pages after the chain; of retained caches."""
        super().trim()
        num_pages = -(-len(self.tokens) // BLOCK)
        for page in self.pages[num_pages:]:
            self._pool.disown(page)
        del self.pages[num_pages:]

    def free(self) -> None:
        """Give the pages back; of retained caches."""
        for page in self.pages:
            self._pool.disown(page)
        self.pages = []

    def _move(self, slots: Sequence[int], base: int) -> None:
        self._own(self, base, base + len(slots))
        targets = range(base, base + len(slots))
        places = [[self.pages[slot // BLOCK] for slot in chosen] for chosen in (slots, targets)]
        offsets = [[slot % BLOCK for slot in chosen] for chosen in (slots, targets)]
        page, to_page, offset, to_offset = torch.tensor(places + offsets, device=self.data.device)
        # The right side is a copy, made before anything is overwritten.
        self.data[to_page, :, :, to_offset] = self.data[page, :, :, offset]


class PagedStore(CacheStore):
    """A CacheStore whose caches are pages of one pool, allocated whole when the first session comes.

    A budget that is raised later counts when no session is left.
    """

    def __init__(self, shape: CacheShape, budget_bytes: int) -> None:
        super().__init__(shape, budget_bytes)
        self.pool = PagePool(shape, 0)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return BLOCK * self.shape.slot_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the sessions' pages, each counted once, without those of retained caches alone."""
        return self.pool.num_live * self.page_bytes

    @property
    def retained_bytes(self) -> int:
        """Bytes of pages that only retained caches own."""
        return (self.pool.num_used - self.pool.num_live) * self.page_bytes

    def has_room(self, session_id: str, num_slots: int) -> bool:
        """Whether the session can have that many slots without evicting another session."""
        budget_pages = self.budget_bytes // self.page_bytes
        limit = min(budget_pages, len(self.pool.owners)) if self._sessions else budget_pages
        needed = self._num_needed({session_id: num_slots}, {}, self.pool.sessions)
        return self.pool.num_live + needed <= limit

    def drop_retained(self) -> None:
        """Free all retained caches, and the pool when no session is left."""
        super().drop_retained()
        if not self._sessions:
            self.pool = PagePool(self.shape, 0)

    def _copy(self, source: Source, origin: SessionCache, copy: str, length: int) -> None:
        """Share the pages of the first `length` slots; the last one is copied when either cache writes."""
        if isinstance(source, int):
            self._retained.touch(source)
        pages = _pages(origin)[: -(-length // BLOCK)]
        target = PagedCache(self.pool, self._own)
        target.add(pages)
        target.tokens.extend(origin.tokens[:length])
        target.first = min(origin.first, length)
        self._drop(copy)
        self._sessions[copy] = target

    def _is_short(self, session: SessionCache, num_slots: int, first: int | None) -> bool:
        start = len(session.tokens) if first is None else first
        written = _pages(session)[start // BLOCK : -(-num_slots // BLOCK)]
        return session.capacity < num_slots or any(self.pool.owners[page] > 1 for page in written)

    def _take(self, session_id: str) -> SessionCache | None:
        session = self._sessions.pop(session_id, None)
        for page in () if session is None else _pages(session):
            self.pool.leave(page)
        return session

    def _make_room(self, wanted: dict[str, int], keep: frozenset[str], first: Mapping[str, int]) -> None:
        self._allocate()
        pinned = keep | wanted.keys()
        needed = self._num_needed(wanted, first, self.pool.owners)
        if needed > self._limit - self.pool.num_live:
            staying = Counter(page for name in pinned & self._sessions.keys() for page in self._held(name))
            least = len(staying) + self._num_needed(wanted, first, staying)
            if least > self._limit:
                raise CacheFullError(least * self.page_bytes, self.budget_bytes)
        while self.pool.num_used + self._num_needed(wanted, first, self.pool.owners) > self._limit:
            self._drop_one(pinned)
        for session_id, num_slots in wanted.items():
            session = self._sessions.get(session_id) or PagedCache(self.pool, self._own)
            assert isinstance(session, PagedCache)
            self._sessions[session_id] = session
            held = session.capacity
            self._own(session, first.get(session_id, len(session.tokens)), min(held, num_slots))
            session.add([self.pool.new() for _ in range((num_slots - held + BLOCK - 1) // BLOCK)])
            self._sessions.move_to_end(session_id)

    @property
    def _limit(self) -> int:
        return min(self.budget_bytes // self.page_bytes, len(self.pool.owners))

    def _held(self, session_id: str) -> Sequence[int]:
        session = self._sessions.get(session_id)
        return () if session is None else _pages(session)

    def _num_needed(
        self, wanted: Mapping[str, int], first: Mapping[str, int], owners: Mapping[int, int] | Sequence[int]
    ) -> int:
        """Return how many pages the sessions lack, copies of pages with several `owners` included."""
        needed, left = 0, dict[int, int]()
        for session_id, num_slots in wanted.items():
            held, end = self._held(session_id), -(-num_slots // BLOCK)
            start = first.get(session_id, len(self._sessions[session_id].tokens) if held else 0)
            for page in held[start // BLOCK : end]:
                count = left.get(page, owners[page])
                needed += count > 1
                left[page] = count - 1
            needed += max(0, end - len(held))
        return needed

    def _own(self, cache: PagedCache, first: int, end: int) -> None:
        """Give a cache its own copies of the shared pages among those of some slots."""
        for index in range(first // BLOCK, -(-end // BLOCK)):
            # When all others are dropped, the page is this cache's alone.
            while self.pool.owners[cache.pages[index]] > 1:
                if self.pool.num_used < self._limit:
                    cache.replace(index)
                else:
                    self._drop_one({name for name, other in self._sessions.items() if other is cache})

    def _drop_one(self, pinned: Set[str]) -> None:
        """Drop the oldest retained cache, or else evict the least recently used session."""
        if self._retained:
            self._retained.drop_oldest()
            return
        self._drop(next(name for name in self._sessions if name not in pinned))
        self.num_evictions += 1

    def _allocate(self) -> None:
        """Allocate the pool, or a larger one when no session uses it."""
        num_pages = self.budget_bytes // self.page_bytes
        if num_pages > len(self.pool.owners) and not self._sessions:
            self.drop_retained()
            self.pool = PagePool(self.shape, num_pages)


def _pages(cache: SessionCache) -> list[int]:
    assert isinstance(cache, PagedCache)
    return cache.pages
