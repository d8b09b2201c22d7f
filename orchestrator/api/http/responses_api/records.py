"""Stored responses, whose names reach the store only through `Caller.qualify`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Literal

from gammaray.errors import InvalidArgumentError, NotFoundError
from gammaray.wire.sessions import SessionState
from orchestrator.access.caller import Caller
from orchestrator.api.backend import Backend
from orchestrator.api.http.json_text import encode
from orchestrator.api.http.responses_api import types
from orchestrator.storage.response_store import Ending, ResponseStore, StoredResponse
from orchestrator.text.cpu_threads import INLINE_BYTES, in_thread

MAX_STORED_BYTES = 2**23
"""Upper bound of the JSON of a response's input, that of earlier responses included."""

MAX_LISTED = 100

Order = Literal["asc", "desc"]


class ResponseRecords:
    """Calls of one client about stored responses; each raises UnavailableError if Redis cannot be reached."""

    def __init__(self, backend: Backend, caller: Caller) -> None:
        self._backend, self._caller = backend, caller
        self._store: ResponseStore = backend.responses

    async def create(self, response_id: str, items: bytes, response: bytes, room: int) -> None:
        """Store a response that begins, and reserve `room` bytes for its output.

        InvalidArgumentError if its input, or what its output may take, is too large to be stored;
        ResourceExhaustedError, with a retry delay, if a bound of stored bytes is reached.
        """
        if len(items) > MAX_STORED_BYTES:
            got = f"{len(items)} bytes with the input of earlier responses"
            raise InvalidArgumentError("input", got, f"at most {MAX_STORED_BYTES} bytes, or store: false")
        await self._store.create(self._caller.qualify(response_id), StoredResponse(items, response), room)

    async def finish(self, response_id: str, response: bytes, short: bytes) -> Ending:
        """Store the end of a response, see `ResponseStore.finish`."""
        return await self._store.finish(self._caller.qualify(response_id), response, short)

    def finish_later(self, response_id: str, response: bytes, short: bytes) -> None:
        """Store the end of a response whose client has gone."""
        self._store.finish_later(self._caller.qualify(response_id), response, short)

    async def read(
        self, response_id: str, kind: str = "response"
    ) -> tuple[types.ResponseObject, StoredResponse]:
        """Return a response, failed if its orchestrator died, and its JSON; `kind` is for NotFoundError."""
        missing = NotFoundError(f"no response {response_id[:80]!r}: it does not exist or has expired", kind)
        try:
            stored = await self._store.read(self._caller.qualify(response_id))
        except (NotFoundError, InvalidArgumentError):
            raise missing from None
        response: types.ResponseObject = await _loaded(stored.response)
        if response["status"] == "in_progress" and await self._is_orphaned(response_id):
            response["status"] = "failed"
            response["error"] = {"code": "server_error", "message": "the generation was interrupted"}
            stored = replace(stored, response=encode(response))
        return response, stored

    async def items_after(self, response_id: str) -> list[types.InputListItem]:
        """Return the items of a conversation up to the end of a response, which must not be in progress."""
        response, stored = await self.read(response_id, "previous_response")
        if response["status"] == "in_progress":
            raise InvalidArgumentError("previous_response_id", "a response in progress", "one that has ended")
        return [*await _loaded(stored.input), *response["output"]]

    async def input_items(
        self, response_id: str, limit: int, order: Order, after: str | None
    ) -> types.ItemList:
        """Return a page of the items before a response's output, from those `after` one of them."""
        _, stored = await self.read(response_id)
        items: list[types.InputListItem] = await _loaded(stored.input)
        if order == "desc":
            items.reverse()
        if after is not None:
            found = next((number for number, item in enumerate(items) if item["id"] == after), None)
            if found is None:
                raise InvalidArgumentError("after", after, "the id of an item of the input")
            items = items[found + 1 :]
        page = items[:limit]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > limit,
        }

    async def delete(self, response_id: str) -> None:
        """Delete a response and its session; one in progress then fails."""
        await self.read(response_id)
        await self._backend.sessions.delete(response_id, self._caller)
        await self._store.delete(self._caller.qualify(response_id))

    async def _is_orphaned(self, response_id: str) -> bool:
        """Return whether the session of a response in progress has no owner."""
        try:
            info, _ = await self._backend.sessions.get(response_id, self._caller)
        except NotFoundError:
            return True
        return info.state is SessionState.DETACHED


async def _loaded(text: bytes) -> Any:
    """Return the value of a stored JSON text; a large one is decoded in a thread."""
    return json.loads(text) if len(text) <= INLINE_BYTES else await in_thread(json.loads, text)
