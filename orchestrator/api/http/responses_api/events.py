"""Makes the output of a response, and the events that stream it.

A stream has the response as it begins, then for each item the item as it begins, its text in pieces and the
whole item, then the whole response. A stored response has no log-probabilities.

Log-probabilities are encoded when they arrive, and these bytes are part of each event that has them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from gammaray.errors import GammarayError, InvalidArgumentError, ResourceExhaustedError
from gammaray.types import FinishReason, Usage
from orchestrator.api.http.json_text import EncodedList
from orchestrator.api.http.responses_api import types
from orchestrator.api.http.responses_api.items import new_id, text_part

_STATUSES: Mapping[FinishReason, types.Status] = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.CANCELLED: "cancelled",
}


_CODES: Mapping[type[GammarayError], Literal["rate_limit_exceeded", "invalid_prompt"]] = {
    ResourceExhaustedError: "rate_limit_exceeded",
    InvalidArgumentError: "invalid_prompt",
}


class ResponseBuilder:
    """Makes one response piece by piece, in place; each method returns the events that tell of it."""

    def __init__(self, response: types.ResponseObject) -> None:
        self.response = response
        self._num_events = 0
        self._item: types.OutputItem | None = None  # the open one
        self._texts: list[str] = []  # of the open item
        self._logprobs = EncodedList()

    def begin(self) -> list[types.Event]:
        return [
            self._event({"type": "response.created", "response": self._snapshot()}),
            self._event({"type": "response.in_progress", "response": self._snapshot()}),
        ]

    def add_text(self, text: str, logprobs: Sequence[Any] = ()) -> list[types.Event]:
        """Add text to the last message; begin one if there is none."""
        events = [] if self._item is not None else self.begin_message()
        encoded = EncodedList(logprobs)
        self._texts.append(text)
        self._logprobs.extend(encoded)
        delta = {"type": "response.output_text.delta", **self._place, "delta": text, "logprobs": encoded}
        return [*events, self._event(delta)]

    def begin_message(self) -> list[types.Event]:
        """Begin a message; `add_text` does so where none is open."""
        self._item = {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        part = {"type": "response.content_part.added", **self._place, "part": text_part("")}
        return [self._begun(self._item), self._event(part)]

    def begin_call(self, call_id: str, name: str) -> list[types.Event]:
        """End the message before, and begin a call."""
        events = self.end_item()
        self._item = {
            "id": new_id("fc"),
            "type": "function_call",
            "call_id": call_id,
            "name": name,
            "arguments": "",
            "status": "in_progress",
        }
        return [*events, self._begun(self._item)]

    def add_arguments(self, text: str) -> list[types.Event]:
        """Add text to the arguments of the call that is open."""
        self._texts.append(text)
        delta = {"type": "response.function_call_arguments.delta", **self._place, "delta": text}
        return [self._event(delta)]

    def end_item(self, *, is_whole: bool = True) -> list[types.Event]:
        if self._item is None:
            return []
        place, item, self._item = self._place, self._item, None
        text, logprobs = "".join(self._texts), self._logprobs
        self._texts, self._logprobs = [], EncodedList()
        status: types.ItemStatus = "completed" if is_whole else "incomplete"
        if item["type"] == "function_call":
            named = {**place, "name": item["name"], "arguments": text}
            return [
                self._event({"type": "response.function_call_arguments.done", **named}),
                self._ended({**item, "arguments": text, "status": status}),
            ]
        part = text_part(text, logprobs)
        whole = {"type": "response.output_text.done", **place, "text": text, "logprobs": logprobs}
        return [
            self._event(whole),
            self._event({"type": "response.content_part.done", **place, "part": part}),
            self._ended({**item, "status": status, "content": [part]}),
        ]

    def finish(self, reason: FinishReason, usage: Usage | None) -> list[types.Event]:
        """End the output; a response without any has an empty message. `end` then tells of it."""
        is_whole = reason is FinishReason.STOP
        is_empty = not self.response["output"] and self._item is None
        events = self.begin_message() if is_empty else []
        events += self.end_item(is_whole=is_whole)
        self.response["status"] = _STATUSES[reason]
        self.response["usage"] = None if usage is None else _usage(usage)
        if reason is FinishReason.STOP:
            self.response["completed_at"] = int(time.time())
        if reason is FinishReason.LENGTH:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        return events

    def fail(self, error: GammarayError) -> None:
        """End the response because of an error; it keeps the output so far."""
        self._break_off("failed")
        self.response["error"] = _error(error)

    def cancel(self) -> None:
        """End the response because its client has gone; it keeps the output so far."""
        self._break_off("cancelled")

    @property
    def num_logprob_bytes(self) -> int:
        """Bytes of the log-probabilities of the open message."""
        return self._logprobs.num_bytes

    def stored(self) -> types.ResponseObject:
        """Return the response as it is stored: without log-probabilities, most of its bytes, and receipt."""
        kept: types.ResponseObject = {
            **self.response,
            "output": [*map(_without_logprobs, self.response["output"])],
        }
        if "gammaray" in kept:
            kept["gammaray"] = kept["gammaray"].copy()
            kept["gammaray"].pop("receipt", None)
        return kept

    def unstored(self, error: GammarayError) -> types.ResponseObject:
        """Return what is stored of a response whose output is not: why it is not."""
        short: types.ResponseObject = {
            **self.response,
            "status": "failed",
            "completed_at": None,
            "error": _error(error),
            "incomplete_details": None,
            "output": [],
        }
        short.pop("gammaray", None)
        return short

    def end(self) -> types.Event:
        """Return the last event, which has the whole response."""
        status = self.response["status"]
        kind = status if status in ("completed", "failed") else "incomplete"
        return self._event({"type": f"response.{kind}", "response": self.response})

    @property
    def _index(self) -> int:
        return len(self.response["output"])

    @property
    def _place(self) -> dict[str, Any]:
        """Fields of events about the text or the arguments of the open item."""
        assert self._item is not None
        place = {"item_id": self._item["id"], "output_index": self._index}
        return {**place, "content_index": 0} if self._item["type"] == "message" else place

    def _break_off(self, status: types.Status) -> None:
        number = self._num_events
        self.end_item(is_whole=False)
        self._num_events = number  # the client is not told of the end of the item
        self.response["status"], self.response["completed_at"] = status, None
        self.response["incomplete_details"] = None

    def _begun(self, item: types.OutputItem) -> types.Event:
        return self._event({"type": "response.output_item.added", "output_index": self._index, "item": item})

    def _ended(self, item: types.OutputItem) -> types.Event:
        event = self._event({"type": "response.output_item.done", "output_index": self._index, "item": item})
        self.response["output"].append(item)
        return event

    def _snapshot(self) -> types.ResponseObject:
        return {**self.response, "output": list(self.response["output"])}

    def _event(self, event: Mapping[str, Any]) -> types.Event:
        number, self._num_events = self._num_events, self._num_events + 1
        return cast("types.Event", {"type": event["type"], "sequence_number": number, **event})


def _without_logprobs(item: types.OutputItem) -> types.OutputItem:
    if item["type"] != "message":
        return item
    return {**item, "content": [text_part(part["text"]) for part in item["content"]]}


def _usage(usage: Usage) -> types.ResponseUsage:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _error(error: GammarayError) -> types.ResponseError:
    return {
        "code": next((code for kind, code in _CODES.items() if isinstance(error, kind)), "server_error"),
        "message": str(error).encode("utf-8", "backslashreplace").decode(),
    }
