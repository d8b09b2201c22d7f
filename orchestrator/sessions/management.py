"""Calls of clients about their sessions, whose names reach the store only through `Caller.qualify`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields

from gammaray.checks import check_int
from gammaray.errors import InvalidArgumentError
from gammaray.security.tenants import name_of
from gammaray.types import EmittedToken
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.sessions import SessionInfo
from orchestrator.access.caller import Caller
from orchestrator.sessions.lifecycle import REPLAY_TOKENS
from orchestrator.sessions.progress import emitted_token
from orchestrator.storage.session_store import RedisStore
from orchestrator.storage.trace_store import RedisTraceStore
from orchestrator.text.tokenizer import Tokenizer

MAX_LISTED = 1000
DEFAULT_LISTED = 100


class SessionCalls:
    """Gets, traces, lists, cancels and deletes sessions.

    Every method raises UnavailableError if Redis cannot be reached, those about one session also
    InvalidArgumentError if its name is malformed, and, but for `delete`, NotFoundError if the caller has no
    such session (any more).
    """

    def __init__(
        self, store: RedisStore, tokenizer: Tokenizer, release: Callable[..., None], traces: RedisTraceStore
    ) -> None:
        self._store, self._tokenizer, self._release = store, tokenizer, release
        self._traces = traces

    async def get(self, session_id: str, caller: Caller) -> tuple[SessionInfo, tuple[EmittedToken, ...]]:
        """Return a session and the tokens emitted in its current turn."""
        stored = await self._store.read(_qualified(session_id, caller))
        tokens: list[EmittedToken] = []
        for start in range(0, len(stored.tokens), REPLAY_TOKENS):
            piece = stored.tokens[start : start + REPLAY_TOKENS]
            tokens.extend(emitted_token(token, self._tokenizer) for token in piece)
            await asyncio.sleep(0)
        return _info(stored), tuple(tokens)

    async def trace(self, session_id: str, caller: Caller) -> pb.GetSessionTraceResponse:
        """Return the records of a session's cycles, oldest first."""
        name = _qualified(session_id, caller)
        records = await self._traces.read(name)
        if not records.cycles:
            await self._store.summary(name)  # raises NotFoundError if there is no such session
        return records

    async def recent(self, limit: int, caller: Caller) -> list[SessionInfo]:
        """Return up to `limit`, in [0, 1000], of the caller's sessions, latest first; 0 means 100."""
        check_int("limit", limit, 0, MAX_LISTED)
        found = await self._store.recent(caller.tenant, limit or DEFAULT_LISTED)
        return [_info(summary) for summary in found]

    async def cancel(self, session_id: str, caller: Caller) -> SessionInfo:
        """Cancel the session's current turn unless it has ended; return the session's new state."""
        name = _qualified(session_id, caller)
        self._release(name, await self._store.cancel(name))
        return _info(await self._store.summary(name))

    async def delete(self, session_id: str, caller: Caller) -> bool:
        """Delete a session, on the workers too; return whether it existed."""
        name = _qualified(session_id, caller)
        existed = await self._store.delete(name)
        self._release(name, 0, forget=True)
        return existed


def _qualified(session_id: str, caller: Caller) -> str:
    if not session_id:
        raise InvalidArgumentError("session_id", "no name", "the name of a session")
    return caller.qualify(session_id)


def _info(stored: SessionInfo) -> SessionInfo:
    """Return a session under the caller's name, without what else the store has of it."""
    known = {field.name: getattr(stored, field.name) for field in fields(SessionInfo)}
    return SessionInfo(**known | {"session_id": name_of(stored.session_id)})
