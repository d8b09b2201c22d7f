"""Server-sent events of one or several generations, and resuming of streams after `Last-Event-ID`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from gammaray.aio import end_tasks
from gammaray.errors import InternalError, InvalidArgumentError
from gammaray.types import Chunk, GenerationRequest
from orchestrator.access.caller import ANONYMOUS, Caller
from orchestrator.api.backend import Backend
from orchestrator.api.http.errors import as_gammaray_error, error_body
from orchestrator.api.http.json_text import encode_pieces, sliced
from orchestrator.api.http.models import StreamOptions
from orchestrator.api.http.requests import ChoicePlan, naming_grammar
from orchestrator.api.http.responses import Response
from orchestrator.api.stalls import while_read
from orchestrator.sessions.lifecycle import REPLAY_TOKENS
from orchestrator.text.cpu_threads import INLINE_NUMBERS, in_thread

T = TypeVar("T")

HEADER = "last-event-id"
_END = "end"
_FORM = "an id of an event of this server: <session>:<turn>:<tokens>"

Pieces = AsyncIterator[tuple[int, Chunk]]
"""Pieces of several choices in order of arrival, each with the index of its choice."""

_Queue: TypeAlias = "asyncio.Queue[tuple[int, Chunk | Exception | None]]"
"""Pieces; each generation puts its error or None at its end."""

_MAX_HELD = 32
"""Pieces buffered for a slow client before its generations block."""

_CLOSE_TIMEOUT_S = 5.0

COMMENT, COMMENT_PERIOD_S = b": waiting\n\n", 10.0
"""An event without fields, which clients ignore; sent after so many seconds in which nothing else was."""

EVENT_BYTES = 256
"""With `include_obfuscation`, event sizes are multiples of this."""


@dataclass(frozen=True)
class EventId:
    """Position of an event in a stream: tokens emitted up to and with it, and whether the turn ended."""

    session_id: str
    turn: int
    offset: int
    has_ended: bool = False

    @classmethod
    def of(cls, chunk: Chunk) -> EventId:
        offset = chunk.offset + len(chunk.tokens)
        return cls(chunk.session_id, chunk.turn, offset, chunk.finish_reason is not None)

    @classmethod
    def parse(cls, text: str) -> EventId:
        """Return the id in a header; InvalidArgumentError if it is none of this server."""
        session_id, *rest = text.strip().split(":")
        has_ended = rest[2:] == [_END]
        numbers = rest[:2] if has_ended else rest
        if not session_id or len(numbers) != 2 or not all(n.isascii() and n.isdigit() for n in numbers):
            raise InvalidArgumentError("Last-Event-ID", text, _FORM)
        turn, offset = (int(number[:12]) for number in numbers)
        return cls(session_id, turn, offset, has_ended)

    def __str__(self) -> str:
        text = f"{self.session_id}:{self.turn}:{self.offset}"
        return f"{text}:{_END}" if self.has_ended else text


def resumed(plans: Sequence[ChoicePlan], seen: EventId, *, is_stream: bool) -> list[ChoicePlan]:
    """Return the plans of a request that continues after an event: a stream of one choice of its session."""
    if not is_stream:
        raise InvalidArgumentError("Last-Event-ID", "a request without stream", "stream: true")
    if len(plans) != 1:
        raise InvalidArgumentError(
            "Last-Event-ID", f"{len(plans)} choices", "one prompt with n = 1: only such streams are resumed"
        )
    (plan,) = plans
    own = plan.request.session_id
    if own and own != seen.session_id:
        raise InvalidArgumentError("session_id", own, f"{seen.session_id}, which the Last-Event-ID names")
    request = replace(plan.request, session_id=seen.session_id, turn=seen.turn, resume_from=seen.offset)
    request.validate()
    return [replace(plan, request=request)]


async def recall(response: Response, backend: Backend, seen: EventId, caller: Caller) -> None:
    """Add the tokens that the client already has, up to an event, to a response of one choice."""
    _, tokens = await backend.sessions.get(seen.session_id, caller)
    response.recall(())
    for start in range(0, min(seen.offset, len(tokens)), REPLAY_TOKENS):
        response.recall(tokens[start : min(start + REPLAY_TOKENS, seen.offset)])
        await asyncio.sleep(0)


@asynccontextmanager
async def generate_all(
    backend: Backend, requests: Sequence[GenerationRequest], caller: Caller = ANONYMOUS
) -> AsyncIterator[Pieces]:
    """Run the generations concurrently; leaving the context cancels those that still run.

    A single one runs in the caller's task, several run in a task each. The iterator raises the first failure
    of any generation.
    """
    generations = [while_read(backend.generate(request, caller)) for request in requests]
    if len(generations) == 1:
        (chunks,) = generations
        async with aclosing(chunks), aclosing((0, chunk) async for chunk in chunks) as pieces:
            yield pieces
        return
    queue: _Queue = asyncio.Queue()
    slots = asyncio.Semaphore(_MAX_HELD)
    tasks = [
        asyncio.create_task(_pump(generation, index, queue, slots))
        for index, generation in enumerate(generations)
    ]
    try:
        yield _drain(queue, slots, len(tasks))
    finally:
        await end_tasks(*tasks, timeout_s=_CLOSE_TIMEOUT_S)


async def _pump(
    generation: AsyncGenerator[Chunk, None], index: int, queue: _Queue, slots: asyncio.Semaphore
) -> None:
    end: Exception | None = InternalError("the generation was cut off")
    try:
        async with aclosing(generation) as chunks:
            async for chunk in chunks:
                await slots.acquire()
                queue.put_nowait((index, chunk))
        end = None
    except Exception as error:
        end = error
    finally:  # also when cancelled, so that the reader does not wait forever
        queue.put_nowait((index, end))


async def _drain(queue: _Queue, slots: asyncio.Semaphore, num_open: int) -> Pieces:
    while num_open:
        index, item = await queue.get()
        if isinstance(item, Exception):
            raise item
        if item is None:
            num_open -= 1
        else:
            slots.release()
            yield index, item


async def while_connected(request: Request, answer: Awaitable[T]) -> T:
    """Return an answer to a request whose body was read; ClientDisconnect if the client leaves before."""
    answering = asyncio.ensure_future(answer)
    watching = asyncio.create_task(_left(request), name="answer's client")
    try:
        await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
    finally:
        await end_tasks(answering, watching)
    raise ClientDisconnect


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def json_in_pieces(pieces: Sequence[bytes]) -> StreamingResponse:
    """Return a JSON response that is sent in pieces: a large one is never joined, nor sent in one step."""
    size = {"Content-Length": str(sum(map(len, pieces)))}
    return StreamingResponse(yielding(sliced(pieces)), headers=size, media_type=JSONResponse.media_type)


class EventStream(StreamingResponse):
    """Server-sent events of one response; comments while there is none, as proxies cut silent connections.

    Its creator has waited for the first event, as an earlier failure is an ordinary error response.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._first, self._events = first, events
        self._sent_at, self._is_between_events = 0.0, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they or the client end; then end the generations.

        Starlette would cancel with an anyio scope, which cancels every `await` of the generations' cleanup
        again; a task of its own is cancelled once.
        """
        sending = asyncio.create_task(self.stream_response(send), name="event stream")
        watching = asyncio.create_task(self.listen_for_disconnect(receive), name="event stream's client")
        filling = asyncio.create_task(self._send_comments(send), name="event stream's comments")
        try:
            await asyncio.wait((sending, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(sending, watching, filling)
        if not sending.cancelled():
            sending.result()

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            await self._send_piece(send, self._first)
            async for event in self._events:
                await self._send_piece(send, event)
            self._is_between_events = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_piece(self, send: Send, piece: bytes) -> None:
        self._is_between_events = False
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        self._sent_at = asyncio.get_running_loop().time()
        self._is_between_events = piece.endswith(b"\n\n")  # a large event is sent in several pieces

    async def _send_comments(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, self._sent_at + COMMENT_PERIOD_S - loop.time()))
            if loop.time() >= self._sent_at + COMMENT_PERIOD_S:
                self._sent_at = loop.time()
                if self._is_between_events:
                    await send({"type": "http.response.body", "body": COMMENT, "more_body": True})


async def response_events(
    backend: Backend,
    requests: Sequence[GenerationRequest],
    response: Response,
    options: StreamOptions,
    caller: Caller = ANONYMOUS,
    seen: EventId | None = None,
) -> AsyncGenerator[bytes, None]:
    """Run the generations and yield their events; `seen` is the last one that the client already has.

    The first is there once all generations were admitted, or one has a token; a comment if there is no event.
    A failure before it is raised; a later one is the last event.
    """
    is_padded, is_resumable = options.include_obfuscation, len(requests) == 1 and requests[0].store

    def rendered(index: int, chunk: Chunk, *, is_large: bool) -> list[bytes]:
        events = response.pieces(index, chunk, options)
        if not events or (seen and seen.has_ended):
            return []
        # Only after its last event a client has the whole chunk, so that it can resume after it.
        last = f"id: {EventId.of(chunk)}\n" if is_resumable else ""
        pieces: list[bytes] = []
        for event, fields in zip(events, [*("" for _ in events[1:]), last], strict=True):
            data = encode_pieces(event) if is_large else (to_json(event),)
            pieces += sse_pieces(data, fields, is_padded=is_padded)
        return list(sliced(pieces))

    held: list[bytes] | None = []
    num_opened = 0
    async with generate_all(backend, requests, caller) as pieces:
        try:
            with naming_grammar(response.states[0].plan):
                async for index, chunk in pieces:
                    # The last chunk's events have all token ids.
                    num_ids = 0 if chunk.finish_reason is None else chunk.offset + len(chunk.tokens)
                    if chunk.prompt_logprobs is None and num_ids <= INLINE_NUMBERS:
                        data = rendered(index, chunk, is_large=False)
                    else:  # up to a million numbers: do not block other streams
                        data = await in_thread(rendered, index, chunk, is_large=True)
                    if held is not None:
                        num_opened += chunk.is_opening
                        held += data
                        if chunk.is_opening and num_opened < len(requests):
                            continue
                        data, held = held or [COMMENT] * chunk.is_opening, None
                    async for piece in yielding(data):
                        yield piece
        except Exception as error:
            if held is not None:
                raise
            yield _sse(error_body(as_gammaray_error(error)))
            return
        if options.include_usage:
            yield _sse(response.usage_event())
        yield b"data: [DONE]\n\n"


async def yielding(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield pieces of a large text; other tasks run between two of them, also if no send blocks."""
    for index, piece in enumerate(pieces):
        if index:
            await asyncio.sleep(0)
        yield piece


def _sse(event: Mapping[str, Any]) -> bytes:
    return b"".join(sse_pieces((to_json(event),)))


def sse_pieces(data: Iterable[bytes], fields: str = "", *, is_padded: bool = False) -> list[bytes]:
    """Return the event of a JSON object, given in pieces, that has at least one field.

    `fields` are lines of the event, such as its id. If it `is_padded`, a last field `obfuscation` of random
    characters pads it to a multiple of EVENT_BYTES.
    """
    head = f"{fields}data: ".encode()
    if not is_padded:
        return [head, *data, b"\n\n"]
    *before, last = data
    field, end = b',"obfuscation":"', b'"}\n\n'
    size = len(head) + sum(map(len, before)) + len(last) - 1 + len(field) + len(end)
    padding = secrets.token_hex(EVENT_BYTES)[: -size % EVENT_BYTES].encode()
    return [head, *before, last[:-1], field, padding, end]
