"""Items of a conversation: their stored form, and the messages that chat templates take."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from gammaray.errors import InvalidArgumentError
from orchestrator.api.http.fields import parse_arguments
from orchestrator.api.http.json_text import EncodedList
from orchestrator.api.http.responses_api import types
from orchestrator.api.http.responses_api.models import (
    CallInput,
    InputItem,
    MessageInput,
    ReasoningInput,
    ResultInput,
)

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}


def new_id(prefix: str) -> str:
    """Return a random id of a response or an item."""
    return f"{prefix}_{uuid.uuid4().hex}"


def text_part(text: str, logprobs: EncodedList | None = None) -> types.OutputTextPart:
    """Return a part of a message that the model wrote."""
    shown: Any = [] if logprobs is None else logprobs
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": shown}


def stored_items(items: Sequence[InputItem]) -> list[types.InputListItem]:
    """Return the items of an input as they are stored; those without an id get one."""
    return [_stored(item) for item in items if not isinstance(item, ReasoningInput)]


def _stored(item: MessageInput | CallInput | ResultInput) -> Any:
    fields: dict[str, Any] = item.model_dump(exclude={"id"})
    if isinstance(item, MessageInput):
        is_answer = item.role == "assistant"
        part = text_part(item.content) if is_answer else {"type": "input_text", "text": item.content}
        fields["content"] = [part]
    return {"id": item.id or new_id(_PREFIXES[item.type]), **fields, "status": "completed"}


def conversation(
    items: Sequence[types.InputListItem], num_earlier: int, instructions: str | None
) -> list[Mapping[str, Any]]:
    """Return the messages of a conversation, as chat templates take them.

    Calls are part of the assistant's message before them, as the model wrote them. `instructions` become a
    message of the system before the items, of which the first `num_earlier` are of earlier responses.
    """
    if not items:
        raise InvalidArgumentError("input", "no items", "a text or at least one item")
    messages: list[dict[str, Any]] = []
    functions: list[tuple[str, dict[str, Any]]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for number, item in enumerate(items):
        if item["type"] == "message":
            text = "".join(part["text"] for part in item["content"])
            messages.append({"role": item["role"], "content": text})
        elif item["type"] == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function: dict[str, Any] = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
            own = f"input.{number - num_earlier}.arguments"
            functions.append(("previous_response_id" if number < num_earlier else own, function))
        else:
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
    parse_arguments(functions)
    return list(messages)
