"""Sessions in Redis, which outlive an orchestrator. Only this module reads and writes session data in Redis.

The keys are listed in `orchestrator.storage.keys`. Each operation that must be atomic is a Lua script in
`orchestrator.storage.session_scripts`.
"""

from __future__ import annotations

import hashlib
import struct
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gammaray.blocks import TokenLogprobs
from gammaray.deploy.redis_connection import RetryingRedis
from gammaray.errors import (
    CancelledError,
    FailedPreconditionError,
    InternalError,
    ModelChangedError,
    NotFoundError,
)
from gammaray.security.tenants import name_of
from gammaray.types import FinishReason, TokenOrigin
from gammaray.wire.sessions import SessionInfo, SessionState
from orchestrator.cycle.session import Session
from orchestrator.storage import session_scripts as scripts
from orchestrator.storage.client import BatchedScript, answer
from orchestrator.storage.keys import DEFAULT_KEYS, Keys, StoreBounds
from orchestrator.storage.token_records import StoredToken, TokenRecords
from orchestrator.text.cpu_threads import INLINE_BYTES, in_thread

LEASE_S = 10.0
"""Seconds after which an owner that does not renew its lease is considered dead."""

LIST_PAGE = 200
"""Sessions per call of the listing script, so that it blocks neither Redis nor the event loop for long."""

READ_TRIES = 5

FORMAT = 1
"""Version of a session's hash, request and tokens, a field of the hash; those of 0.2.0 lack it: version 1.
A change that orchestrators before it could not read raises it; a new field does not."""

SUMMARY_FIELDS = (
    "digest",
    "epoch",
    "turn",
    "seed",
    "prompt_tokens",
    "num_top",
    "size",
    "created",
    "lease",
    "finish_reason",
)
"""Fields of a session's summary. A hash without the first was stored by an earlier version."""

_RECORDS = {num_top: TokenRecords(None if num_top < 0 else num_top) for num_top in range(-1, 21)}


@dataclass(frozen=True)
class StoredSession(SessionInfo):
    """A session with its tokens, as read from the store; its id is the qualified name."""

    request: bytes  # the request that began the turn, as passed to the store
    digest: str
    prompt: tuple[int, ...]  # token ids of the turn's prompt, which includes all earlier turns
    sample_index: int  # index of the session among the request's choices
    max_tokens: int  # upper bound of emitted tokens, clipped to the context
    tokens: tuple[StoredToken, ...]
    handover: bytes  # what the owner left for the next one
    model_identity: str  # of the target that emitted the tokens, earlier turns included; "" if unknown
    is_whole: bool  # whether all committed tokens are present

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token_id for token_id, _, _ in self.tokens)

    @property
    def origins(self) -> tuple[TokenOrigin, ...]:
        return tuple(origin for _, origin, _ in self.tokens)


def parse_summary(session_id: str, head: Mapping[str, bytes], expires_ms: int, now_ms: int) -> SessionInfo:
    """Parse a session without its tokens from a hash's fields, as of `now_ms`."""
    reason = head.get("finish_reason")
    records = _RECORDS[int(head["num_top"])]
    state = SessionState.RUNNING if int(head.get("lease", 0)) > now_ms else SessionState.DETACHED
    return SessionInfo(
        session_id=session_id,
        turn=int(head["turn"]),
        epoch=int(head["epoch"]),
        seed=int(head["seed"]),
        finish_reason=FinishReason(reason.decode()) if reason is not None else None,
        state=state if reason is None else SessionState.FINISHED,
        prompt_tokens=int(head["prompt_tokens"]),
        emitted_tokens=int(head["size"]) // records.size,
        created_ms=int(head["created"]),
        expires_in_ms=max(0, expires_ms),
    )


def split_summary(session_id: str, line: bytes, now_ms: int) -> SessionInfo:
    """Parse a summary from a line of `orchestrator.storage.session_scripts.LIST`."""
    *values, expires_ms = line.split(b" ")
    head = {name: value for name, value in zip(SUMMARY_FIELDS, values, strict=True) if value != b"-"}
    return parse_summary(session_id, head, int(expires_ms), now_ms)


def parse(
    session_id: str, fields: Mapping[bytes, bytes], request: bytes, data: bytes, expires_ms: int, now_ms: int
) -> StoredSession:
    """Parse a session from its hash, its request and its tokens, as of `now_ms`."""
    head = {name.decode(): value for name, value in fields.items()}
    body, prompt = _unpack_request(request)
    return StoredSession(
        **vars(parse_summary(session_id, head, expires_ms, now_ms)),
        request=body,
        digest=head["digest"].decode(),
        prompt=prompt,
        sample_index=int(head["sample_index"]),
        max_tokens=int(head["max_tokens"]),
        tokens=_RECORDS[int(head["num_top"])].unpack(data),
        handover=head.get("state", b""),
        model_identity=head.get("model_identity", b"").decode(),
        is_whole=int(head["size"]) == len(data),
    )


def fields_of(session: Session) -> list[Any]:
    """Return the hash fields of a turn as alternating fields and values."""
    fields = {
        "format": FORMAT,
        "seed": session.params.seed or 0,
        "sample_index": session.params.sample_index,
        "max_tokens": session.max_tokens,
        "num_top": -1 if session.num_top_logprobs is None else session.num_top_logprobs,
        "prompt_tokens": len(session.prompt),
    }
    return [part for field in fields.items() for part in field]


def pack_request(request: bytes, prompt: Sequence[int]) -> bytes:
    return struct.pack("<I", len(request)) + request + struct.pack(f"<{len(prompt)}I", *prompt)


def _unpack_request(packed: bytes) -> tuple[bytes, tuple[int, ...]]:
    (length,) = struct.unpack_from("<I", packed)
    count = (len(packed) - 4 - length) // 4
    return packed[4 : 4 + length], struct.unpack_from(f"<{count}I", packed, 4 + length)


class RedisStore:
    """Implements the cycle's SessionStore; a commit is one round trip, shared by concurrent commits.

    Every method raises UnavailableError if Redis cannot be reached. A session is kept `ttl_s` after its last
    change; a running turn renews that at most once a second, or ten times per `ttl_s` if that is more often.
    """

    def __init__(
        self,
        redis: RetryingRedis,
        ttl_s: int,
        lease_s: float = LEASE_S,
        bounds: StoreBounds | None = None,
        keys: Keys = DEFAULT_KEYS,
    ) -> None:
        self._redis, self._ttl_ms, self._lease_ms = redis, ttl_s * 1000, round(lease_s * 1e3)
        self._bounds, self._keys = bounds or StoreBounds(redis), keys
        self._renew_below = self._ttl_ms - min(1000, self._ttl_ms // 10)
        self._create = redis.register_script(scripts.CREATE)
        self._delete = redis.register_script(scripts.DELETE)
        self._next_turn = redis.register_script(scripts.NEXT_TURN)
        self._take_over = redis.register_script(scripts.TAKE_OVER)
        self._cancel = redis.register_script(scripts.CANCEL)
        self._read = redis.register_script(scripts.READ)
        self._list = redis.register_script(scripts.LIST)
        self._commit = BatchedScript(redis, scripts.COMMIT)
        self._end = BatchedScript(redis, scripts.END)
        self._renew = BatchedScript(redis, scripts.RENEW)
        self._detach = BatchedScript(redis, scripts.DETACH)
        self._reap = BatchedScript(redis, scripts.REAP)

    async def create(self, session: Session, request: bytes) -> None:
        """Store a new session, owned by the caller; sets its epoch.

        FailedPreconditionError if a session with this name exists; else errors are those of
        `StoreBounds.admitted`.
        """
        if not await self._begin(session, request):
            raise FailedPreconditionError(f"session {name_of(session.session_id)} already exists")

    async def next_turn(self, session: Session, request: bytes, before: StoredSession) -> None:
        """Begin the turn after `before`, which has finished; sets the session's epoch.

        FailedPreconditionError if the session has changed since `before` was read, NotFoundError if it was
        deleted or has expired; else errors are those of `StoreBounds.admitted`.
        """
        if not await self._begin(session, request, before):
            name = name_of(session.session_id)
            raise FailedPreconditionError(f"session {name} has continued after turn {before.turn}")

    async def _begin(self, session: Session, request: bytes, before: StoredSession | None = None) -> bool:
        """Begin a session, or the turn after `before`; return whether the session is in the state for it."""
        name, packed = session.session_id, pack_request(request, session.prompt)
        digest = hashlib.sha256(packed).hexdigest()[:32]  # a tenant's equal requests are stored once
        keys = [*self._keys.of(name), *self._keys.request(name, digest)]
        room = session.max_tokens * TokenRecords(session.num_top_logprobs).size
        args = [*self._common(name, digest), uuid.uuid4().hex, *await self._bounds.of(name), packed, room]
        script = self._create
        if before is not None:
            script = self._next_turn
            keys += self._keys.request(name, before.digest)
            args += [before.epoch, before.digest]
        epoch = await self._admitted(script, name, keys, [*args, *fields_of(session)])
        if epoch != 0:
            session.epoch, session.digest = _checked(epoch, name), digest
        return epoch != 0

    def append(
        self,
        session: Session,
        token_ids: Sequence[int],
        origins: Sequence[TokenOrigin],
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> Coroutine[Any, Any, None]:
        """Store the session's last committed tokens, which are `token_ids`, and its current `finish_reason`.

        Raises:
            FailedPreconditionError: Another owner, or the stored tokens differ from the session's.
            ModelChangedError: The stored tokens come from another target model.
            CancelledError: The turn was cancelled.
            NotFoundError: The session was deleted or has expired.
            InternalError: Redis lost tokens.
        """
        records = TokenRecords(session.num_top_logprobs)
        data = records.pack(token_ids, origins, logprobs)
        start = session.num_emitted - len(token_ids)
        state, session.state = session.state, b""
        args = [session.epoch, start * records.size, data, state, session.model_identity]
        reason = session.finish_reason.value if session.finish_reason else ""
        return self._append(session, args, reason, start)

    async def _append(self, session: Session, args: list[Any], reason: str, start: int) -> None:
        name, is_due = session.session_id, False
        if reason:
            args = [*self._common(name, session.digest), *args, reason]
            result = await answer(self._end.call(self._keys_of(session), args))
        else:
            result = await answer(self._commit.call(self._keys.of(name)[:2], [*args, self._renew_below]))
            if isinstance(result, list):
                result, is_due = result
        if result == scripts.OTHER_MODEL:
            raise ModelChangedError(name, (await self.read(name)).model_identity, [session.model_identity])
        _checked(result, name, start)
        if is_due:
            await self.renew(session)

    async def renew(self, session: Session) -> None:
        """Renew the owner's lease of the session; raises what `append` does."""
        args = [*self._common(session.session_id, session.digest), session.epoch]
        _checked(await answer(self._renew.call(self._keys_of(session), args)), session.session_id)

    async def detach(self, session: Session) -> None:
        """End the lease of a session, which may then be resumed; no effect if it has another owner by now."""
        args = [*self._common(session.session_id, session.digest), session.epoch, session.state]
        await answer(self._detach.call(self._keys_of(session), args))

    async def take_over(self, session_id: str, digest: str = "") -> int:
        """Become the owner: return the new epoch; commits of the previous owner are refused from now on.

        A finished session needs no owner; it keeps its epoch. Its request's `digest` saves a look-up.
        NotFoundError if there is none; ResourceExhaustedError, with a retry delay, if what its turn may still
        emit exceeds a bound.
        """
        bounds = await self._bounds.of(session_id)

        async def attempt(digest: str) -> int:
            keys = [*self._keys.of(session_id), *self._keys.request(session_id, digest)]
            args = [*self._common(session_id, digest), "", *bounds]
            return await self._admitted(self._take_over, session_id, keys, args)

        return _checked(await self._with_digest(session_id, attempt, digest), session_id)

    async def cancel(self, session_id: str) -> int:
        """Cancel the session's turn unless it has ended; return its epoch: no more commits are accepted."""
        args = self._common(session_id, "")
        epoch = await answer(self._cancel(keys=self._keys.of(session_id), args=args))
        return _checked(int(epoch), session_id)

    async def read(self, session_id: str, before: StoredSession | None = None) -> StoredSession:
        """Return a session; the request of an earlier state, `before`, is not read again.

        NotFoundError if there is none, FailedPreconditionError if an orchestrator with a newer format of
        sessions stored it, InternalError if Redis lost tokens.
        """
        for _ in range(READ_TRIES):
            now_ms, pairs, data, ttl_ms = await answer(self._read(keys=self._keys.of(session_id)[:2]))
            fields = dict(zip(pairs[::2], pairs[1::2], strict=True))
            if b"digest" not in fields:  # no session, or one stored by an earlier version
                raise NotFoundError(f"no session {name_of(session_id)}", "session")
            if (stored_in := int(fields.get(b"format", 1))) > FORMAT:
                raise FailedPreconditionError(
                    f"format of session {name_of(session_id)}: got {stored_in}, allowed: up to {FORMAT}; "
                    "upgrade this orchestrator"
                )
            digest = fields[b"digest"].decode()
            if before is not None and before.digest == digest:
                request: Any = pack_request(before.request, before.prompt)
            else:
                request = await answer(self._redis.get(self._keys.request(session_id, digest)[0]))
            if request is None:
                continue  # a new turn began or the session is gone; else Redis lost the request
            stored = session_id, fields, request, data, ttl_ms, now_ms
            is_small = len(data) + len(request) <= INLINE_BYTES
            found = parse(*stored) if is_small else await in_thread(parse, *stored)
            if found.is_whole:
                return found
            break
        raise InternalError(f"session {name_of(session_id)}: Redis lost tokens of it")

    async def summary(self, session_id: str) -> SessionInfo:
        """Return the summary of a session, whose tokens are not read; NotFoundError if there is none."""
        found = await self._summaries([session_id])
        if not found:
            raise NotFoundError(f"no session {name_of(session_id)}", "session")
        return found[0]

    async def recent(self, tenant: str, limit: int) -> list[SessionInfo]:
        """Return a tenant's sessions, most recently active first; tokens are not read."""
        found: list[SessionInfo] = []
        names = await answer(self._redis.zrevrange(self._keys.index(tenant), 0, limit - 1))
        for start in range(0, len(names), LIST_PAGE):
            found += await self._summaries([_text(name) for name in names[start : start + LIST_PAGE]])
        return found

    async def exist(self, session_ids: Sequence[str]) -> list[bool]:
        found: list[bool] = []
        for start in range(0, len(session_ids), LIST_PAGE):
            heads = [self._keys.of(name)[0] for name in session_ids[start : start + LIST_PAGE]]
            _, lines = await answer(self._list(keys=heads, args=["digest"]))
            found += map(bool, lines)
        return found

    async def running(self) -> list[str]:
        """Return the sessions that have an owner, dead owners included."""
        return [_text(name) for name in await answer(self._redis.smembers(self._keys.running))]

    async def reap(self, session_id: str) -> int | None:
        """End an expired lease; return its owner's epoch, -1 without a session, None if the owner lives."""
        epoch = int(await answer(self._reap.call(self._keys.of(session_id), self._common(session_id, ""))))
        return epoch or None

    async def delete(self, session_id: str) -> bool:
        """Delete a session, its request and its trace; return whether it existed."""

        async def attempt(digest: str) -> int:
            keys = [*self._keys.of(session_id), *self._keys.request(session_id, digest)]
            existed = int(await answer(self._delete(keys=keys, args=self._common(session_id, digest))))
            # With a digest the session existed just before: the answer of a first attempt may have been lost.
            return existed or (1 if digest else 0)

        return await self._with_digest(session_id, attempt) > 0

    def _common(self, session_id: str, digest: str) -> list[Any]:
        return [session_id, digest, self._ttl_ms, self._lease_ms]

    def _keys_of(self, session: Session) -> list[str]:
        return [*self._keys.of(session.session_id), *self._keys.request(session.session_id, session.digest)]

    async def _with_digest(
        self, session_id: str, attempt: Callable[[str], Awaitable[int]], known: str = ""
    ) -> int:
        """Run a script that needs the digest of a session's request; retry if the digest has changed."""
        result = await attempt(known) if known else scripts.MOVED
        while result == scripts.MOVED:
            digest = await answer(self._redis.hget(self._keys.of(session_id)[0], "digest"))
            result = await attempt(_text(digest or b""))
        return result

    async def _admitted(self, script: Any, session_id: str, keys: list[str], args: list[Any]) -> int:
        """Run a script that may be refused for exceeding a bound; return its result if it is admitted."""
        return await self._bounds.admitted(
            lambda: script(keys=keys, args=args), session_id, self._ttl_ms, "max_tokens"
        )

    async def _summaries(self, names: Sequence[str]) -> list[SessionInfo]:
        heads = [self._keys.of(name)[0] for name in names]
        now_ms, lines = await answer(self._list(keys=heads, args=SUMMARY_FIELDS))
        return [split_summary(name, line, now_ms) for name, line in zip(names, lines, strict=True) if line]


def _checked(result: int, session_id: str, start: int = 0) -> int:
    """Return the result of a script, or raise the error that its code means."""
    name = name_of(session_id)
    if result == scripts.GONE:
        raise NotFoundError(f"session {name} does not exist, was deleted or has expired", "session")
    if result == scripts.OTHER_OWNER:
        raise FailedPreconditionError(f"session {name} now has another owner")
    if result == scripts.WRONG_OFFSET:
        raise FailedPreconditionError(f"session {name} does not end at token {start}")
    if result == scripts.CANCELLED:
        raise CancelledError(f"session {name} was cancelled")
    if result == scripts.LOST:
        raise InternalError(f"session {name}: Redis lost tokens of it")
    return int(result)


def _text(name: Any) -> str:
    return str(name, "utf-8")
