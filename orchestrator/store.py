"""Sessions in Redis: what must outlive an orchestrator. The only place where session data meets Redis.

Per session two keys, which expire together; `{id}` keeps them on one node of a Redis cluster:

* `gammaray:session:{id}` (hash): `request` (a serialised GenerateRequest), `prompt` (token ids, uint32 each),
  `seed`, `epoch`, and `finish_reason` once it has ended.
* `gammaray:session:{id}:tokens` (string, append-only): the emitted tokens, five bytes each: token id (uint32,
  little endian) and origin.
"""

from __future__ import annotations

import struct
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from gammaray.errors import FailedPreconditionError, NotFoundError
from gammaray.types import FinishReason, TokenOrigin
from orchestrator.redis_calls import BatchedScript, answer
from orchestrator.session import Session

__all__ = ["RedisStore", "StoredSession"]

_TOKEN = struct.Struct("<IB")
_ORIGINS = (TokenOrigin.ACCEPTED, TokenOrigin.CORRECTION, TokenOrigin.BONUS)
_CODE = {origin: code for code, origin in enumerate(_ORIGINS)}

_CREATE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'request', ARGV[1], 'prompt', ARGV[2], 'seed', ARGV[3], 'epoch', ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[5])
return 1
"""

# Answers the number of bytes stored, or why nothing was: -1 no session, -2 another owner, -3 wrong offset.
# A commit that is there already is answered as done: its first answer was lost on the way.
_COMMIT = """
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch then return -1 end
if tonumber(epoch) ~= tonumber(ARGV[1]) then return -2 end
local offset, length = tonumber(ARGV[2]), redis.call('STRLEN', KEYS[2])
if length ~= offset then
  local replayed = length == offset + #ARGV[3] and redis.call('GETRANGE', KEYS[2], offset, -1) == ARGV[3]
  if not replayed then return -3 end
else
  length = redis.call('APPEND', KEYS[2], ARGV[3])
end
if ARGV[5] ~= '' then redis.call('HSET', KEYS[1], 'finish_reason', ARGV[5]) end
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[4])
return length
"""

_FINISH = """
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch or tonumber(epoch) ~= tonumber(ARGV[1]) then return 0 end
redis.call('HSETNX', KEYS[1], 'finish_reason', ARGV[2])
return 1
"""

_TAKE_OVER = """
if redis.call('EXISTS', KEYS[1]) == 0 then return -1 end
return redis.call('HINCRBY', KEYS[1], 'epoch', 1)
"""


@dataclass(frozen=True)
class StoredSession:
    """What the store knows of a session.

    Args:
        request: The request as it was given to `create`, a serialised GenerateRequest.
        prompt: Token ids of the prompt.
        seed: The seed in use.
        epoch: Fencing number of the owner.
        token_ids: The emitted tokens.
        origins: Where each came from.
        finish_reason: None while it is not finished.
    """

    request: bytes
    prompt: tuple[int, ...]
    seed: int
    epoch: int
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    finish_reason: FinishReason | None


class RedisStore:
    """Implements the cycle's SessionStore; every method is one round trip, which commits of one time share.

    Args:
        redis: A connected client.
        ttl_s: Seconds that a session stays after its last change.
    """

    def __init__(self, redis: Redis, ttl_s: int) -> None:
        self._redis, self._ttl_s = redis, ttl_s
        self._create = redis.register_script(_CREATE)
        self._commit = BatchedScript(redis, _COMMIT)
        self._finish = redis.register_script(_FINISH)
        self._take_over = redis.register_script(_TAKE_OVER)

    async def create(self, session: Session, request: bytes) -> None:
        """Store a new session.

        Raises:
            FailedPreconditionError: There is one of this name.
            UnavailableError: Redis cannot be reached.
        """
        prompt = struct.pack(f"<{len(session.prompt)}I", *session.prompt)
        seed = session.params.seed or 0
        created = await answer(
            self._create(
                keys=_keys(session.session_id), args=[request, prompt, seed, session.epoch, self._ttl_s]
            )
        )
        if not created:
            raise FailedPreconditionError(f"session {session.session_id} exists already")

    def append(
        self, session: Session, token_ids: Sequence[int], origins: Sequence[TokenOrigin]
    ) -> Coroutine[Any, Any, None]:
        """Store the tokens that end the session's committed ones, and its `finish_reason`, all as of now.

        Raises:
            FailedPreconditionError: Another owner, or other tokens than those stored before.
            NotFoundError: The session was deleted or has expired.
            UnavailableError: Redis cannot be reached.
        """
        data = b"".join(_TOKEN.pack(t, _CODE[origin]) for t, origin in zip(token_ids, origins, strict=True))
        reason = session.finish_reason.value if session.finish_reason else ""
        return self._append(
            session.session_id, session.epoch, session.num_emitted - len(token_ids), data, reason
        )

    async def _append(self, session_id: str, epoch: int, start: int, data: bytes, reason: str) -> None:
        args = [epoch, start * _TOKEN.size, data, self._ttl_s, reason]
        stored = await answer(self._commit.call(_keys(session_id), args))
        if stored == -1:
            raise NotFoundError(f"session {session_id} was deleted or has expired")
        if stored == -2:
            raise FailedPreconditionError(f"session {session_id} has another owner by now")
        if stored == -3:
            raise FailedPreconditionError(f"session {session_id} does not end at token {start}")

    async def finish(self, session: Session, reason: FinishReason) -> None:
        """Mark a session as ended, unless it is already or has another owner.

        Raises:
            UnavailableError: Redis cannot be reached.
        """
        await answer(self._finish(keys=_keys(session.session_id)[:1], args=[session.epoch, reason.value]))

    async def take_over(self, session_id: str) -> int:
        """Become the owner: return the new epoch, from which on commits of the former owner are refused.

        Raises:
            NotFoundError: No such session.
            UnavailableError: Redis cannot be reached.
        """
        epoch = int(await answer(self._take_over(keys=_keys(session_id)[:1])))
        if epoch < 0:
            raise NotFoundError(f"no session {session_id}")
        return epoch

    async def read(self, session_id: str) -> StoredSession:
        """Return a session.

        Raises:
            NotFoundError: No such session.
            UnavailableError: Redis cannot be reached.
        """
        head, tokens = _keys(session_id)
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hgetall(head)
        pipeline.get(tokens)
        fields, data = await answer(pipeline.execute())
        if not fields:
            raise NotFoundError(f"no session {session_id}")
        emitted = list(_TOKEN.iter_unpack(data or b""))
        prompt = fields[b"prompt"]
        return StoredSession(
            request=fields[b"request"],
            prompt=struct.unpack(f"<{len(prompt) // 4}I", prompt),
            seed=int(fields[b"seed"]),
            epoch=int(fields[b"epoch"]),
            token_ids=tuple(token_id for token_id, _ in emitted),
            origins=tuple(_ORIGINS[code] for _, code in emitted),
            finish_reason=FinishReason(fields[b"finish_reason"].decode())
            if b"finish_reason" in fields
            else None,
        )

    async def delete(self, session_id: str) -> None:
        """Forget a session; none of that name is fine.

        Raises:
            UnavailableError: Redis cannot be reached.
        """
        await answer(self._redis.delete(*_keys(session_id)))


def _keys(session_id: str) -> list[str]:
    head = f"gammaray:session:{{{session_id}}}"
    return [head, f"{head}:tokens"]
