"""Structured output of clients: the options that ask for it, and the object that a text stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict, get_origin

from gammaray.errors import IncompleteOutputError, InvalidArgumentError
from gammaray.grammar.texts import choice_grammar, json_schema_grammar, regex_grammar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_NAMES = ("json_schema", "regex", "choice", "grammar")


class OutputOptions(TypedDict, total=False):
    """Options for the form of a completion; at most one is given.

    json_schema: JSON schema as a mapping, or a type that pydantic knows: a model, a dataclass, `list[Model]`.
    regex: Regular expression of the whole text.
    choice: The possible texts.
    grammar: Grammar in the Lark syntax of llguidance.
    """

    json_schema: Mapping[str, Any] | bool | type[Any] | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None


@dataclass(frozen=True)
class OutputForm:
    """The form of a completion."""

    name: str = ""  # option that asks for it; empty for any text
    value: Any = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> OutputForm:
        """Return the form that options ask for; InvalidArgumentError if several do."""
        names = [name for name in _NAMES if options.get(name) is not None]
        if len(names) > 1:
            raise InvalidArgumentError(names[0], f"{' with '.join(names)}", f"one of {', '.join(_NAMES)}")
        return cls(names[0], options[names[0]]) if names else cls()

    @cached_property
    def grammar(self) -> Any:
        """The grammar, unchecked if given as such; empty for any text. InvalidArgumentError if wrong."""
        writers: dict[str, Callable[[Any], str]] = {
            "json_schema": lambda _: json_schema_grammar(self._schema),
            "regex": regex_grammar,
            "choice": choice_grammar,
        }
        if self.name in writers:
            return writers[self.name](self.value)
        return self.value if self.name else ""

    @property
    def http_fields(self) -> dict[str, Any]:
        """The fields that ask for the form over HTTP; InvalidArgumentError for a wrong value."""
        if not self.name:
            return {}
        if self.name != "json_schema":
            return {"structured_outputs": {self.name: self.value}}
        name = re.sub(r"[^A-Za-z0-9_-]+", "_", getattr(self.value, "__name__", "output"))[:64]
        return {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": name, "schema": self._schema, "strict": True},
            }
        }

    def parsed(self, text: str, finish_reason: str) -> Any:
        """Return what the type of `json_schema`, or `json.loads`, makes of a text; None for other forms.

        Raises:
            IncompleteOutputError: The text was cut, for example by `max_tokens` or a stop string.
            pydantic.ValidationError: A validator of the type that is no part of its schema refuses it.
        """
        if self.name != "json_schema":
            return None
        # A cut number may be one as well, so that the reason counts even where the text is JSON.
        if finish_reason != "stop":
            raise IncompleteOutputError(text, finish_reason)
        try:
            value = json.loads(text)
        except ValueError:
            raise IncompleteOutputError(text, finish_reason) from None
        return value if self._adapter is None else self._adapter.validate_json(text)

    @cached_property
    def _schema(self) -> Any:
        if self._adapter is None:
            return self.value
        from pydantic import PydanticUserError

        try:
            return self._adapter.json_schema()
        except PydanticUserError as error:
            raise self._wrong_type(error) from None

    @cached_property
    def _adapter(self) -> TypeAdapter[Any] | None:
        if isinstance(self.value, (Mapping, bool)):
            return None
        if not isinstance(self.value, type) and get_origin(self.value) is None:
            allowed = "a JSON schema, or a type such as a pydantic model"
            raise InvalidArgumentError("json_schema", type(self.value).__name__, allowed)
        from pydantic import PydanticUserError, TypeAdapter

        try:
            return TypeAdapter(self.value)
        except PydanticUserError as error:
            raise self._wrong_type(error) from None

    def _wrong_type(self, error: Exception) -> InvalidArgumentError:
        reason = str(error).partition("\n")[0]
        return InvalidArgumentError(
            "json_schema", f"{self.value!r} ({reason})", "a type that JSON can stand for"
        )
