"""Generates one response: reads its chunks, stores it, and yields its events."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from gammaray.errors import GammarayError
from gammaray.types import Chunk
from orchestrator.access.caller import Caller
from orchestrator.api.backend import Backend
from orchestrator.api.http.errors import as_gammaray_error
from orchestrator.api.http.requests import ChoicePlan
from orchestrator.api.http.responses import ChatLogprobs, ChoiceState
from orchestrator.api.http.responses_api import types
from orchestrator.api.http.responses_api.events import ResponseBuilder
from orchestrator.api.http.responses_api.records import ResponseRecords, encoded
from orchestrator.api.http.responses_api.requests import ResponsePlan
from orchestrator.api.http.stream import compact, sse
from orchestrator.api.http.tools.calls import call_id
from orchestrator.api.http.tools.parser import ArgumentText, CallBegun, CallEnded, CallEvent, PlainText
from orchestrator.api.http.tools.reading import CallReader

__all__ = ["ResponseRun", "last_event", "rendered"]

_log = logging.getLogger(__name__)


def rendered(event: types.Event, *, is_padded: bool = False) -> bytes:
    """Return an event as it is sent."""
    return sse(compact(event), f"event: {event['type']}\n", is_padded=is_padded)


def last_event(end: tuple[str, int], response: bytes) -> bytes:
    """Return the last event as it is sent, see `ResponseBuilder.end`; `response` is JSON."""
    kind, number = end
    data = b'{"type":"%b","sequence_number":%d,"response":%b}' % (kind.encode(), number, response)
    return sse(data, f"event: {kind}\n")


class ResponseRun:
    """Generates one response.

    A stored response is stored when its first tokens are there, and again at its end, before the client is
    told of it. If the client goes earlier, it is stored as cancelled.

    Args:
        backend: Generates the text.
        plan: The response.
        caller: The client.
    """

    def __init__(self, backend: Backend, plan: ResponsePlan, caller: Caller) -> None:
        self._backend, self._plan, self._caller = backend, plan, caller
        self._records = ResponseRecords(backend, caller)
        self._builder = ResponseBuilder(plan.response)
        self._state = ChoiceState(ChoicePlan(0, 0, plan.request), None)
        prompt = plan.request.prompt if isinstance(plan.request.prompt, str) else ""
        self._reader = None
        if plan.calls is not None:
            self._reader = CallReader(plan.calls, backend.is_special, prompt=prompt)
        self._logprobs = ChatLogprobs() if plan.request.num_top_logprobs is not None else None
        self._has_begun = self._has_ended = False

    async def whole(self) -> bytes:
        """Return the response as JSON.

        Raises:
            GammarayError: The request is refused, or the generation fails.
        """
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass
        return await self._text()

    async def stream(self, *, is_padded: bool = False) -> AsyncGenerator[bytes, None]:
        """Yield the events as they are sent; a failure after the first one is an event.

        Raises:
            GammarayError: The first failure, if it comes before the first event.
        """
        try:
            async with aclosing(self._events()) as batches:
                async for events in batches:
                    yield b"".join(rendered(event, is_padded=is_padded) for event in events)
        except Exception:
            if not self._has_begun:
                raise
        yield last_event(self._builder.end, await self._text())

    async def _events(self) -> AsyncGenerator[Sequence[types.Event], None]:
        """Yield the events of each chunk, without the last event."""
        try:
            async with aclosing(self._backend.generate(self._plan.request, self._caller)) as chunks:
                with self._plan.naming():
                    async for chunk in chunks:
                        opening = [] if self._has_begun else await self._begin()
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

    async def _begin(self) -> list[types.Event]:
        if self._plan.request.store:
            items = await encoded(self._plan.items, len(self._plan.items))
            await self._records.create(self._plan.response["id"], items, await self._text())
        self._has_begun = True
        return self._builder.begin()

    def _read(self, chunk: Chunk) -> list[types.Event]:
        self._state.add(chunk)
        events: list[types.Event] = []
        if self._reader is not None:
            for event in self._reader.read(chunk):
                events += self._of(event)
        else:
            logprobs: list[Any] = []
            if self._logprobs is not None and chunk.tokens:
                logprobs = self._logprobs.render(chunk.tokens)["content"]
            if chunk.text or logprobs:
                events += self._builder.add_text(chunk.text, logprobs)
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

    async def _text(self) -> bytes:
        tokens = self._state.tokens
        return await encoded(self._plan.response, sum(1 + len(token.top_logprobs) for token in tokens))

    async def _store_end(self) -> None:
        if self._plan.request.store:
            pieces = json.dumps(self._builder.pieces).encode()
            await self._records.finish(self._plan.response["id"], await self._text(), pieces)
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
        if self._plan.request.store:
            self._builder.cancel()
            pieces = json.dumps(self._builder.pieces).encode()
            self._records.finish_later(self._plan.response["id"], compact(self._plan.response), pieces)
