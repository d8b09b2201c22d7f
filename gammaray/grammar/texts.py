"""Writes grammars, in the Lark syntax of llguidance, from JSON schemas, regular expressions and choices.

The result is the sampling parameter `grammar`. Only its form is checked here, as clients do not need
llguidance; the server compiles it and names what it does not support. llguidance's syntax:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gammaray.checks import check_encodable
from gammaray.errors import InvalidArgumentError
from gammaray.grammar.schemas import MAX_DEPTH, prepare

JSON_OBJECT: Mapping[str, Any] = {"type": "object"}
"""Schema of any JSON object."""

# What `json.dumps(..., ensure_ascii=False)` writes; no endless whitespace.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# A slash would end an expression in Lark, a newline is no part of one. `\<` and `\>` are word boundaries in
# Rust's expressions, which llguidance does not support, and the characters themselves elsewhere.
_SPECIAL = re.compile(r"\\.|[/\n]|<(?=\[)", re.DOTALL)
_IN_LARK = {"/": r"\/", "\n": r"\n", "<": r"\x3c", ">": r"\x3e"}


def json_schema_grammar(schema: Mapping[str, Any] | bool, field: str = "json_schema") -> str:
    """Return the grammar of JSON texts that match a schema, see `json_rule`."""
    return f"start: {json_rule(schema, field)}"


def json_rule(schema: Mapping[str, Any] | bool, field: str = "json_schema") -> str:
    """Return the right side of a rule for JSON texts that match a schema.

    The texts have the whitespace of `json.dumps`. Objects with `properties` have no others, unless the schema
    says so: by `additionalProperties` or `patternProperties`, by a required property that is not listed, or
    because several places describe one object, such as `allOf`. A `format` that llguidance does not know is
    ignored, as JSON Schema allows. InvalidArgumentError if `field` is no object or boolean, or is no JSON,
    and as `prepare`.
    """
    if not isinstance(schema, (Mapping, bool)):
        raise InvalidArgumentError(field, schema, "a JSON schema, which is an object")
    schema = dict(schema) if isinstance(schema, Mapping) else ({} if schema else {"enum": []})
    try:
        copied = json.loads(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(field, f"a value that is no JSON ({error})", "a JSON schema") from None
    except RecursionError:
        raise InvalidArgumentError(
            field, "a schema that is nested too deeply", f"{MAX_DEPTH} levels"
        ) from None
    prepare(copied, field)
    return f"%json {_escaped(json.dumps({**copied, 'x-guidance': _STYLE}))}"


def regex_grammar(pattern: str, field: str = "regex") -> str:
    """Return the grammar of texts that match a regular expression, not empty, as a whole."""
    if not isinstance(pattern, str) or not pattern:
        raise InvalidArgumentError(field, pattern, "a regular expression")
    check_encodable(field, pattern)
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise InvalidArgumentError(field, pattern, "a regular expression that does not end within an escape")
    in_lark = _SPECIAL.sub(lambda found: _IN_LARK.get(found.group()[-1], found.group()), pattern)
    return f"start: /{in_lark}/"


def choice_grammar(choices: Sequence[str], field: str = "choice") -> str:
    """Return the grammar of a choice among texts, none of them empty."""
    is_list = isinstance(choices, Sequence) and not isinstance(choices, str)
    if not is_list or not choices or not all(isinstance(text, str) and text for text in choices):
        raise InvalidArgumentError(field, choices, "a list of texts, none empty")
    for text in choices:
        check_encodable(field, text)
    return f"start: {' | '.join(map(literal, choices))}"


def literal(text: str) -> str:
    return _escaped(json.dumps(text, ensure_ascii=False))


def _escaped(text: str) -> str:
    # Tokens by number, <[...]>, are refused in grammars, see `gammaray.grammar.matcher`.
    return text.replace("<", "\\u003c").replace("\x7f", "\\u007f")
