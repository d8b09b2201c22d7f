"""What the tracing of a session keeps in Redis: the records of its cycles, and which span serves it.

Both are keys of the session (see `orchestrator.storage.keys`): they expire and are deleted with it. Nothing
is written for a session that is gone, nor by an owner of an earlier session of that name.

The records are serialised GetSessionTraceResponses one after the other, which is how protobuf writes their
concatenation. They are charged to the session. They take up to three quarters of the bounds of stored bytes:
past that they are dropped, and the rest is left to sessions.
"""

from __future__ import annotations

from typing import Any

from gammaray.v1 import generation_service_pb2 as pb
from orchestrator.storage import session_scripts as scripts
from orchestrator.storage.client import BatchedScript, Redis, answer
from orchestrator.storage.keys import StoreBounds, keys_of

__all__ = ["RedisTraceStore"]

SHARE = 0.75
"""Of the bounds of stored bytes, up to which records are stored."""


class RedisTraceStore:
    """Implements the journal's RecordStore.

    Args:
        redis: A connected client.
        ttl_s: Seconds that a session stays after its last change.
        bounds: Upper bounds of stored bytes.
    """

    def __init__(self, redis: Redis, ttl_s: int, bounds: StoreBounds | None = None) -> None:
        self._redis, self._ttl_ms = redis, ttl_s * 1000
        self._bounds = bounds or StoreBounds(redis)
        self._record = BatchedScript(redis, scripts.RECORD)
        self._note_trace = BatchedScript(redis, scripts.NOTE_TRACE)

    async def append(self, session_id: str, epoch: int, records: bytes) -> bool:
        """Add records, a serialised GetSessionTraceResponse, to those of a session, as the owner of an epoch.

        Returns:
            Whether they were stored: they are not when the session is gone, or when there is no room for
            them.

        Raises:
            UnavailableError: Redis cannot be reached.
        """
        bounds = [round(bound * SHARE) for bound in await self._bounds.of(session_id)]
        args = [session_id, "", self._ttl_ms, 0, epoch, records, *bounds]
        result = scripts.AGAIN
        while result == scripts.AGAIN:
            result = int(await answer(self._record.call(keys_of(session_id), args)))
        return result > 0

    async def read(self, session_id: str) -> pb.GetSessionTraceResponse:
        """Return the records of a session, oldest first; none when there is no such session.

        Raises:
            UnavailableError: Redis cannot be reached.
        """
        data: Any = await answer(self._redis.get(keys_of(session_id)[2]))
        return pb.GetSessionTraceResponse.FromString(data or b"")

    async def serving(self, session_id: str) -> str:
        """Return the `traceparent` of the sampled generation that served a session last, or an empty text.

        Raises:
            UnavailableError: Redis cannot be reached.
        """
        return _text(await answer(self._redis.get(keys_of(session_id)[3])))

    async def serve(self, session_id: str, epoch: int, traceparent: str) -> str:
        """Note the sampled generation of an epoch's owner, and return the one before as `serving` does.

        Raises:
            UnavailableError: Redis cannot be reached.
        """
        args = [session_id, "", self._ttl_ms, 0, epoch, traceparent]
        return _text(await answer(self._note_trace.call(keys_of(session_id), args)))


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""
