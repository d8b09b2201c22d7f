"""A model's chat template: what it makes of messages and tools, and what is known of its form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.chat_parsing.response_templates import load_response_template

from gammaray.errors import InvalidArgumentError

__all__ = ["ChatFormat", "chat_format", "render"]

_PROBE = {
    "type": "function",
    "function": {
        "name": "probe_of_tools",
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {}},
    },
}


@dataclass(frozen=True)
class ChatFormat:
    """What is known of a model's chat template and of the markers that its tokenizer has.

    Args:
        template: Source of the template that is used with tools; empty if the model has no template.
        has_tools: Whether tools change what the template renders.
        added_tokens: Tokens that the tokenizer has in addition to those of its algorithm, by text; the value
            says whether it is a special token, which decoded text omits.
        response_template: Description of the model's messages and their tool calls, which transformers
            reads; None without.
    """

    template: str = ""
    has_tools: bool = False
    added_tokens: Mapping[str, bool] = field(default_factory=dict)
    response_template: Mapping[str, Any] | None = None


def chat_format(tokenizer: Any) -> ChatFormat:
    """Return the chat format of a tokenizer of transformers."""
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
    return ChatFormat(template, has_tools, added, _response_template(tokenizer))


def _response_template(tokenizer: Any) -> Mapping[str, Any] | None:
    """Return the response template of a tokenizer if it is valid and describes tool calls."""
    found = getattr(tokenizer, "response_template", None)
    try:
        is_useful = isinstance(found, dict) and "tool_calls" in load_response_template(found).fields
    except Exception:  # a third party's data, checked by transformers as far as it goes
        return None
    return found if is_useful else None


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return the prompt that a tokenizer's chat template makes of messages.

    Args:
        tokenizer: A tokenizer of transformers.
        messages: The conversation.
        tools: Tools in OpenAI's form.

    Raises:
        InvalidArgumentError: The model has no chat template, or the template refuses the messages or tools.
    """
    if not tokenizer.chat_template:
        raise InvalidArgumentError("messages", "chat messages", "a prompt: the model has no chat template")
    options = {"tools": [dict(tool) for tool in tools]} if tools else {}
    try:
        return str(
            tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True, **options
            )
        )
    except Exception as error:  # templates are third-party code and may raise anything
        raise InvalidArgumentError("messages", str(error), "what the model's chat template takes") from error
