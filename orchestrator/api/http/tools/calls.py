"""What a request's tools mean for its prompt, its grammar and the reading of its completion.

Nothing here depends on the JSON of one API. For each request: `plan_calls`, then `render_messages` and
`CallPlan.grammar`, then for each choice a `CallPlan.parser`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gammaray.errors import InvalidArgumentError
from gammaray.grammar.schemas import place_of
from orchestrator.api.http.tools.formats import CallFamily, CallFormat, as_texts
from orchestrator.api.http.tools.grammar import ARGUMENTS_RULE, call_grammar
from orchestrator.api.http.tools.parser import CallParser
from orchestrator.api.http.tools.template_parser import TemplateParser
from orchestrator.text.controls import ChatPrompt
from orchestrator.text.tokenizer import Tokenizer

_LINE = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?")
"""Beginning of llguidance's errors about a line of a grammar."""

ChoiceMode = Literal["none", "auto", "required"]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""  # what it does, for the model
    parameters: Mapping[str, Any] | None = None  # JSON schema of its arguments; None: it takes none
    field: str = "tools"  # name of the request's field with the schema, for errors

    @property
    def schema(self) -> Mapping[str, Any]:
        """JSON schema of its arguments, which are always an object."""
        if not self.parameters:
            return {"type": "object", "properties": {}}
        has_own = any(key in self.parameters for key in ("type", "$ref", "anyOf", "oneOf", "allOf"))
        return self.parameters if has_own else {"type": "object", **self.parameters}

    def to_template(self) -> dict[str, Any]:
        """Return the tool in OpenAI's form, which chat templates take."""
        described = {"description": self.description} if self.description else {}
        function = {"name": self.name, **described, "parameters": dict(self.schema)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolChoice:
    mode: ChoiceMode  # "none": it does not; "auto": as it likes; "required": it does
    name: str = ""  # with "required": the only tool that it may call; empty for all


@dataclass(frozen=True)
class CallPlan:
    """Tool calls of one request, whose choice is not "none"; a message may have several if parallel."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    is_parallel: bool
    form: CallFormat

    @property
    def is_forced(self) -> bool:
        """Whether a grammar enforces a call."""
        return self.choice.mode == "required"

    def grammar(self, prompt: str, answer: str = "") -> str:
        """Return the grammar of the completion, empty if it is free.

        Unless calls are forced, it allows messages by the rule `answer`, any if that is empty.
        InvalidArgumentError if the schema of a tool is none or too deep, or no grammar can express this.
        """
        if not self.is_forced and not answer:
            return ""
        if not self.is_forced and (self.form.marker_in_prompt or self.form.family is CallFamily.TEMPLATE):
            allowed = "tool_choice required or none: no grammar can express this model's form of calls"
            raise InvalidArgumentError("response_format", "a grammar with tools", allowed)
        return call_grammar(
            self.form,
            [(tool.name, tool.schema, tool.field) for tool in self._called],
            is_parallel=self.is_parallel,
            answer="" if self.is_forced else answer,
            is_thinking=prompt.rstrip().endswith("<think>"),
        )

    def place_of(self, error: InvalidArgumentError, grammar: str) -> InvalidArgumentError | None:
        """Return an error about a grammar as one about the schema of a tool; None if it names none."""
        found, tools = _LINE.match(error.got), self._called
        reason = error.got if found is None else error.got[found.end() :]
        if found is not None:
            rule = ARGUMENTS_RULE.match(grammar.split("\n")[int(found[1]) - 1])
            tools = [] if rule is None else [tools[int(rule[1])]]
        for tool in tools:
            place = place_of(tool.schema, tool.field, reason) or (tool.field if found else None)
            if place is not None:
                return InvalidArgumentError(place, f"{reason} (tool {tool.name})", error.allowed)
        return None

    @property
    def _called(self) -> list[Tool]:
        return [tool for tool in self.tools if self.choice.name in ("", tool.name)]

    def parser(self, new_id: Callable[[int], str], prompt: str = "") -> CallParser | TemplateParser:
        """Return the parser of one completion; response templates may need the rendered prompt."""
        max_calls = None if self.is_parallel else 1
        described = self.form.chat.response_template
        if self.form.family is CallFamily.TEMPLATE and described is not None:
            tools = [tool.to_template() for tool in self.tools]
            return TemplateParser(described, tools, new_id, prompt=prompt, max_calls=max_calls)
        allowed = [tool.name for tool in self._called]
        return CallParser(
            self.form.family,
            frozenset(tool.name for tool in self.tools),
            new_id,
            max_calls=max_calls,
            is_after_marker=self.is_forced and bool(self.form.marker_in_prompt),
            sole_name=allowed[0] if self.is_forced and len(allowed) == 1 else "",
        )

    @property
    def markers(self) -> frozenset[bytes]:
        """Special tokens that the parser must see, though decoded text omits them, by their bytes."""
        return frozenset(marker.encode() for marker in self.form.markers)


def plan_calls(
    tools: Sequence[Tool], choice: ToolChoice | None, is_parallel: bool, tokenizer: Tokenizer
) -> CallPlan | None:
    """Return the plan of a request's tools; None if no tool can be called.

    Without a `choice` it is "auto" if there are tools. A message may have several calls if `is_parallel`, but
    one of a named tool, as with OpenAI.
    """
    choice = choice or ToolChoice("auto")
    if not tools or choice.mode == "none":
        return None
    form = CallFormat.of(tokenizer.chat_format, is_forced=choice.mode == "required")
    return CallPlan(tuple(tools), choice, is_parallel and not choice.name, form)


def render_messages(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, calls: CallPlan | None = None
) -> ChatPrompt:
    """Return the prompt of a conversation, whose completion may have calls.

    Arguments of earlier calls are objects, or texts that are no JSON object. InvalidArgumentError if the chat
    template refuses the messages or the tools.
    """
    tools = [] if calls is None else [tool.to_template() for tool in calls.tools]
    form = CallFormat.of(tokenizer.chat_format) if calls is None else calls.form
    messages, marked_tools, mark = tokenizer.chat_format.controls.mark(messages, tools)
    prompt = _prompt(messages, marked_tools, form, tokenizer)
    ending = form.marker_in_prompt if calls is not None and calls.is_forced else ""
    return ChatPrompt(prompt + ending, mark)


def _prompt(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    form: CallFormat,
    tokenizer: Tokenizer,
) -> str:
    """Return the prompt of a conversation.

    A template may refuse calls or results, such as several calls in a message, a call without a result, or
    arguments that are no object; or it may leave such arguments out. Then they are written as text.
    """
    if not any("tool_calls" in message or message["role"] == "tool" for message in messages):
        return tokenizer.render_chat(*(form.messages(messages, tools) if tools else (messages,)))
    try:
        prompt = tokenizer.render_chat(*form.messages(messages, tools))
    except InvalidArgumentError:
        if not form.is_native:
            raise
    else:
        texts = list(_broken_arguments(messages))
        quoted = (json.dumps(text, ensure_ascii=False)[1:-1] for text in texts)
        if not form.is_native or _has(prompt, texts) or _has(prompt, quoted):
            return prompt
    return tokenizer.render_chat(as_texts(messages), tools)


def _broken_arguments(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for message in messages:
        for call in message.get("tool_calls", ()):
            if isinstance(call["function"]["arguments"], str):
                yield call["function"]["arguments"]


def _has(prompt: str, texts: Iterable[str]) -> bool:
    """Return whether a prompt has texts in their order."""
    at = 0
    for text in texts:
        at = prompt.find(text, at)
        if at < 0:
            return False
        at += len(text)
    return True


def call_id(seed: str, index: int) -> str:
    """Return the id of a call by its completion and number: a resumed stream repeats it."""
    return f"call_{hashlib.sha256(f'{seed}:{index}'.encode()).hexdigest()[:24]}"
