"""The forms in which models write tool calls, and how a conversation with tools is rendered for each.

    Hermes, Qwen    <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>, one after another
    Llama 3         {"name": "f", "parameters": {...}}, as the whole message, perhaps after <|python_tag|>
    Mistral         [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]

The form is recognised by the chat template. For further forms the tokenizer may have a response template. A
model whose template has no tools, or has them in an unknown form, is told of them by a system message, which
asks for Hermes' form.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from orchestrator.text.chat import ChatFormat

CLOSE = "</tool_call>"
"""What comes after one of Hermes' calls."""

_THINKING = ("<think>", "</think>")
# Llama's templates explain the form in these words.
_LLAMA_TEXT = '{"name": function name, "parameters"'
# In templates of other forms that share a marker: Qwen 3 Coder's in XML, and later ones of Mistral.
_OTHER_TEXTS = ("<function=", "[ARGS]", "[CALL_ID]")
_INSTRUCTION = """# Tools

You can call these functions, each given as a JSON object within <tools></tools>:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and its arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <function name>, "arguments": <object of the arguments>}}
</tool_call>
The results are given within <tool_response></tool_response>."""


class CallFamily(Enum):
    """Models that write tool calls alike."""

    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL = "mistral"
    TEMPLATE = "template"
    """As a response template describes; no grammar expresses it."""


OPEN = {
    CallFamily.HERMES: "<tool_call>",
    CallFamily.LLAMA: "<|python_tag|>",
    CallFamily.MISTRAL: "[TOOL_CALLS]",
}
"""What comes before a call; with Llama it may be absent."""


@dataclass(frozen=True)
class CallFormat:
    """How a model is told of tools, and writes calls."""

    family: CallFamily
    is_native: bool  # the chat template renders tools, calls and results; else this class does
    chat: ChatFormat

    @classmethod
    def of(cls, chat: ChatFormat, *, is_forced: bool = False) -> CallFormat:
        """Return the form of a chat template's calls; if they are forced, one that a grammar can express."""
        family = _family(chat)
        if family is None and chat.has_tools and chat.response_template is not None and not is_forced:
            family = CallFamily.TEMPLATE
        return cls(family or CallFamily.HERMES, family is not None, chat)

    @property
    def can_think(self) -> bool:
        """Whether the model may think before it answers, between tokens of their own."""
        return all(tag in self.chat.template and tag in self.chat.added_tokens for tag in _THINKING)

    @property
    def marker_in_prompt(self) -> str:
        """Marker before forced calls that a grammar cannot express, so that the prompt ends with it."""
        marker = OPEN[CallFamily.MISTRAL]
        is_needed = self.family is CallFamily.MISTRAL and self.chat.added_tokens.get(marker, False)
        return marker if is_needed else ""

    @property
    def markers(self) -> list[str]:
        """Markers of calls that are special tokens, which decoded text omits."""
        special = [text for text, is_special in self.chat.added_tokens.items() if is_special]
        if self.family is not CallFamily.TEMPLATE:
            return [text for text in special if text in (OPEN[self.family], CLOSE)]
        # Its patterns have backslashes.
        described = json.dumps(self.chat.response_template, ensure_ascii=False).replace("\\", "")
        return [text for text in special if text in described]

    def messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        """Return messages and tools for the chat template; arguments are objects, or texts that are none."""
        if not self.is_native:
            return _with_tools(as_texts(messages), tools), ()
        if self.family is CallFamily.MISTRAL:
            return [_with_short_ids(message) for message in messages], tools
        return list(messages), tools


def _family(chat: ChatFormat) -> CallFamily | None:
    template = chat.template
    if not chat.has_tools or any(text in template for text in _OTHER_TEXTS):
        return None
    for family in (CallFamily.HERMES, CallFamily.MISTRAL):
        if OPEN[family] in template:
            return family
    return CallFamily.LLAMA if _LLAMA_TEXT in template else None


def as_texts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages of text alone: calls in Hermes' form, results as the user's."""
    written: list[Mapping[str, Any]] = []
    results: list[str] = []  # of the last message
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            results.append(f"<tool_response>\n{content}\n</tool_response>")
            continue
        if results:
            written.append({"role": "user", "content": "\n".join(results)})
            results = []
        if calls := message.get("tool_calls"):
            texts = [f"{OPEN[CallFamily.HERMES]}\n{_call_text(call)}\n{CLOSE}" for call in calls]
            written.append({"role": role, "content": "\n".join([*([content] if content else []), *texts])})
        else:
            written.append(message)
    if results:
        written.append({"role": "user", "content": "\n".join(results)})
    return written


def _with_tools(
    messages: list[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return messages of which one of the system explains the tools."""
    if not tools:
        return messages
    text = _INSTRUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] in ("system", "developer"):
        first = messages[0]
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _call_text(call: Mapping[str, Any]) -> str:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if isinstance(arguments, str):
        return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}'
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _with_short_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with ids of nine letters or digits: Mistral's templates refuse others."""
    if calls := message.get("tool_calls"):
        return {**message, "tool_calls": [{**call, "id": _short(call["id"])} for call in calls]}
    if call_id := message.get("tool_call_id"):
        return {**message, "tool_call_id": _short(call_id)}
    return message


def _short(call_id: str) -> str:
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
