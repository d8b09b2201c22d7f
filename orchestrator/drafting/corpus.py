"""Past outputs of a replica's sessions, in which later sessions of the same tenant look up continuations.

Text is kept apart by tenant and `cache_salt`: a session is only ever compared with text of its own key. It is
forgotten with its session: when that is deleted, when it expires, and when the store no longer has it because
another replica deleted it. Memory is bounded per tenant and in all; the oldest text goes first.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from gammaray.security.tenants import tenant_of
from gammaray.types import DrafterKind
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Match
from orchestrator.drafting.suffix_index import SEPARATOR, Context, SuffixIndex

BLOCK = 16_384
"""Tokens per block, for which memory is taken and given back; a key has at least one block."""

MIN_ENTRY = 8
"""Outputs of fewer tokens are not kept: there is nothing in them to propose."""

MAX_ENTRY = 16_000
"""Latest tokens of an output that are kept: adding them takes a few milliseconds of the event loop."""

LEAD = 8
"""Tokens of the prompt that are kept before an output, so that its start can be found."""

SHORTEST = 2
"""Least length of a match: among past outputs every token occurs, so a single one says nothing."""

CHECK_PAGE = 200
"""Sessions per question to the store."""

Key = tuple[str, str]
"""Tenant and `cache_salt`."""


@dataclass(eq=False)
class _TenantIndex:
    """The text of one key."""

    key: Key
    index: SuffixIndex = field(default_factory=lambda: SuffixIndex(BLOCK))
    entries: deque[_Entry] = field(default_factory=deque)

    @property
    def num_tokens(self) -> int:
        return self.index.num_blocks * BLOCK


@dataclass(eq=False)
class _Entry:
    """The output of one turn: positions [start, stop) of its index; `number` tells the older of two."""

    session_id: str
    held: _TenantIndex
    start: int
    stop: int
    number: int
    is_erased: bool = False


@dataclass
class _Outputs:
    expires: float
    entries: list[_Entry] = field(default_factory=list)


class Corpus:
    """Past outputs, shared by the sessions of a replica; implements TextDrafter for all of them.

    Of at most `max_tokens`, in blocks of `BLOCK` tokens of 24 bytes, one tenant may have `tenant_share` where
    keys name tenants. The outputs of a session are dropped `ttl_s` after its last turn.
    """

    kind = DrafterKind.SUFFIX

    def __init__(
        self, max_tokens: int, tenant_share: float, ttl_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_tokens, self._tenant_share = max_tokens, tenant_share
        self._ttl_s, self._now = ttl_s, now
        self._by_key: dict[Key, _TenantIndex] = {}
        self._outputs: OrderedDict[str, _Outputs] = OrderedDict()  # by expiry, the next one first
        self._numbers = itertools.count()

    @property
    def num_tokens(self) -> int:
        """Tokens for which memory is held."""
        return sum(held.num_tokens for held in self._by_key.values())

    @property
    def num_sessions(self) -> int:
        return len(self._outputs)

    def key_of(self, session: Session) -> Key:
        """Return the key that separates a session's text from that of others."""
        return tenant_of(session.session_id), session.cache_salt

    def add(self, session: Session) -> None:
        """Keep the output of a turn that has ended."""
        self._drop_expired()
        key, name = self.key_of(session), session.session_id
        bound = round(self._max_tokens * self._tenant_share) if key[0] else self._max_tokens
        if session.num_emitted < MIN_ENTRY or bound < BLOCK:
            return
        held = self._by_key.setdefault(key, _TenantIndex(key))
        start = max(0, len(session.prompt) - LEAD, session.num_committed - MAX_ENTRY)
        entry_start = held.index.end
        held.index.extend([*session.token_ids[start:], SEPARATOR])
        entry = _Entry(name, held, entry_start, held.index.end, next(self._numbers))
        held.entries.append(entry)
        outputs = self._outputs.setdefault(name, _Outputs(0.0))
        outputs.entries.append(entry)
        outputs.expires = self._now() + self._ttl_s
        self._outputs.move_to_end(name)
        indexes = list(self._by_key.values())
        self._shrink([held for held in indexes if held.key[0] == key[0]], bound)
        self._shrink(indexes, self._max_tokens)

    def look_up(self, session: Session, depth: int, context: Context | None = None) -> Match | None:
        """Return what followed the session's latest tokens in past outputs of its tenant and salt."""
        self._drop_expired()
        held = self._by_key.get(self.key_of(session))
        if held is None:
            return None
        return held.index.look_up(context or Context.of(session.token_ids), depth, SHORTEST)

    def forget(self, session_id: str) -> None:
        """Erase the outputs of a session, by its qualified name."""
        outputs = self._outputs.pop(session_id, None)
        for entry in outputs.entries if outputs else ():
            entry.held.index.erase(entry.start, entry.stop)
            entry.is_erased = True
            self._drop_erased(entry.held)

    async def forget_missing(self, exist: Callable[[Sequence[str]], Awaitable[Sequence[bool]]]) -> None:
        """Erase the outputs of sessions of which `exist` says, by qualified name, that they are gone."""
        self._drop_expired()
        names = list(self._outputs)
        for start in range(0, len(names), CHECK_PAGE):
            page = names[start : start + CHECK_PAGE]
            for name, is_there in zip(page, await exist(page), strict=True):
                if not is_there:
                    self.forget(name)

    def _drop_expired(self) -> None:
        now = self._now()
        while self._outputs:
            name, outputs = next(iter(self._outputs.items()))
            if outputs.expires > now:
                return
            self.forget(name)

    def _drop_erased(self, held: _TenantIndex) -> None:
        """Drop the blocks in which no entry is left, and an index without entries."""
        while held.entries and held.entries[0].is_erased:
            held.entries.popleft()
        while held.entries and held.index.oldest_stop <= held.entries[0].start:
            held.index.drop_oldest()
        if not held.entries:
            self._by_key.pop(held.key, None)

    def _shrink(self, indexes: list[_TenantIndex], max_tokens: int) -> None:
        """Drop the blocks of the oldest entries until the indexes are within a bound."""
        excess = sum(held.num_tokens for held in indexes) - max_tokens
        while excess > 0:
            held = min((held for held in indexes if held.entries), key=lambda one: one.entries[0].number)
            before = held.num_tokens
            held.index.drop_oldest()
            while held.entries and held.entries[0].stop <= held.index.start:  # its tokens are all dropped
                entry = held.entries.popleft()
                if entry.is_erased:
                    continue
                outputs = self._outputs[entry.session_id]
                outputs.entries.remove(entry)
                if not outputs.entries:
                    del self._outputs[entry.session_id]
            self._drop_erased(held)
            excess -= before - (held.num_tokens if held.entries else 0)
