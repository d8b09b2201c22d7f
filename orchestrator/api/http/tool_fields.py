"""Tools in the bodies of chats: `tools`, `tool_choice`, and calls and results among the messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from gammaray.errors import InvalidArgumentError
from orchestrator.api.http.fields import StrictModel
from orchestrator.api.http.tools.calls import Tool, ToolChoice

MAX_TOOLS = 128
"""Upper bound of tools in a request, the same as OpenAI's, and of calls in a message."""

MAX_SCHEMA_CHARS = 2**17
"""Upper bound of the characters of all tools' schemas."""

MAX_ARGUMENT_CHARS = 2**20
"""Upper bound of the characters of the arguments of all calls in the messages: no prompt is longer."""

_MAX_DEPTH = 64
_ENCODER = json.JSONEncoder()
_NAME = r"^[A-Za-z0-9_.\-]{1,64}$"


class FunctionDefinition(StrictModel):
    """OpenAI's `function` of a tool."""

    name: Annotated[str, Field(pattern=_NAME)] = Field(description="Name of the function.")
    description: str = Field("", description="What it does, for the model.")
    parameters: dict[str, Any] = Field(
        default={}, description="JSON schema of its arguments, an object; without it there are none."
    )
    strict: bool = Field(
        False, description="Ignored: forced calls match the schema in any case, others are the model's own."
    )


class FunctionTool(StrictModel):
    """OpenAI's tool; functions are supported."""

    type: Literal["function"]
    function: FunctionDefinition

    def tool(self, index: int) -> Tool:
        """Return the tool at an index of the request's tools."""
        own = self.function
        return Tool(
            own.name, own.description, own.parameters, own.strict, f"tools.{index}.function.parameters"
        )


class _ToolName(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str


class NamedTool(BaseModel):
    """The tool that the model must call."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: _ToolName


class CalledFunction(BaseModel):
    """A function and the text of its arguments; further fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: str
    arguments: str = Field(description="JSON of an object; any other text reaches the model as it is.")


class MessageCall(BaseModel):
    """A call in a message of the assistant; further fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


def parse_choice(value: Any) -> ToolChoice:
    """Return the choice that a `tool_choice` stands for.

    Raises:
        ValueError: It is none.
    """
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    form = '"none", "auto", "required" or {"type": "function", "function": {"name": name}}'
    if not isinstance(value, dict) or value.keys() != {"type", "function"} or value["type"] != "function":
        raise ValueError(form)
    function = value["function"]
    if not isinstance(function, dict) or function.keys() != {"name"} or not isinstance(function["name"], str):
        raise ValueError(form)
    return ToolChoice("required", function["name"])


def check_tools(
    tools: Sequence[Tool], choice: ToolChoice | None, field: str = "tools.{}.function.name"
) -> None:
    """Check that tools have different names, and that a choice goes with them.

    Args:
        tools: The tools.
        choice: The choice; None if the request has none.
        field: Name of the field with the name of the tool at an index, for errors.

    Raises:
        InvalidArgumentError: A name occurs twice, a tool is required without tools, or the chosen one is
            unknown.
    """
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidArgumentError(field.format(index), name, "a name that no other tool has")
    if choice is None or choice.mode != "required":
        return
    if not tools:
        raise InvalidArgumentError("tool_choice", choice.name or choice.mode, "none or auto, without tools")
    if choice.name and choice.name not in names:
        allowed = f"the name of a tool ({', '.join(names[:8])}{', ...' if len(names) > 8 else ''})"
        raise InvalidArgumentError("tool_choice", f"the function {choice.name}", allowed)


def check_schemas(tools: Sequence[Tool]) -> None:
    """Check the size of the schemas of tools.

    Raises:
        InvalidArgumentError: They are too long, or nested too deeply.
    """
    num_chars = 0
    for tool in tools:
        if is_deeper(tool.parameters or {}, _MAX_DEPTH):
            allowed = f"at most {_MAX_DEPTH} levels"
            raise InvalidArgumentError(tool.field, "a schema that is nested too deeply", allowed)
        for piece in _ENCODER.iterencode(dict(tool.parameters or {})):
            num_chars += len(piece)
            if num_chars > MAX_SCHEMA_CHARS:
                got = f"more than {MAX_SCHEMA_CHARS} characters of schemas so far"
                raise InvalidArgumentError(tool.field, got, f"at most {MAX_SCHEMA_CHARS} in all tools")


def argument_values(calls: Sequence[Sequence[tuple[str, str]]]) -> Iterator[list[dict[str, Any] | str]]:
    """Yield the arguments of the calls of each message: objects, as chat templates take them.

    Arguments that are no JSON object, such as those of a call that was cut, stay texts.

    Args:
        calls: For each message its calls' arguments, each with the name of the field, for errors.

    Raises:
        InvalidArgumentError: Arguments are too long in all.
    """
    num_chars = 0
    for message in calls:
        found = []
        for field, arguments in message:
            num_chars += len(arguments)
            if num_chars > MAX_ARGUMENT_CHARS:
                got = f"more than {MAX_ARGUMENT_CHARS} characters of arguments so far"
                raise InvalidArgumentError(field, got, f"at most {MAX_ARGUMENT_CHARS} in all calls")
            found.append(_parsed(arguments))
        yield found


def _parsed(arguments: str) -> dict[str, Any] | str:
    if not arguments.strip():
        return {}
    try:
        value = from_json(arguments)  # without lone surrogates, which no prompt can have
    except ValueError:
        return arguments
    return value if isinstance(value, dict) and not is_deeper(value, _MAX_DEPTH) else arguments


def is_deeper(value: Any, depth: int) -> bool:
    """Return whether lists and objects are nested deeper than that."""
    level = [value]
    for _ in range(depth + 1):
        level = [
            entry
            for holder in level
            for entry in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(entry, (dict, list))
        ]
        if not level:
            return False
    return True
