"""Generates one response: reads its chunks, stores it, and yields its events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from gammaray.errors import GammarayError, ResourceExhaustedError, renaming
from gammaray.types import Chunk
from orchestrator.access.caller import Caller
from orchestrator.api.backend import Backend
from orchestrator.api.http.errors import as_gammaray_error
from orchestrator.api.http.json_text import INLINE_ENTRIES, encode, encode_pieces, sliced
from orchestrator.api.http.requests import TOKEN_BYTES, check_size, naming_grammar
from orchestrator.api.http.responses import ChatLogprobs, ChoiceState, reader_of
from orchestrator.api.http.responses_api import types
from orchestrator.api.http.responses_api.events import ResponseBuilder
from orchestrator.api.http.responses_api.records import ResponseRecords
from orchestrator.api.http.responses_api.requests import ResponsePlan
from orchestrator.api.http.stream import sse_pieces, yielding
from orchestrator.api.http.tools.calls import call_id
from orchestrator.api.http.tools.parser import ArgumentText, CallBegun, CallEnded, CallEvent, PlainText
from orchestrator.api.stalls import while_read
from orchestrator.text.cpu_threads import in_thread

_log = logging.getLogger(__name__)

T = TypeVar("T")


END_BYTES = 4096
"""Bytes reserved for the end of a stored response, besides its tokens: usage, times, an error."""

_TOO_LARGE = ResourceExhaustedError(
    f"the output takes more than the {TOKEN_BYTES} bytes a token that were reserved for it, and does not fit "
    "the bounds of stored bytes: it is not stored"
)


def rendered(event: types.Event, *, is_padded: bool = False) -> list[bytes]:
    """Return an event as it is sent, in pieces."""
    return sse_pieces(encode_pieces(event), f"event: {event['type']}\n", is_padded=is_padded)


class ResponseRun:
    """Generates one response.

    A stored response is stored when its first tokens are there, and again at its end, before the client is
    told of it. If the client goes earlier, it is stored as cancelled. Bytes for its longest output are
    reserved at the beginning. An output of longer tokens that then does not fit the bounds of stored bytes is
    not stored, and the response has failed.
    """

    def __init__(self, backend: Backend, plan: ResponsePlan, caller: Caller) -> None:
        self._backend, self._plan, self._caller = backend, plan, caller
        self._records = ResponseRecords(backend, caller)
        self._builder = ResponseBuilder(plan.response)
        self._request = plan.choice.request
        self._state = ChoiceState(plan.choice, None, calls=reader_of(plan.choice, backend.tokenizer))
        self._logprobs = ChatLogprobs() if self._request.num_top_logprobs is not None else None
        self._has_begun = self._has_ended = False

    async def whole(self) -> list[bytes]:
        """Return the response as JSON, in pieces."""
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass
        return await self._off_loop(lambda: list(encode_pieces(self._plan.response)))

    async def stream(self, *, is_padded: bool = False) -> AsyncGenerator[bytes, None]:
        """Yield the events as they are sent; a failure after the first one is an event."""
        try:
            async with aclosing(self._events()) as batches:
                async for events in batches:
                    data = (piece for event in events for piece in rendered(event, is_padded=is_padded))
                    async for piece in yielding(sliced(data)):
                        yield piece
        except Exception:
            if not self._has_begun:
                raise
        end = self._builder.end()
        async for piece in yielding(sliced(await self._off_loop(lambda: rendered(end)))):
            yield piece

    async def _events(self) -> AsyncGenerator[Sequence[types.Event], None]:
        """Yield the events of each chunk, without the last event."""
        try:
            generation = self._backend.generate(self._request, self._caller)
            async with aclosing(while_read(generation)) as chunks:
                with renaming(**self._plan.names), naming_grammar(self._state.plan):
                    async for chunk in chunks:
                        opening = [] if self._has_begun else await self._begin(chunk)
                        if events := [*opening, *self._read(chunk)]:
                            yield events
            await self._store_end()
        except Exception as error:
            if self._has_begun:
                await self._fail(as_gammaray_error(error))
            raise
        finally:
            if self._has_begun and not self._has_ended:  # the client has gone
                self._cancel()

    async def _begin(self, chunk: Chunk) -> list[types.Event]:
        if self._request.store:
            is_short = len(self._plan.items) <= INLINE_ENTRIES
            items = encode(self._plan.items) if is_short else await in_thread(encode, self._plan.items)
            num_tokens = min(self._request.max_tokens, self._backend.max_context - chunk.prompt_tokens)
            room = END_BYTES + max(0, num_tokens) * TOKEN_BYTES
            await self._records.create(self._plan.response["id"], items, encode(self._plan.response), room)
        self._has_begun = True
        return self._builder.begin()

    def _read(self, chunk: Chunk) -> list[types.Event]:
        self._state.add(chunk)
        events: list[types.Event] = []
        if self._state.calls is not None:
            for event in self._state.new_events:
                events += self._of(event)
        else:
            logprobs: list[Any] = []
            if self._logprobs is not None and chunk.tokens:
                logprobs = self._logprobs.render(chunk.tokens)["content"]
            if chunk.text or logprobs:
                events += self._builder.add_text(chunk.text, logprobs)
                check_size(self._request, 1, self._builder.num_logprob_bytes)
        if chunk.finish_reason is not None:
            events += self._builder.finish(chunk.finish_reason, chunk.usage)
            self._plan.response["gammaray"] = self._state.gammaray()
        return events

    def _of(self, event: CallEvent) -> list[types.Event]:
        match event:
            case PlainText(text):
                return self._builder.add_text(text)
            case CallBegun(index, _, name):
                return self._builder.begin_call(call_id(self._plan.response["id"], index), name)
            case ArgumentText(_, text):
                return self._builder.add_arguments(text)
            case CallEnded(_, is_whole):
                return self._builder.end_item(is_whole=is_whole)

    async def _off_loop(self, work: Callable[[], T]) -> T:
        """Run what takes time by the number of tokens; in a thread if there are many."""
        return work() if len(self._state.token_ids) <= INLINE_ENTRIES else await in_thread(work)

    def _stored(self) -> tuple[bytes, bytes]:
        short = self._builder.unstored(_TOO_LARGE)
        return encode(self._builder.stored()), encode(short)

    async def _store_end(self) -> None:
        if self._request.store:
            end = await self._off_loop(self._stored)
            if await self._records.finish(self._plan.response["id"], *end) == "cut":
                self._builder.fail(_TOO_LARGE)
        self._has_ended = True

    async def _fail(self, error: GammarayError) -> None:
        self._builder.fail(error)
        try:
            await self._store_end()
        except GammarayError as second:
            _log.warning("the failure of response %s was not stored: %s", self._plan.response["id"], second)
        self._has_ended = True

    def _cancel(self) -> None:
        self._has_ended = True
        if self._request.store:
            self._builder.cancel()
            self._records.finish_later(self._plan.response["id"], *self._stored())
