"""Sessions in Redis: what must outlive an orchestrator. The only place where session data meets Redis.

Per session two keys, which expire together; `{id}` keeps them on one node of a Redis cluster:

* `gammaray:session:{id}` (hash): `request` (a serialised GenerateRequest), `prompt` (token ids, uint32 each),
  `seed`, `max_tokens` and `num_top` of the current `turn`; `epoch`, the fencing number of its owner; `lease`,
  the time (ms) until which the owner is taken to be alive, absent when there is none; `size`, the bytes of
  the tokens; `state`, what an heir should know (`orchestrator.heritage`); `model_identity` of the target that
  emitted them, from the first commit on (`orchestrator.identity`); `finish_reason` once it has ended.
* `gammaray:session:{id}:tokens` (string, append-only): the turn's emitted tokens, see `orchestrator.records`.

A deleted one leaves its epoch for a while, from which on those of a new one of the same name count: an owner
that has not noticed yet stays fenced. Beside them `gammaray:running` (set): sessions that somebody works on,
or did when it died; and `gammaray:sessions:<tenant>` (sorted set): sessions by their last sign of life.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from redis.asyncio import Redis

from gammaray.errors import (
    CancelledError,
    FailedPreconditionError,
    InternalError,
    ModelChangedError,
    NotFoundError,
)
from gammaray.types import TokenOrigin
from orchestrator import store_scripts as scripts
from orchestrator.cpu_threads import INLINE_BYTES, in_thread
from orchestrator.cycle import TokenLogprobs
from orchestrator.records import TokenRecords
from orchestrator.redis_calls import BatchedScript, answer
from orchestrator.session import Session
from orchestrator.stored import StoredSession, fields_of, index_of, keys_of, parse, tenant_of
from orchestrator.trace_store import trace_keys

__all__ = ["LEASE_S", "RedisStore", "StoredSession"]

RUNNING = "gammaray:running"
LEASE_S = 10.0
"""How long an owner that gives no sign of life is taken to be alive."""


class RedisStore:
    """Implements the cycle's SessionStore; a commit is one round trip, which those of one time share.

    Args:
        redis: A connected client.
        ttl_s: Seconds that a session stays after its last change.
        lease_s: Seconds that an owner is taken to be alive without a sign of life.
    """

    def __init__(self, redis: Redis, ttl_s: int, lease_s: float = LEASE_S) -> None:
        self._redis, self._ttl_s, self._lease_ms = redis, ttl_s, round(lease_s * 1e3)
        self._create = redis.register_script(scripts.CREATE)
        self._delete = redis.register_script(scripts.DELETE)
        self._next_turn = redis.register_script(scripts.NEXT_TURN)
        self._take_over = redis.register_script(scripts.TAKE_OVER)
        self._cancel = redis.register_script(scripts.CANCEL)
        self._commit = BatchedScript(redis, scripts.COMMIT)
        self._renew = BatchedScript(redis, scripts.RENEW)
        self._detach = BatchedScript(redis, scripts.DETACH)
        self._reap = BatchedScript(redis, scripts.REAP)
        self._touch = BatchedScript(redis, scripts.TOUCH)

    async def create(self, session: Session, request: bytes) -> None:
        """Store a new session, owned by the caller; sets its epoch.

        Raises:
            FailedPreconditionError: There is one of this name.
            UnavailableError: Redis cannot be reached.
        """
        args = [uuid.uuid4().hex, self._ttl_s, self._lease_ms, *fields_of(session, request)]
        epoch = int(await answer(self._create(keys=keys_of(session.session_id), args=args)))
        if epoch == 0:
            raise FailedPreconditionError(f"session {session.session_id} exists already")
        session.epoch = epoch
        await self._run(session.session_id)

    async def next_turn(self, session: Session, request: bytes, before: StoredSession) -> None:
        """Begin the turn behind `before`, which has finished; sets the session's epoch.

        Raises:
            FailedPreconditionError: It is not as `before` says any more.
            NotFoundError: The session was deleted or has expired.
            UnavailableError: Redis cannot be reached.
        """
        args = [uuid.uuid4().hex, self._ttl_s, self._lease_ms, before.epoch, *fields_of(session, request)]
        epoch = int(await answer(self._next_turn(keys=keys_of(session.session_id), args=args)))
        if epoch == 0:
            raise FailedPreconditionError(f"session {session.session_id} went on from turn {before.turn}")
        session.epoch = _checked(epoch, session.session_id)
        await self._run(session.session_id)

    def append(
        self,
        session: Session,
        token_ids: Sequence[int],
        origins: Sequence[TokenOrigin],
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> Coroutine[Any, Any, None]:
        """Store the tokens that end the session's committed ones, and its `finish_reason`, all as of now.

        Raises:
            FailedPreconditionError: Another owner, or other tokens than those stored before.
            ModelChangedError: The tokens stored before are another target model's.
            CancelledError: The turn was cancelled.
            NotFoundError: The session was deleted or has expired.
            InternalError: Redis lost tokens.
            UnavailableError: Redis cannot be reached.
        """
        records = TokenRecords(session.num_top_logprobs)
        data = records.pack(token_ids, origins, logprobs)
        reason = session.finish_reason.value if session.finish_reason else ""
        offset = (session.num_emitted - len(token_ids)) * records.size
        state, session.state = session.state, b""
        args = [session.epoch, offset, data, self._ttl_s, reason, state, session.model_identity]
        return self._append(session.session_id, args, session.num_emitted - len(token_ids))

    async def _append(self, session_id: str, args: list[Any], start: int) -> None:
        result = int(await answer(self._commit.call(keys_of(session_id), args)))
        if result == scripts.OTHER_MODEL:
            began = (await self.read(session_id)).model_identity
            raise ModelChangedError(session_id, began, args[-1:])
        _checked(result, session_id, start)

    async def renew(self, session: Session) -> None:
        """Tell that the owner still works on the session.

        Raises:
            GammarayError: As `append`.
        """
        await self.renew_as(session.session_id, session.epoch)

    async def renew_as(self, session_id: str, epoch: int) -> None:
        """Tell that the owner of an epoch still works on a session; otherwise as `renew`."""
        args = [epoch, self._ttl_s, self._lease_ms]
        if _checked(int(await answer(self._renew.call(keys_of(session_id), args))), session_id) > 0:
            await self._run(session_id)

    async def detach(self, session: Session) -> None:
        """Let go of a session, which then waits to be resumed; nothing if somebody else owns it by now.

        Raises:
            UnavailableError: Redis cannot be reached.
        """
        args = [session.epoch, self._ttl_s, session.state]
        if await answer(self._detach.call(keys_of(session.session_id), args)) > 0:
            await self.stopped(session.session_id)

    async def stopped(self, session_id: str) -> None:
        """Take note that nobody works on a session any more.

        Raises:
            UnavailableError: Redis cannot be reached.
        """
        await asyncio.gather(answer(self._redis.srem(RUNNING, session_id)), self._seen(session_id))

    async def take_over(self, session_id: str) -> int:
        """Become the owner: return the new epoch, from which on commits of the former owner are refused.

        A finished session needs no owner; it keeps its epoch.

        Raises:
            NotFoundError: No such session.
            UnavailableError: Redis cannot be reached.
        """
        args = [self._ttl_s, self._lease_ms]
        epoch = _checked(int(await answer(self._take_over(keys=keys_of(session_id), args=args))), session_id)
        await self._run(session_id)
        return epoch

    async def cancel(self, session_id: str) -> int:
        """End the session's turn, unless it has ended; return the epoch from which on nobody commits.

        Raises:
            NotFoundError: No such session.
            UnavailableError: Redis cannot be reached.
        """
        epoch = _checked(int(await answer(self._cancel(keys=keys_of(session_id)[:1]))), session_id)
        await self.stopped(session_id)
        return epoch

    async def read(self, session_id: str) -> StoredSession:
        """Return a session.

        Raises:
            NotFoundError: No such session.
            InternalError: Redis lost tokens.
            UnavailableError: Redis cannot be reached.
        """
        (found,) = await self._read([session_id])
        if found is None:
            raise NotFoundError(f"no session {session_id}", "session")
        if not found.is_whole:
            raise InternalError(f"session {session_id}: Redis lost tokens of it")
        return found

    async def recent(self, tenant: str, limit: int) -> list[StoredSession]:
        """Return a tenant's sessions, the one with the latest sign of life first.

        Raises:
            UnavailableError: Redis cannot be reached.
        """
        names = await answer(self._redis.zrevrange(index_of(tenant), 0, limit - 1))
        found = await self._read([_text(name) for name in names])
        return [session for session in found if session is not None]

    async def running(self) -> list[str]:
        """Return the sessions that somebody works on, or did until it died.

        Raises:
            UnavailableError: Redis cannot be reached.
        """
        return [_text(name) for name in await answer(self._redis.smembers(RUNNING))]

    async def reap(self, session_id: str) -> int | None:
        """Let go of a session whose owner gives no sign of life.

        Returns:
            The epoch of the owner that is no more, -1 where the session is no more, None while it is alive.

        Raises:
            UnavailableError: Redis cannot be reached.
        """
        epoch = int(await answer(self._reap.call(keys_of(session_id)[:1], [self._lease_ms])))
        if epoch == 0:
            return None
        await answer(self._redis.srem(RUNNING, session_id))
        return epoch

    async def delete(self, session_id: str) -> bool:
        """Forget a session; return whether there was one of that name.

        Raises:
            UnavailableError: Redis cannot be reached.
        """
        existed = await answer(self._delete(keys=keys_of(session_id), args=[self._ttl_s]))
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.delete(*trace_keys(session_id))
        pipeline.srem(RUNNING, session_id)
        pipeline.zrem(index_of(tenant_of(session_id)), session_id)
        await answer(pipeline.execute())
        return bool(existed)

    async def _run(self, session_id: str) -> None:
        await asyncio.gather(answer(self._redis.sadd(RUNNING, session_id)), self._seen(session_id))

    async def _seen(self, session_id: str) -> None:
        await answer(self._touch.call([index_of(tenant_of(session_id))], [session_id, self._ttl_s]))

    async def _read(self, session_ids: Iterable[str]) -> list[StoredSession | None]:
        names = list(session_ids)
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.time()
        for name in names:
            head, tokens, _ = keys_of(name)
            pipeline.hgetall(head)
            pipeline.get(tokens)
            pipeline.pttl(head)
        (seconds, micros), *rest = await answer(pipeline.execute())
        now_ms = seconds * 1000 + micros // 1000
        rows = zip(names, rest[::3], rest[1::3], rest[2::3], strict=True)
        found: list[StoredSession | None] = []
        for name, head, data, ttl_ms in rows:
            data = data or b""
            if not head:
                found.append(None)
            elif len(data) <= INLINE_BYTES:
                found.append(parse(name, head, data, ttl_ms, now_ms))
            else:
                found.append(await in_thread(parse, name, head, data, ttl_ms, now_ms))
        return found


def _checked(result: int, session_id: str, start: int = 0) -> int:
    """Return what a script answered, or raise what it means."""
    if result == scripts.GONE:
        raise NotFoundError(
            f"session {session_id} was deleted or has expired, if there ever was one", "session"
        )
    if result == scripts.OTHER_OWNER:
        raise FailedPreconditionError(f"session {session_id} has another owner by now")
    if result == scripts.WRONG_OFFSET:
        raise FailedPreconditionError(f"session {session_id} does not end at token {start}")
    if result == scripts.CANCELLED:
        raise CancelledError(f"session {session_id} was cancelled")
    if result == scripts.LOST:
        raise InternalError(f"session {session_id}: Redis lost tokens of it")
    return result


def _text(name: Any) -> str:
    return str(name, "utf-8")
