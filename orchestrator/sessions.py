"""Sessions from request to owner: begun, resumed, continued; and what can be asked of them.

A client that comes back is the signal to take its session over: nobody waits for a lease to run out. Two
owners never commit both, as the store knows one epoch. Leases only tell which sessions nobody cares for.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field, replace

from gammaray.errors import FailedPreconditionError, InternalError, ModelChangedError, NotFoundError
from gammaray.types import Chunk, FinishReason, GenerationRequest
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.convert import request_from_proto, request_to_proto
from orchestrator.access.caller import ANONYMOUS, Caller
from orchestrator.completion import Progress
from orchestrator.cycle.handover import Heritage
from orchestrator.cycle.session import Session
from orchestrator.requests import make_session, open_session
from orchestrator.storage.session_store import RedisStore, StoredSession
from orchestrator.storage.token_records import StoredToken
from orchestrator.text.tokenizer import Tokenizer

__all__ = ["Opened", "Opener"]

REPLAY_TOKENS = 64
"""Tokens of one piece when a client is told what was committed while it was away."""

PROMPT_HASH_BYTES = 32
ANY_NAME = "any"
"""Session name in stored requests, which choices with names of their own share."""

OPEN_TRIES = 3
"""Looks at the store before the state of a session is taken for what it is: others may change it."""


CheckModel = Callable[[str, str, float], Awaitable[None]]


@dataclass
class Opened:
    """A session that this process owns now, or whose turn has ended.

    Args:
        session: The session; at its prompt until `replay` has run.
        request: The request that began the turn.
        tokens: What former owners committed.
        offset: How many of these the client has.
        ended: Why the turn has ended, if it has.
        heritage: What the former owner left.
    """

    session: Session
    request: GenerationRequest
    tokens: tuple[StoredToken, ...] = ()
    offset: int = 0
    ended: FinishReason | None = None
    heritage: Heritage = field(default_factory=Heritage)

    async def replay(self, progress: Progress) -> AsyncGenerator[Chunk, None]:
        """Bring the session to the last committed token; yield what the client does not have yet.

        Other tasks get their turn after each piece of `REPLAY_TOKENS`.

        The detokeniser reads all tokens again, so that the text goes on where the client's ends: bytes of an
        incomplete character, and text that may become a stop string, are held back as before.
        """
        session, tokens = self.session, self.tokens
        for start in range(0, self.offset, REPLAY_TOKENS):
            known = tokens[start : min(start + REPLAY_TOKENS, self.offset)]
            session.commit([token_id for token_id, _, _ in known])
            session.text.take(final=False)
            await asyncio.sleep(0)
        for start in range(self.offset, len(tokens), REPLAY_TOKENS):
            piece = tokens[start : start + REPLAY_TOKENS]
            session.commit([token_id for token_id, _, _ in piece])
            is_last = start + len(piece) == len(tokens)
            if not (is_last and self.ended):
                yield progress.piece(piece, session.text.take(final=False))
            else:
                yield self._last(progress, piece)
            await asyncio.sleep(0)
        if session.num_emitted != len(tokens):
            raise InternalError(
                f"session {session.session_id}: {len(tokens)} tokens are stored, some behind the end"
            )
        session.finish_reason = self.ended
        if self.ended and self.offset == len(tokens):
            yield self._last(progress, ())

    def _last(self, progress: Progress, piece: tuple[StoredToken, ...]) -> Chunk:
        # What a cancelled turn held back is never shown, and a client that has all tokens has all text.
        final = bool(piece) and self.ended is not FinishReason.CANCELLED
        return progress.piece(piece, self.session.text.take(final=final), self.ended)


class Opener:
    """Begins, resumes and continues sessions.

    Args:
        store: Where they are kept.
        tokenizer: The target's.
        check_model: Raises ModelChangedError when only target workers of other models than a session's are
            there; takes its name, the identity of its model, and how long to wait for another (s, at most).
    """

    def __init__(self, store: RedisStore, tokenizer: Tokenizer, check_model: CheckModel) -> None:
        self._store, self._tokenizer, self._check_model = store, tokenizer, check_model

    async def open(self, request: GenerationRequest, max_context: int, caller: Caller = ANONYMOUS) -> Opened:
        """Return the session that a checked request is about, owned by this process unless it has ended.

        Raises:
            InvalidArgumentError: The prompt has no token, or leaves no room in the context.
            NotFoundError: There is no such session (any more).
            FailedPreconditionError: It is not in the state that the request is about.
            ModelChangedError: Its tokens are of a target model that is not served any more.
            UnavailableError: Redis cannot be reached.
        """
        if request.turn == 0 and request.resume_from is None:
            return await self._begin(request, max_context, caller)
        name = caller.qualify(request.session_id)
        for attempt in range(OPEN_TRIES):
            try:
                return await self._go_on(name, request, max_context, caller)
            except ModelChangedError:
                raise
            except FailedPreconditionError:
                if attempt == OPEN_TRIES - 1:
                    raise
        raise AssertionError("unreachable: the last attempt raises")

    async def _go_on(self, name: str, request: GenerationRequest, max_context: int, caller: Caller) -> Opened:
        try:
            stored = await self._store.read(name)
        except NotFoundError:
            # The first attempt of this client may have ended before anything was stored.
            if request.turn == 0 and request.resume_from == 0 and request.prompt:
                return await self._begin(request, max_context, caller)
            raise
        if stored.turn != request.turn or stored.finish_reason is None:  # else nothing is left to be computed
            left_s = caller.deadline - time.monotonic()
            await self._check_model(request.session_id, stored.model_identity, left_s)
        if stored.turn == request.turn:
            return await self._resume(request, stored)
        has_not_begun = request.resume_from in (None, 0) and request.prompt
        if stored.turn == request.turn - 1 and stored.finish_reason is not None and has_not_begun:
            return await self._continue(request, stored, max_context, caller)
        state = "has finished" if stored.finish_reason else "has not finished"
        raise FailedPreconditionError(
            f"turn of session {request.session_id}: got {request.turn}, turn {stored.turn} {state}"
        )

    async def _begin(self, request: GenerationRequest, max_context: int, caller: Caller) -> Opened:
        session = await open_session(request, self._tokenizer, max_context, caller)
        await self._store.create(session, _serialised(request))
        return Opened(session, request)

    async def _continue(
        self, request: GenerationRequest, stored: StoredSession, max_context: int, caller: Caller
    ) -> Opened:
        before = stored.prompt + stored.token_ids
        session = await open_session(
            request, self._tokenizer, max_context, caller, before=before, seed=stored.seed
        )
        session.model_identity = stored.model_identity
        await self._store.next_turn(session, _serialised(request), stored)
        left = Heritage.from_bytes(stored.state)  # the counts of the turn before are its own
        heritage = Heritage(acceptance=left.acceptance, target=left.target, draft=left.draft)
        return Opened(session, request, heritage=heritage)

    async def _resume(self, request: GenerationRequest, stored: StoredSession) -> Opened:
        if request.resume_from is None:
            raise FailedPreconditionError(
                f"session {request.session_id} has begun turn {request.turn} already"
            )
        began = _began(stored)
        if request.prompt and not (
            stored.request.startswith(_prompt_hash(request)) and _same(request, began)
        ):
            raise FailedPreconditionError(
                f"turn {request.turn} of session {request.session_id} was begun by another request"
            )
        if began.num_prompt_logprobs is not None and request.resume_from == 0 and stored.tokens:
            raise FailedPreconditionError(
                f"resume_from of session {request.session_id}: got 0, allowed: 1 to {len(stored.tokens)}, as "
                "the log-probabilities of the prompt are not stored; send a new request to get them"
            )
        if stored.finish_reason is None:
            digest, epoch = stored.digest, await self._store.take_over(stored.session_id)
            stored = await self._store.read(stored.session_id)
            # Another digest: the session was deleted meanwhile, and one of its name has begun.
            is_other = stored.turn != request.turn or stored.digest != digest
            if is_other or (stored.epoch != epoch and stored.finish_reason is None):
                raise FailedPreconditionError(f"session {request.session_id} has another owner by now")
        if request.resume_from > len(stored.tokens):
            raise FailedPreconditionError(
                f"resume_from of session {request.session_id}: got {request.resume_from}, allowed: up to "
                f"{len(stored.tokens)}, the tokens of turn {stored.turn}"
            )
        heritage = Heritage.from_bytes(stored.state)
        heritage.counters.catch_up(stored.origins)
        session = make_session(stored.session_id, began, stored.prompt, stored.max_tokens, self._tokenizer)
        session.epoch, session.model_identity = stored.epoch, stored.model_identity
        session.digest = stored.digest
        return Opened(
            session,
            began,
            stored.tokens,
            request.resume_from,
            stored.finish_reason,
            heritage,
        )


def _serialised(request: GenerationRequest) -> bytes:
    """Return the request as it is stored: a hash of the prompt, and the rest but for what is a choice's own.

    Choices of one request are stored with the same bytes. The tokens of the prompt are stored beside them.
    """
    sampling = replace(request.sampling, seed=0, sample_index=0)
    stored = replace(request, prompt=(), sampling=sampling, session_id=ANY_NAME, resume_from=0)
    return _prompt_hash(request) + request_to_proto(stored).SerializeToString()


def _began(stored: StoredSession) -> GenerationRequest:
    request = request_from_proto(pb.GenerateRequest.FromString(stored.request[PROMPT_HASH_BYTES:]))
    sampling = replace(request.sampling, seed=stored.seed, sample_index=stored.sample_index)
    return replace(request, prompt=stored.prompt, sampling=sampling, session_id="", resume_from=None)


def _prompt_hash(request: GenerationRequest) -> bytes:
    """Return what tells the prompt of a request, as it was given, from others."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return hashlib.sha256(b"text" + prompt.encode()).digest()
    return hashlib.sha256(b"ids" + struct.pack(f"<{len(prompt)}I", *prompt)).digest()


def _same(request: GenerationRequest, began: GenerationRequest) -> bool:
    """Whether a request may be the one that began a turn; the seed may have been drawn for it."""
    sampling = request.sampling
    if sampling.seed is None:
        sampling = replace(sampling, seed=began.sampling.seed)
    own = replace(request, prompt=(), sampling=sampling, resume_from=None, session_id="", max_tokens=1)
    return own == replace(began, prompt=(), max_tokens=1)
