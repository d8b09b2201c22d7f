"""What the tracing of a session keeps in Redis: the records of its cycles, and which span serves it.

Two keys beside the session's own, which expire like them:

* `gammaray:session:{id}:cycles` (string, append-only): serialised GetSessionTraceResponses one after the
  other, which is how protobuf writes their concatenation.
* `gammaray:session:{id}:trace` (string): `traceparent` of the generation that serves it, if that is sampled.
"""

from __future__ import annotations

from typing import Any

from gammaray.v1 import generation_service_pb2 as pb
from orchestrator.redis_calls import Redis, answer

__all__ = ["RedisTraceStore", "trace_keys"]


class RedisTraceStore:
    """Implements the journal's RecordStore.

    Args:
        redis: A connected client.
        ttl_s: Seconds that records stay after the last one came.
    """

    def __init__(self, redis: Redis, ttl_s: int) -> None:
        self._redis, self._ttl_s = redis, ttl_s

    async def append(self, session_id: str, records: bytes) -> None:
        """Add records, a serialised GetSessionTraceResponse, to those of a session.

        Raises:
            UnavailableError: Redis cannot be reached.
        """
        cycles, _ = trace_keys(session_id)
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.append(cycles, records)
        pipeline.expire(cycles, self._ttl_s)
        await answer(pipeline.execute())

    async def read(self, session_id: str) -> pb.GetSessionTraceResponse:
        """Return the records of a session, oldest first; none when there is no such session.

        Raises:
            UnavailableError: Redis cannot be reached.
        """
        cycles, _ = trace_keys(session_id)
        data: Any = await answer(self._redis.get(cycles))
        return pb.GetSessionTraceResponse.FromString(data or b"")

    async def serving(self, session_id: str) -> str:
        """Return the `traceparent` of the sampled generation that served a session last, or an empty text.

        Raises:
            UnavailableError: Redis cannot be reached.
        """
        _, trace = trace_keys(session_id)
        return _text(await answer(self._redis.get(trace)))

    async def serve(self, session_id: str, traceparent: str) -> str:
        """Note which sampled generation serves a session now; return the one before as `serving` does.

        Raises:
            UnavailableError: Redis cannot be reached.
        """
        _, trace = trace_keys(session_id)
        before: Any = await answer(self._redis.set(trace, traceparent, ex=self._ttl_s, get=True))
        return _text(before)


def trace_keys(session_id: str) -> tuple[str, str]:
    """Return the names of both keys of a session."""
    head = f"gammaray:session:{{{session_id}}}"
    return f"{head}:cycles", f"{head}:trace"


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""
