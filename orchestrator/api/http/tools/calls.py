"""What a request's tools mean for its prompt, its grammar and the reading of its completion.

Nothing here depends on the JSON of one API. For each request: `plan_calls`, then `CallPlan.prompt` and
`CallPlan.grammar`, then for each choice a `CallPlan.parser`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from gammaray.errors import InvalidArgumentError
from orchestrator.api.http.tools.formats import CallFamily, CallFormat
from orchestrator.api.http.tools.grammar import call_grammar
from orchestrator.api.http.tools.parser import CallParser
from orchestrator.api.http.tools.template_parser import TemplateParser
from orchestrator.text.chat import ChatFormat

__all__ = ["CallPlan", "ChatModel", "Tool", "ToolChoice", "call_id", "plan_calls", "render_messages"]


class ChatModel(Protocol):
    """The model's chat template, see `orchestrator.api.backend.Backend`."""

    @property
    def chat_format(self) -> ChatFormat:
        """What is known of it."""
        ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Return the prompt of a conversation."""
        ...


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Args:
        name: Its name.
        description: What it does, for the model.
        parameters: JSON schema of its arguments; None: it takes none.
        strict: Whether the client asked for arguments that follow the schema; None: it did not say.
        field: Name of the request's field with the schema, for errors.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool | None = None
    field: str = "tools"

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
    """Whether the model calls tools.

    Args:
        mode: "none": it does not; "auto": as it likes; "required": it does.
        name: With "required": the only tool that it may call; empty for all.
    """

    mode: Literal["none", "auto", "required"]
    name: str = ""


@dataclass(frozen=True)
class CallPlan:
    """Tool calls of one request.

    Args:
        tools: The tools, at least one.
        choice: Whether the model calls them; not "none".
        is_parallel: Whether a message may have several calls.
        form: Form of the calls.
    """

    tools: tuple[Tool, ...]
    choice: ToolChoice
    is_parallel: bool
    form: CallFormat

    @property
    def is_forced(self) -> bool:
        """Whether a grammar enforces a call."""
        return self.choice.mode == "required"

    def prompt(self, messages: Sequence[Mapping[str, Any]], model: ChatModel) -> str:
        """Return the prompt of a conversation, see `render_messages`.

        Raises:
            InvalidArgumentError: The chat template refuses the messages or the tools.
        """
        tools = [tool.to_template() for tool in self.tools]
        rendered = model.render_chat(*self.form.messages(messages, tools))
        return rendered + self.form.marker_in_prompt if self.is_forced else rendered

    def grammar(self, prompt: str, answer: str = "") -> str:
        """Return the grammar of the completion, empty if it is free.

        Args:
            prompt: The result of `prompt`.
            answer: Right side of a rule for messages without calls, which the grammar allows unless calls are
                forced; empty if they are free.

        Raises:
            InvalidArgumentError: The schema of a tool is no schema, or is nested too deeply; or a grammar
                cannot express that there are calls or an answer.
        """
        if not self.is_forced and not answer:
            return ""
        if not self.is_forced and (self.form.marker_in_prompt or self.form.family is CallFamily.TEMPLATE):
            allowed = "tool_choice required or none: no grammar can express this model's form of calls"
            raise InvalidArgumentError("response_format", "a grammar with tools", allowed)
        tools = [tool for tool in self.tools if self.choice.name in ("", tool.name)]
        return call_grammar(
            self.form,
            [(tool.name, tool.schema, tool.field) for tool in tools],
            is_parallel=self.is_parallel,
            answer="" if self.is_forced else answer,
            is_thinking=prompt.rstrip().endswith("<think>"),
        )

    def parser(self, new_id: Callable[[int], str], prompt: str = "") -> CallParser | TemplateParser:
        """Return the parser of one completion.

        Args:
            new_id: Returns the id of the call with this index, see `call_id`.
            prompt: The result of `prompt`; models with a response template may need it.
        """
        max_calls = None if self.is_parallel else 1
        described = self.form.chat.response_template
        if self.form.family is CallFamily.TEMPLATE and described is not None:
            tools = [tool.to_template() for tool in self.tools]
            return TemplateParser(described, tools, new_id, prompt=prompt, max_calls=max_calls)
        return CallParser(
            self.form.family,
            frozenset(tool.name for tool in self.tools),
            new_id,
            max_calls=max_calls,
            is_after_marker=self.is_forced and bool(self.form.marker_in_prompt),
        )

    @property
    def markers(self) -> frozenset[bytes]:
        """Special tokens that the parser must see, though decoded text omits them, by their bytes."""
        return frozenset(marker.encode() for marker in self.form.markers)


def plan_calls(
    tools: Sequence[Tool], choice: ToolChoice | None, is_parallel: bool, model: ChatModel
) -> CallPlan | None:
    """Return the plan of a request's tools; None if no tool can be called.

    Args:
        tools: The tools.
        choice: Whether the model calls them; None: "auto" if there are tools.
        is_parallel: Whether a message may have several calls. One of a named tool has one, as OpenAI's has.
        model: The model's chat template.
    """
    choice = choice or ToolChoice("auto")
    if not tools or choice.mode == "none":
        return None
    form = CallFormat.of(model.chat_format, is_forced=choice.mode == "required")
    return CallPlan(tuple(tools), choice, is_parallel and not choice.name, form)


def render_messages(messages: Sequence[Mapping[str, Any]], model: ChatModel) -> str:
    """Return the prompt of a conversation without tools, whose messages may still have calls and results.

    Raises:
        InvalidArgumentError: The chat template refuses the messages.
    """
    if any("tool_calls" in message or message["role"] == "tool" for message in messages):
        messages, _ = CallFormat.of(model.chat_format).messages(messages, ())
    return model.render_chat(messages)


def call_id(seed: str, index: int) -> str:
    """Return the id of a call: the same for the same completion, so that a resumed stream repeats it.

    Args:
        seed: Names the completion.
        index: Number of the call in the completion.
    """
    return f"call_{hashlib.sha256(f'{seed}:{index}'.encode()).hexdigest()[:24]}"
