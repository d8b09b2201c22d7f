"""Conversion of a request for a response to a generation request."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gammaray.errors import InvalidArgumentError, renaming
from gammaray.types import GenerationRequest
from orchestrator.api.backend import Backend
from orchestrator.api.http.fields import ToolInput, checked_tools
from orchestrator.api.http.models import MAX_MESSAGES
from orchestrator.api.http.requests import ChoicePlan, check_size, common_request, expected_bytes, with_ids
from orchestrator.api.http.responses_api import types
from orchestrator.api.http.responses_api.items import conversation, new_id, stored_items
from orchestrator.api.http.responses_api.models import LOGPROBS, ResponsesRequest, TextFormatInput
from orchestrator.api.http.structured import format_rule
from orchestrator.api.http.tools.calls import ToolChoice, plan_calls, render_messages

_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "response_format": "text.format",
}


@dataclass(frozen=True)
class ResponsePlan:
    response: types.ResponseObject  # the response before its output
    items: list[types.InputListItem]  # the items before the output, those of earlier responses included
    choice: ChoicePlan
    names: Mapping[str, str]  # names that errors about fields have for the client


def plan_response(
    body: ResponsesRequest, model: Backend, earlier: Sequence[types.InputListItem] = ()
) -> ResponsePlan:
    """Return the plan of a request, which may continue the items of an earlier response."""
    _check_options(body)
    items = [*earlier, *stored_items(body.input)]
    if len(items) > MAX_MESSAGES:
        got = f"{len(items)} items with those of earlier responses"
        raise InvalidArgumentError("input", got, f"at most {MAX_MESSAGES}")
    messages = conversation(items, len(earlier), body.instructions)
    tools = checked_tools(body.tools, body.tool_choice)
    calls = plan_calls(tools, body.tool_choice, body.parallel_tool_calls, model.tokenizer)
    rule = _text_rule(body.text.format)
    names = {**_NAMES, "grammar": "tools" if calls is not None and calls.is_forced else "text.format"}
    response_id = new_id("resp")
    with renaming(**names):
        prompt = render_messages(messages, model.tokenizer, calls)
        if calls is None:
            grammar = f"start: {rule}" if rule else ""
        else:
            grammar = calls.grammar(prompt.text, rule)
        request = replace(
            common_request(body, prompt.text, grammar),
            max_tokens=body.max_output_tokens or model.max_context,
            num_top_logprobs=body.top_logprobs if LOGPROBS in body.include else None,
            session_id=response_id if body.store else "",
            store=body.store,
        )
        request.validate()
        check_size(request, 1, expected_bytes(request, model.max_context))
        (request,) = with_ids([request], prompt, model.tokenizer, model.max_context)
    head = _head(body, request, response_id, body.model or model.model_name)
    choice = ChoicePlan(
        *(0, 0, request), prompt_text=prompt.text, calls=calls, grammar_field=names["grammar"]
    )
    return ResponsePlan(head, items, choice, names)


def _check_options(body: ResponsesRequest) -> None:
    options = body.gammaray
    if options.session_id:
        allowed = "none: the session of a response has its id"
        raise InvalidArgumentError("session_id", options.session_id, allowed)
    if options.turn:
        raise InvalidArgumentError("turn", options.turn, "0: previous_response_id continues a response")
    if options.stream_tokens:
        raise InvalidArgumentError("gammaray.stream_tokens", True, "false, for responses")
    if LOGPROBS in body.include and any(isinstance(tool, ToolInput) for tool in body.tools):
        raise InvalidArgumentError("include", f"{LOGPROBS} with tools", "log-probabilities without tools")


def _text_rule(asked: TextFormatInput) -> str:
    """Return the right side of the grammar's rule for the text; empty if it is free."""
    field = "text.format.schema"
    given = {"text.format.name": bool(asked.name), field: asked.json_schema is not None}
    return format_rule(asked.type, asked.json_schema, field, given)


def _head(
    body: ResponsesRequest, request: GenerationRequest, response_id: str, model_name: str
) -> types.ResponseObject:
    asked = body.text.format
    form: Any = _echoed(asked) if asked.type == "json_schema" else {"type": asked.type}
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "model": model_name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": body.store,
        "temperature": request.sampling.temperature,
        "text": {"format": form, "verbosity": "medium"},
        "tool_choice": _echoed_choice(body.tool_choice),
        "tools": [_echoed(tool) for tool in body.tools if isinstance(tool, ToolInput)],
        "top_logprobs": body.top_logprobs,
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _echoed(asked: TextFormatInput | ToolInput) -> Any:
    """Return an object of the request with all its fields; a description that is absent is null."""
    return {**asked.model_dump(by_alias=True), "description": asked.description or None}


def _echoed_choice(asked: ToolChoice | None) -> Any:
    if asked is None:
        return "auto"
    return {"type": "function", "name": asked.name} if asked.name else asked.mode
