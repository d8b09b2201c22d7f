"""A model's chat template: what it makes of messages and tools, and what is known of its form.

A template may not know the role `developer`, may take only one message of the system, at the beginning, or
none, and may require that user and assistant take turns. `render` adapts conversations to that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from transformers.utils.chat_parsing.response_templates import load_response_template

from gammaray.errors import InvalidArgumentError
from orchestrator.text.controls import Controls

_PROBE = {
    "type": "function",
    "function": {
        "name": "probe_of_tools",
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {}},
    },
}
_UNKNOWN_ROLE = "probe_of_roles"
_SEPARATOR = "\n\n"
"""Between the texts of messages that become one."""


class SystemRole(Enum):
    """Where a chat template takes messages of the system."""

    ANYWHERE = "anywhere"
    FIRST = "first"
    """Only one, at the beginning."""
    NONE = "none"


@dataclass(frozen=True)
class Roles:
    """Which sequences of roles a chat template renders."""

    has_developer: bool = True  # whether `developer` has a form of its own
    system: SystemRole = SystemRole.ANYWHERE  # where messages of the system may be
    repeats: bool = True  # whether messages of the same role may follow each other

    def adapted(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return a conversation in roles that the template renders, with the same texts."""
        found = [dict(message) for message in messages]
        if not self.has_developer:
            found = [
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in found
            ]
        if self.system is not SystemRole.ANYWHERE:
            found = self._with_one_system(found)
        return found if self.repeats else _joined_repeats(found)

    def _with_one_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        texts = [str(message["content"]) for message in messages if _is_system(message)]
        others = [message for message in messages if not _is_system(message)]
        if not texts:
            return messages
        text = _SEPARATOR.join(filter(None, texts))
        if self.system is SystemRole.FIRST:
            return [{"role": "system", "content": text}, *others]
        if others and others[0]["role"] == "user":
            return [_joined({"role": "user", "content": text}, others[0]), *others[1:]]
        return [{"role": "user", "content": text}, *others]


def _is_system(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("system", "developer")


def _joined_repeats(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of which those of the same role in a row are one; calls and results stay apart."""
    found: list[dict[str, Any]] = []
    for message in messages:
        is_text = message["role"] in ("user", "assistant") and "tool_calls" not in message
        if is_text and found and found[-1]["role"] == message["role"] and "tool_calls" not in found[-1]:
            found[-1] = _joined(found[-1], message)
        else:
            found.append(message)
    return found


def _joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    texts = (str(message["content"]) for message in (one, other))
    return {**other, "content": _SEPARATOR.join(filter(None, texts))}


@dataclass(frozen=True)
class ChatFormat:
    """What is known of a model's chat template and of the markers that its tokenizer has."""

    template: str = ""  # source of the template that is used with tools; empty if the model has no template
    has_tools: bool = False  # whether tools change what the template renders
    # Tokens beyond those of the tokenizer's algorithm -> whether special, so that decoded text omits it.
    added_tokens: Mapping[str, bool] = field(default_factory=dict)
    # The messages and their tool calls as transformers reads them; None without.
    response_template: Mapping[str, Any] | None = None
    roles: Roles = Roles()  # which sequences of roles the template renders

    @cached_property
    def controls(self) -> Controls:
        """The control tokens that only the template may write."""
        return Controls(self.template, self.added_tokens)


def chat_format(tokenizer: Any) -> ChatFormat:
    if not tokenizer.chat_template:
        return ChatFormat()
    special = set(tokenizer.all_special_ids)
    added = {
        str(token.content): bool(token.special) or token_id in special
        for token_id, token in tokenizer.added_tokens_decoder.items()
    }
    messages = [{"role": "user", "content": "probe"}]
    try:
        has_tools = render(tokenizer, messages, [_PROBE]) != render(tokenizer, messages)
        template = str(tokenizer.get_chat_template(tools=[_PROBE]))
    except (InvalidArgumentError, ValueError):  # it refuses tools, or even a single message
        has_tools, template = False, str(tokenizer.chat_template)
    return ChatFormat(template, has_tools, added, _response_template(tokenizer), _roles(tokenizer))


def _roles(tokenizer: Any) -> Roles:
    if not _shows(tokenizer, "user", "assistant", "user"):
        return Roles()
    if _shows(tokenizer, "system", "user", "assistant", "system", "user"):
        system = SystemRole.ANYWHERE
    else:
        system = SystemRole.FIRST if _shows(tokenizer, "system", "user") else SystemRole.NONE
    repeats = _shows(tokenizer, "user", "user", "assistant", "assistant", "user")
    return Roles(_has_developer(tokenizer), system, repeats)


def _has_developer(tokenizer: Any) -> bool:
    """Return whether `developer` is rendered, in another way than a role that no template knows."""
    if not _shows(tokenizer, "developer", "user"):
        return False
    own, unknown = (_probed(tokenizer, role, "user") for role in ("developer", _UNKNOWN_ROLE))
    return unknown is None or own != unknown.replace(_UNKNOWN_ROLE, "developer")


def _shows(tokenizer: Any, *roles: str) -> bool:
    """Return whether a template renders a conversation in these roles, with all its texts."""
    prompt = _probed(tokenizer, *roles)
    return prompt is not None and all(_probe_text(number) in prompt for number in range(len(roles)))


def _probed(tokenizer: Any, *roles: str) -> str | None:
    messages = [{"role": role, "content": _probe_text(number)} for number, role in enumerate(roles)]
    try:
        return render(tokenizer, messages)
    except InvalidArgumentError:
        return None


def _probe_text(number: int) -> str:
    return f"probe-text-{number}"


def _response_template(tokenizer: Any) -> Mapping[str, Any] | None:
    """Return the response template of a tokenizer if it is valid and describes tool calls."""
    found = getattr(tokenizer, "response_template", None)
    try:
        is_useful = isinstance(found, dict) and "tool_calls" in load_response_template(found).fields
    except Exception:  # a third party's data, checked by transformers as far as it goes
        return None
    return found if is_useful else None


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    roles: Roles = Roles(),
) -> str:
    """Return the prompt that a chat template makes of messages; InvalidArgumentError if it refuses them."""
    if not tokenizer.chat_template:
        raise InvalidArgumentError("messages", "chat messages", "a prompt: the model has no chat template")
    options = {"tools": [dict(tool) for tool in tools]} if tools else {}
    try:
        return str(
            tokenizer.apply_chat_template(
                roles.adapted(messages), tokenize=False, add_generation_prompt=True, **options
            )
        )
    except Exception as error:  # templates are third-party code and may raise anything
        raise InvalidArgumentError("messages", str(error), "what the model's chat template takes") from error
