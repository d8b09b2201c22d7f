"""Opens sessions for requests: checks against the served model, then begins, resumes or continues."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import struct
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace

from gammaray.checks import check_token_ids
from gammaray.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ModelChangedError,
    NotFoundError,
)
from gammaray.security.tenants import name_of
from gammaray.types import Chunk, FinishReason, GenerationRequest, check_prompt_logprobs
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.convert import request_from_proto, request_to_proto
from orchestrator.access.caller import ANONYMOUS, Caller
from orchestrator.cycle.handover import SessionHandover
from orchestrator.cycle.session import Session
from orchestrator.sessions.progress import ChunkBuilder
from orchestrator.storage.session_store import RedisStore, StoredSession
from orchestrator.storage.token_records import StoredToken
from orchestrator.text.cpu_threads import in_thread
from orchestrator.text.detokenizer import Detokenizer
from orchestrator.text.tokenizer import LONG_TEXT, Tokenizer

_DRAWN_SEED_BITS = 53
"""A drawn seed is exact as a JSON number, which many clients read as a double."""

MAX_PROMPT_BYTES = 2**20
"""Largest prompt, in bytes of UTF-8: more than the longest contexts of models hold as text."""

MAX_SHOWN = 256
"""Characters of a model's name that an error repeats."""

REPLAY_TOKENS = 64
"""Tokens per chunk when committed tokens are replayed to a client."""

PROMPT_HASH_BYTES = 32
ANY_NAME = "any"
"""Session name in stored requests, so that choices with different names share one stored request."""

OPEN_TRIES = 3
"""Attempts to open a session before its state is an error: other processes may be changing it."""

CheckModel = Callable[[str, str, float], Awaitable[None]]


class ContextLengthError(InvalidArgumentError):
    """A prompt leaves no room for a token in a context of `max_context`; `size` is its length in words."""

    def __init__(self, field: str, num_tokens: int, max_context: int, *, is_least: bool = False) -> None:
        self._num_tokens, self._is_least, self.max_context = num_tokens, is_least, max_context
        self.size = f"{'at least ' if is_least else ''}{num_tokens} tokens"
        allowed = f"at most {max_context - 1} tokens, one less than the model's context of {max_context}"
        super().__init__(field, self.size, allowed)

    def renamed(self, field: str) -> ContextLengthError:
        return ContextLengthError(field, self._num_tokens, self.max_context, is_least=self._is_least)


def check_prompt_length(num_tokens: int, max_context: int, *, is_least: bool = False) -> None:
    """Refuse a prompt of so many tokens, or with `is_least` of at least so many, that fills the context."""
    if num_tokens >= max_context:
        raise ContextLengthError("prompt", num_tokens, max_context, is_least=is_least)


async def check_request(
    request: GenerationRequest,
    *,
    model_name: str,
    vocab_size: int,
    max_context: int,
    adapters: Collection[str] = (),
) -> None:
    """Check a request against the served model and adapters, without tokenising; a large one in a thread."""
    if request.model not in ("", model_name, *adapters):
        served = ", ".join(map(repr, [model_name, *adapters]))
        raise NotFoundError(f"no model {request.model[:MAX_SHOWN]!r}; served: {served}", "model")
    if isinstance(request.prompt, str):
        size = len(request.prompt.encode(errors="surrogatepass"))
        if size > MAX_PROMPT_BYTES:
            raise InvalidArgumentError("prompt", f"{size} bytes", f"at most {MAX_PROMPT_BYTES} bytes")
    else:
        check_prompt_length(len(request.prompt), max_context)
    if _num_ids(request) < LONG_TEXT:
        _check_fields(request, vocab_size)
    else:
        await in_thread(_check_fields, request, vocab_size)


def _num_ids(request: GenerationRequest) -> int:
    masks = len(request.sampling.allowed_token_ids) + len(request.sampling.banned_token_ids)
    texts = (request.prompt, request.prediction)
    return masks + sum(len(text) for text in texts if not isinstance(text, str))


def _check_fields(request: GenerationRequest, vocab_size: int) -> None:
    if not isinstance(request.prompt, str):
        check_token_ids("prompt", request.prompt, vocab_size)
    if not isinstance(request.prediction, str):
        check_token_ids("prediction", request.prediction, vocab_size)
    request.validate()
    request.sampling.validate(vocab_size)
    check_token_ids("stop_token_ids", request.stop_token_ids, vocab_size)


async def open_session(
    request: GenerationRequest,
    tokenizer: Tokenizer,
    max_context: int,
    caller: Caller = ANONYMOUS,
    before: tuple[int, ...] = (),
    seed: int | None = None,
) -> Session:
    """Return the session of a checked request: prompt tokenised, seed drawn, length clipped to the context.

    Its name is qualified with the caller's tenant. The prompt is appended to `before`, the tokens of earlier
    turns; `seed` is their seed, used if the request has none. InvalidArgumentError if there is no token, or
    there are too many, also for log-probabilities.
    """
    if isinstance(request.prompt, str):  # tokenising takes some hundred bytes of memory per byte
        check_prompt_length(len(before) + tokenizer.min_tokens(request.prompt), max_context, is_least=True)
    own = await tokenizer.ids_of(request.prompt, is_start=not before)
    if not own:
        raise InvalidArgumentError("prompt", "a text without tokens", "at least one token")
    prompt = before + own
    check_prompt_length(len(prompt), max_context)
    if request.num_prompt_logprobs is not None:
        check_prompt_logprobs(request.num_prompt_logprobs, len(prompt))
    if request.sampling.seed is None:
        seed = secrets.randbits(_DRAWN_SEED_BITS) if seed is None else seed
        request = replace(request, sampling=replace(request.sampling, seed=seed))
    name = caller.qualify(request.session_id or uuid.uuid4().hex)
    return make_session(name, request, prompt, min(request.max_tokens, max_context - len(prompt)), tokenizer)


def make_session(
    name: str, request: GenerationRequest, prompt: tuple[int, ...], max_tokens: int, tokenizer: Tokenizer
) -> Session:
    """Return the session of a request whose seed is set, for a prompt of at least one token."""
    return Session(
        session_id=name,
        prompt=prompt,
        params=request.sampling,
        method=request.verification,
        max_tokens=max_tokens,
        text=Detokenizer(tokenizer, prompt, request.stop),
        eos_token_ids=frozenset() if request.ignore_eos else tokenizer.eos_token_ids,
        stop_token_ids=frozenset(request.stop_token_ids),
        num_top_logprobs=request.num_top_logprobs,
        turn=request.turn,
        cache_salt=request.cache_salt,
        num_prompt_logprobs=request.num_prompt_logprobs,
        is_stored=request.store,
    )


@dataclass
class OpenSession:
    """A session that this process owns, or whose turn has ended."""

    session: Session  # at its prompt until `replay` has run
    request: GenerationRequest  # the request that began the turn
    tokens: tuple[StoredToken, ...] = ()  # that previous owners committed in this turn
    offset: int = 0  # number of these that the client has
    ended: FinishReason | None = None  # None if the turn has not ended
    handover: SessionHandover = field(default_factory=SessionHandover)  # of the previous owner

    async def replay(self, progress: ChunkBuilder) -> AsyncGenerator[Chunk, None]:
        """Advance the session to the last committed token; yield the tokens that the client lacks in pieces.

        The detokeniser processes all tokens again, so the text continues where the client's ends: bytes of an
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
            if self.ended and start + len(piece) == len(tokens):
                yield self._last(progress, piece)
            else:
                yield progress.piece(piece, session.text.take(final=False))
            await asyncio.sleep(0)
        if session.num_emitted != len(tokens):
            raise InternalError(
                f"session {name_of(session.session_id)}: {len(tokens)} tokens are stored, some after the end"
            )
        session.finish_reason = self.ended
        if self.ended and self.offset == len(tokens):
            yield self._last(progress, ())

    def _last(self, progress: ChunkBuilder, piece: tuple[StoredToken, ...]) -> Chunk:
        # Text held back in a cancelled turn is never sent; a client that has all tokens has all text.
        final = bool(piece) and self.ended is not FinishReason.CANCELLED
        return progress.piece(piece, self.session.text.take(final=final), self.ended)


class SessionManager:
    """Begins, resumes and continues sessions.

    `check_model` takes a session's name, its model identity and the longest wait for a worker (s); it raises
    ModelChangedError if only target workers of other models are connected.
    """

    def __init__(
        self, store: RedisStore, tokenizer: Tokenizer, check_model: CheckModel, model_name: str = ""
    ) -> None:
        self._store, self._tokenizer, self._check_model = store, tokenizer, check_model
        self._model_name = model_name

    async def open(
        self, request: GenerationRequest, max_context: int, caller: Caller = ANONYMOUS
    ) -> OpenSession:
        """Return the session of a checked request, owned by this process unless its turn has ended.

        Raises:
            InvalidArgumentError: The prompt has no token, or leaves no room in the context.
            NotFoundError: There is no such session (any more).
            FailedPreconditionError: It is not in the state that the request needs.
            ModelChangedError: Its tokens come from a target model that is not served any more.
            UnavailableError: Redis cannot be reached.
        """
        opened = await self._open(request, max_context, caller)
        opened.session.adapter = self._adapter(opened.request)
        return opened

    def _adapter(self, request: GenerationRequest) -> str:
        return "" if request.model == self._model_name else request.model

    async def _open(self, request: GenerationRequest, max_context: int, caller: Caller) -> OpenSession:
        if not request.store:
            return OpenSession(await open_session(request, self._tokenizer, max_context, caller), request)
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

    async def _go_on(
        self, name: str, request: GenerationRequest, max_context: int, caller: Caller
    ) -> OpenSession:
        try:
            stored = await self._store.read(name)
        except NotFoundError:
            # The first attempt of this client may have ended before anything was stored.
            if request.turn == 0 and request.resume_from == 0 and request.prompt:
                return await self._begin(request, max_context, caller)
            raise
        if stored.turn != request.turn or stored.finish_reason is None:  # else nothing is left to compute
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

    async def _begin(self, request: GenerationRequest, max_context: int, caller: Caller) -> OpenSession:
        session = await open_session(request, self._tokenizer, max_context, caller)
        await self._store.create(session, _serialised(request))
        return OpenSession(session, request)

    async def _continue(
        self, request: GenerationRequest, stored: StoredSession, max_context: int, caller: Caller
    ) -> OpenSession:
        began = _began(stored)
        if not request.model:
            request = replace(request, model=began.model)
        if self._adapter(request) != self._adapter(began):
            raise FailedPreconditionError(
                f"model of session {request.session_id}: got {request.model!r}, turn {stored.turn} was "
                f"generated by {began.model or self._model_name!r}"
            )
        before = stored.prompt + stored.token_ids
        session = await open_session(
            request, self._tokenizer, max_context, caller, before=before, seed=stored.seed
        )
        session.model_identity = stored.model_identity
        await self._store.next_turn(session, _serialised(request), stored)
        left = SessionHandover.from_bytes(stored.handover)  # counters of the previous turn do not carry over
        return OpenSession(session, request, handover=SessionHandover(target=left.target, draft=left.draft))

    async def _resume(self, request: GenerationRequest, stored: StoredSession) -> OpenSession:
        if request.resume_from is None:
            raise FailedPreconditionError(
                f"session {request.session_id} has already begun turn {request.turn}"
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
                "the log-probabilities of the prompt are not stored; send a new request for them"
            )
        if stored.finish_reason is None:
            digest, epoch = stored.digest, await self._store.take_over(stored.session_id, stored.digest)
            stored = await self._store.read(stored.session_id, stored)
            # Another digest: the session was deleted meanwhile, and another one has the same name.
            is_other = stored.turn != request.turn or stored.digest != digest
            if is_other or (stored.epoch != epoch and stored.finish_reason is None):
                raise FailedPreconditionError(f"session {request.session_id} now has another owner")
        if request.resume_from > len(stored.tokens):
            raise FailedPreconditionError(
                f"resume_from of session {request.session_id}: got {request.resume_from}, allowed: up to "
                f"{len(stored.tokens)}, the tokens of turn {stored.turn}"
            )
        handover = SessionHandover.from_bytes(stored.handover)
        handover.counters.catch_up(stored.origins)
        session = make_session(stored.session_id, began, stored.prompt, stored.max_tokens, self._tokenizer)
        session.epoch, session.model_identity = stored.epoch, stored.model_identity
        session.digest = stored.digest
        return OpenSession(session, began, stored.tokens, request.resume_from, stored.finish_reason, handover)


def _serialised(request: GenerationRequest) -> bytes:
    """Serialise a request for the store, equal for all its choices; a hash stands for the prompt."""
    sampling = replace(request.sampling, seed=0, sample_index=0)
    stored = replace(request, prompt=(), sampling=sampling, session_id=ANY_NAME, resume_from=0)
    return _prompt_hash(request) + request_to_proto(stored).SerializeToString()


def _began(stored: StoredSession) -> GenerationRequest:
    request = request_from_proto(pb.GenerateRequest.FromString(stored.request[PROMPT_HASH_BYTES:]))
    sampling = replace(request.sampling, seed=stored.seed, sample_index=stored.sample_index)
    return replace(request, prompt=stored.prompt, sampling=sampling, session_id="", resume_from=None)


def _prompt_hash(request: GenerationRequest) -> bytes:
    prompt = request.prompt
    if isinstance(prompt, str):
        return hashlib.sha256(b"text" + prompt.encode()).digest()
    return hashlib.sha256(b"ids" + struct.pack(f"<{len(prompt)}I", *prompt)).digest()


def _same(request: GenerationRequest, began: GenerationRequest) -> bool:
    """Whether a request matches the one that began a turn; without a seed or a model it matches any."""
    sampling = request.sampling
    if sampling.seed is None:
        sampling = replace(sampling, seed=began.sampling.seed)
    model = request.model or began.model
    own = replace(
        request, prompt=(), sampling=sampling, resume_from=None, session_id="", max_tokens=1, model=model
    )
    return own == replace(began, prompt=(), max_tokens=1)
