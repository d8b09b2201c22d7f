"""Writes grammars, in the Lark syntax of llguidance, from JSON schemas, regular expressions and choices.

The result is the sampling parameter `grammar`. Only its form is checked here, as clients do not need
llguidance; the server compiles it and names what it does not support. llguidance's syntax:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gammaray.errors import InvalidArgumentError

__all__ = [
    "JSON_OBJECT",
    "choice_grammar",
    "json_rule",
    "json_schema_grammar",
    "literal",
    "regex_grammar",
]

JSON_OBJECT: Mapping[str, Any] = {"type": "object"}
"""Schema of any JSON object."""

MAX_DEPTH = 100
"""Upper bound of the nesting of a JSON schema."""

# Whitespace as `json.dumps` writes it: text that a model knows, and no endless whitespace.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
# Keywords with one schema, with a list of schemas, and with schemas by name.
_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def json_schema_grammar(schema: Mapping[str, Any] | bool, field: str = "json_schema") -> str:
    """Return the grammar of JSON texts that match a schema, see `json_rule`.

    Raises:
        InvalidArgumentError: As `json_rule`.
    """
    return f"start: {json_rule(schema, field)}"


def json_rule(schema: Mapping[str, Any] | bool, field: str = "json_schema") -> str:
    """Return the right side of a rule for JSON texts that match a schema.

    The texts have the whitespace of `json.dumps`. Objects with `properties` have no others, unless
    `additionalProperties` says so or the schema uses `allOf`. A `format` that llguidance does not know is
    ignored, as JSON Schema allows.

    Args:
        schema: JSON schema.
        field: Name of the field, for errors.

    Raises:
        InvalidArgumentError: The schema is no object or boolean, is no JSON, or is nested too deeply.
    """
    if not isinstance(schema, (Mapping, bool)):
        raise InvalidArgumentError(field, type(schema).__name__, "a JSON schema, which is an object")
    schema = dict(schema) if isinstance(schema, Mapping) else ({} if schema else {"not": {}})
    try:
        copied = json.loads(json.dumps(schema))
        schemas = list(_schemas(copied))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(field, f"a value that is no JSON ({error})", "a JSON schema") from None
    except RecursionError:
        raise InvalidArgumentError(
            field, "a schema that is nested too deeply", f"{MAX_DEPTH} levels"
        ) from None
    is_closed = not any("allOf" in one for one in schemas)
    for one in schemas:
        if one.get("format") not in _FORMATS:
            one.pop("format", None)
        if is_closed and "properties" in one and "patternProperties" not in one:
            one.setdefault("additionalProperties", False)
    return f"%json {_escaped(json.dumps({**copied, 'x-guidance': _SPACING}))}"


def regex_grammar(pattern: str, field: str = "regex") -> str:
    """Return the grammar of texts that match a regular expression as a whole.

    Raises:
        InvalidArgumentError: It is no text, or empty.
    """
    if not isinstance(pattern, str) or not pattern:
        raise InvalidArgumentError(field, pattern, "a regular expression")
    # A slash would end the expression in Lark; after an odd number of backslashes it is escaped already.
    escaped = re.sub(r"((?:^|[^\\])(?:\\\\)*)(?=/)", r"\1\\", pattern.replace("\n", "\\n"))
    return f"start: /{escaped.replace('<[', _LESS + '[')}/"


def choice_grammar(choices: Sequence[str], field: str = "choice") -> str:
    """Return the grammar of a choice among texts.

    Raises:
        InvalidArgumentError: There is none, or one is no text or empty.
    """
    is_list = isinstance(choices, Sequence) and not isinstance(choices, str)
    if not is_list or not choices or not all(isinstance(text, str) and text for text in choices):
        raise InvalidArgumentError(field, choices, "a list of texts, none empty")
    return f"start: {' | '.join(map(literal, choices))}"


def literal(text: str) -> str:
    """Return the Lark string of a text."""
    return _escaped(json.dumps(text, ensure_ascii=False))


_LESS = "\\x3c"


def _escaped(text: str) -> str:
    # Tokens by number, <[...]>, are refused in grammars, see `gammaray.grammar.matcher`.
    return text.replace("<", "\\u003c")


def _schemas(schema: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield a schema and the schemas in it, without those that are true or false."""
    if depth > MAX_DEPTH:
        raise RecursionError
    if not isinstance(schema, dict):
        return
    yield schema
    inner = [schema.get(name) for name in _ONE]
    for name in _SEVERAL:
        inner += schema[name] if isinstance(schema.get(name), list) else []
    for name in _NAMED:
        inner += schema[name].values() if isinstance(schema.get(name), dict) else []
    for one in inner:
        yield from _schemas(one, depth + 1)
