"""The records of a session's cycles in Redis.

They are a key of the session (see `orchestrator.storage.keys`), which expires and is deleted with it. Writes
are ignored for a deleted or expired session, and from owners of an earlier session with the same name.

The records are concatenated serialised GetSessionTraceResponses, which protobuf parses as one merged message.
They are charged to the session. Records are dropped above three quarters of the bounds of stored bytes: the
rest is reserved for sessions.
"""

from __future__ import annotations

from typing import Any

from gammaray.deploy.redis_connection import RetryingRedis
from gammaray.v1 import generation_service_pb2 as pb
from orchestrator.storage import session_scripts as scripts
from orchestrator.storage.client import BatchedScript, answer
from orchestrator.storage.keys import DEFAULT_KEYS, Keys, StoreBounds

SHARE = 0.75
"""Share of the bounds of stored bytes up to which records are stored."""


class RedisTraceStore:
    """Stores the records of the sessions' cycles for a time; UnavailableError if Redis cannot be reached."""

    def __init__(
        self, redis: RetryingRedis, ttl_s: int, bounds: StoreBounds | None = None, keys: Keys = DEFAULT_KEYS
    ) -> None:
        self._redis, self._ttl_ms = redis, ttl_s * 1000
        self._bounds, self._keys = bounds or StoreBounds(redis), keys
        self._record = BatchedScript(redis, scripts.RECORD)

    async def append(self, session_id: str, epoch: int, records: bytes) -> bool:
        """Append records as the owner of an epoch; return False if the session is gone or a bound is hit."""
        bounds = [round(bound * SHARE) for bound in await self._bounds.of(session_id)]
        args = [session_id, "", self._ttl_ms, 0, epoch, records, *bounds]
        result = scripts.AGAIN
        while result == scripts.AGAIN:
            result = int(await answer(self._record.call(self._keys.of(session_id), args)))
        return result > 0

    async def read(self, session_id: str) -> pb.GetSessionTraceResponse:
        """Return the records of a session, oldest first; none when there is no such session."""
        data: Any = await answer(self._redis.get(self._keys.of(session_id)[2]))
        return pb.GetSessionTraceResponse.FromString(data or b"")
