"""Drafter of one session on a server with an HTTP API of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from gammaray.blocks import Shape
from gammaray.errors import GammarayError
from gammaray.types import DrafterKind, Proposal, VerificationMethod
from gammaray.v1 import types_pb2 as pb
from orchestrator.cycle.session import Session
from orchestrator.drafting.http.client import DraftServerError, Failure
from orchestrator.drafting.http.dialects import Ask, Reply
from orchestrator.drafting.http.server import DraftServer, TargetTokenizer
from orchestrator.workers.backoff import Backoff
from orchestrator.workers.drafter import LONG_CONTEXT, Readiness

__all__ = ["ContextText", "ServerDrafter"]

MAX_TOKEN_CHARACTERS = 64
"""Text beyond this many characters per token is not encoded."""


@dataclass
class _Sent:
    """A call as the cycle log records it, with the attributes of a ProposeBlock that it reads."""

    gamma: int
    size: int
    trace: pb.TraceContext = field(default_factory=pb.TraceContext)

    def ByteSize(self) -> int:
        return self.size


@dataclass
class _Answered:
    """Its answer, with the attributes of a ProposeResult."""

    proposal: Proposal
    size: int
    num_forwards: int = 1
    timing: None = None

    def ByteSize(self) -> int:
        return self.size


class ContextText:
    """The text of a session's tokens, special tokens included, which servers without token ids take.

    Args:
        tokenizer: The target's.
    """

    def __init__(self, tokenizer: TargetTokenizer) -> None:
        self._tokenizer = tokenizer
        self._start = tokenizer.encode("")  # the server adds its own
        self._bytes = bytearray()
        self._num_seen = 0

    def of(self, session: Session) -> str | None:
        """Return the text of the committed tokens; None while their last character is incomplete."""
        tokens = session.token_ids
        if self._num_seen == 0 and self._start and tokens[: len(self._start)] == self._start:
            self._num_seen = len(self._start)
        for token_id in tokens[self._num_seen :]:
            self._bytes += self._tokenizer.token_bytes(token_id)
        self._num_seen = len(tokens)
        try:
            return self._bytes.decode() or None
        except UnicodeDecodeError as error:
            is_incomplete = error.end == len(self._bytes) and error.reason == "unexpected end of data"
            return None if is_incomplete else self._bytes.decode("utf-8", "replace")


class ServerDrafter:
    """Proposes through a server; implements the cycle's Drafter, with the methods of `RemoteDrafter`.

    Every call has the whole context, of which the server keeps its own cache. A long prompt is sent in the
    background while the target processes it; until then there is no proposal.

    Args:
        server: The server.
        salt: Servers that share caches by salt share this session's with those of the same salt only.
        timeout_s: Upper bound of a proposal's timeout, which adapts to recent answer times.
        prefill_timeout_s: Timeout of the prefill of a long prompt.
    """

    def __init__(self, server: DraftServer, salt: str, *, timeout_s: float, prefill_timeout_s: float) -> None:
        self._server, self._salt = server, salt
        self._timeout_s, self._prefill_timeout_s = timeout_s, prefill_timeout_s
        self._text = ContextText(server.tokenizer)
        self._pause = Backoff()
        self._prefill: asyncio.Task[None] | None = None
        self._number = self._num_known = 0
        self._slot, self._is_attached = -1, False

    @property
    def address(self) -> str:
        """Host, port and path of the server."""
        return self._server.url.address

    def prepare(self, session: Session) -> Readiness:
        """Start a prefill if the server lacks many tokens, and return whether it can propose."""
        server = self._server
        if self._prefill is not None and not self._prefill.done():
            return Readiness.READING
        if not server.is_usable or not self._pause.ready:
            return Readiness.ABSENT
        self._attach()
        if session.num_committed - self._num_known < LONG_CONTEXT:
            return Readiness.READY
        self._prefill = asyncio.create_task(self._read(session))
        return Readiness.READING

    async def propose(self, session: Session, shape: Shape) -> Proposal:
        """Return a chain within `shape`; near the end of the server's context it is shorter.

        Raises:
            DraftServerError: The server cannot be asked now, failed or was late.
        """
        readiness = self.prepare(session)
        if readiness is Readiness.READING:
            return Proposal()
        if readiness is Readiness.ABSENT:
            raise DraftServerError(Failure.CONNECTION, "the server that drafts cannot be asked now")
        server = self._server
        server.backoff.trying(self._timeout_s)
        start = time.monotonic()
        try:
            chain = await self._ask(session, shape.depth, server.patience.wait_s(self._timeout_s))
        except DraftServerError as error:
            self._note_failure(session, error, time.monotonic() - start)
            raise
        if chain is None:
            return Proposal()
        server.patience.observe(time.monotonic() - start)
        server.backoff.succeeded()
        self._pause.succeeded()
        return Proposal(chain, drafter=DrafterKind.SERVER, worker=self.address)

    def prefer(self, session: Session, address: str) -> None:
        """Do nothing: there is one server."""

    def leave(self, session: Session) -> None:
        """Detach from the server, which keeps its cache as long as it likes."""
        self.release(session)

    def release(self, session: Session) -> None:
        """Detach from the server; a prefill ends."""
        if self._prefill is not None:
            self._prefill.cancel()
            self._prefill = None
        if self._is_attached:
            self._server.num_sessions -= 1
            if self._number == self._server.number:
                self._server.give_slot(self._slot)
            self._is_attached, self._slot = False, -1

    def _attach(self) -> None:
        server = self._server
        if not self._is_attached:
            self._is_attached = True
            server.num_sessions += 1
            self._number = -1
        if self._number != server.number:  # another process, whose cache is empty
            self._number, self._num_known, self._slot = server.number, 0, server.take_slot()

    async def _read(self, session: Session) -> None:
        """Make the server process the committed tokens; its time says nothing about that of a proposal."""
        start = time.monotonic()
        try:
            await self._ask(session, 1, self._prefill_timeout_s)
        except DraftServerError as error:
            self._note_failure(session, error, time.monotonic() - start)
        except GammarayError:  # the caller's deadline has passed
            return

    async def _ask(self, session: Session, depth: int, timeout_s: float) -> tuple[int, ...] | None:
        """Return the tokens that the server proposes; None if it is not asked for this context.

        Raises:
            DraftServerError: It gave none.
        """
        server, num_committed = self._server, session.num_committed
        identity = server.identity
        if identity is None:
            raise DraftServerError(Failure.CONNECTION, "it has not answered yet")
        if identity.max_context is not None:
            depth = min(depth, identity.max_context - num_committed)
        prompt = session.token_ids if server.has_ids else self._text.of(session)
        if depth <= 0 or prompt is None:
            return None
        params = session.params
        # With the target's noise the server draws what it would emit itself; other methods than coupled have
        # noise that no draft shares, and OpenAI's API has no index of the sample.
        is_coupled = session.method is VerificationMethod.COUPLED and params.temperature > 0
        shares_noise = identity.dialect.has_noise and is_coupled and params.sample_index == 0
        ask = Ask(
            prompt,
            depth,
            identity.model,
            ignores_eos=not session.eos_token_ids,
            salt=self._salt,
            slot=self._slot,
            sampling=params if shares_noise and server.has_ids else None,
        )
        left_s = session.left_s(timeout_s)
        call = None if session.calls is None else session.calls.call("draft", self.address)

        def on_body(body: bytes) -> Mapping[str, str]:
            sent = _Sent(depth, len(body))
            if call is not None:
                call.sent(sent)
            return {"traceparent": sent.trace.traceparent} if sent.trace.traceparent else {}

        received = server.traffic.received
        try:
            reply = await server.ask(ask, left_s, on_body)
            chain = self._chain(session, reply, depth)
        except GammarayError as error:
            if call is not None:
                call.failed(error)
            raise
        if call is not None:
            call.answered(_Answered(Proposal(chain), server.traffic.received - received))
        self._num_known = num_committed
        return chain

    def _chain(self, session: Session, reply: Reply, depth: int) -> tuple[int, ...]:
        """Return the tokens of a reply up to the first one outside the vocabulary, with the end if it ends.

        Raises:
            DraftServerError: There is no token.
        """
        found, is_end = reply.token_ids, reply.is_end
        if found is None or not self._server.has_ids:
            # Servers write U+FFFD for bytes that are no text, such as the begin of a character.
            text, cut, _ = reply.text[: MAX_TOKEN_CHARACTERS * depth].partition("\ufffd")
            found, is_end = self._continuation(session, text), is_end and not cut
        chain = found[:depth]
        for index, token_id in enumerate(chain):
            if not 0 <= token_id < self._server.tokenizer.vocab_size:
                chain = chain[:index]
                break
        ends = session.eos_token_ids
        is_whole = len(chain) == len(found) < depth
        if is_end and ends and is_whole and not ends & set(chain):
            chain = (*chain, min(ends))  # most servers leave the end out
        if not chain:
            raise DraftServerError(Failure.TOKENS, "an answer without tokens of the target's vocabulary")
        return chain

    def _continuation(self, session: Session, text: str) -> tuple[int, ...]:
        """Return the target's tokens of a text that follows the committed tokens (SLEM, arXiv 2502.05202).

        Special tokens are never made of text. The last word may lack its end: that guess costs one row.

        Raises:
            DraftServerError: The text is not Unicode.
        """
        try:
            added = text.encode()
        except UnicodeEncodeError:
            raise DraftServerError(Failure.CONTENT, "an answer that is not Unicode") from None
        return tuple(self._server.tokenizer.vocabulary.continuation(session.token_ids, added))

    def _note_failure(self, session: Session, error: DraftServerError, lost_s: float) -> None:
        if session.is_overdue:
            return  # the caller's deadline left it too little time
        self._server.note_failure(error)
        if error.code in (400, 413, 422) or error.failure is Failure.TOKENS:
            self._pause.failed(lost_s)  # it refuses this session's request, or has nothing to propose for it
            return
        self._server.backoff.failed(lost_s)
        if error.failure is Failure.TIMEOUT:
            self._server.patience.observe(lost_s)
