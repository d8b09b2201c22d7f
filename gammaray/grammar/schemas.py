"""Prepares a JSON schema for llguidance, which refuses keywords that it does not know.

Keywords that restrict nothing are dropped, and objects that list their properties are closed. `oneOf` becomes
`anyOf` where its alternatives exclude each other, as those with a discriminator do.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from gammaray.errors import InvalidArgumentError

MAX_DEPTH = 100
"""Upper bound of the nesting of a JSON schema."""

MAX_EXACT = 2**53
"""llguidance reads larger numbers as floats. Looser bounds are tightened to this, other numbers refused."""

_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")

# Keywords with one schema, with a list of schemas, and with schemas by name.
_ONE = ("items", "additionalProperties")
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")

# What generators of schemas write without a meaning.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}

_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
"""Keywords with the sign of their looser direction."""

# Keywords that describe an object here, and keywords whose schemas describe it elsewhere.
_OWN = frozenset(["properties", "patternProperties", "additionalProperties", "required"])
_ELSEWHERE = ("$ref", "anyOf", "oneOf")

# That of pydantic's decimals, without the look-ahead that llguidance does not know.
_PATTERNS = {r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$"}


def prepare(root: dict[str, Any], field: str) -> None:
    """Change a schema to one that llguidance follows, which may have fewer texts.

    Raises:
        InvalidArgumentError: `field` is nested too deeply, has a number that is too large, or a `oneOf` whose
            alternatives may match the same value.
    """
    schemas = list(_schemas(root, field))
    is_scattered = any(map(_is_scattered, schemas))
    for schema in schemas:
        _simplify(schema, field)
        if "oneOf" in schema:
            _rename_exclusive(schema, root, field)
        if not is_scattered and _lists_all_properties(schema):
            schema.setdefault("additionalProperties", False)


def _schemas(root: dict[str, Any], field: str) -> Iterator[dict[str, Any]]:
    """Yield a schema and those in it."""
    level = [root]
    for _ in range(MAX_DEPTH + 1):
        yield from level
        level = [inner for schema in level for inner in _inner(schema)]
    if level:
        raise InvalidArgumentError(field, "a schema that is nested too deeply", f"{MAX_DEPTH} levels")


def _inner(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas directly in a schema, without those that are true or false."""
    values = [schema.get(name) for name in _ONE]
    for name in _SEVERAL:
        if isinstance(several := schema.get(name), list):
            values += several
    for name in _NAMED:
        if isinstance(named := schema.get(name), dict):
            values += named.values()
    return (value for value in values if isinstance(value, dict))


def _simplify(schema: dict[str, Any], field: str) -> None:
    """Drop and rewrite keywords of one schema."""
    for keyword, values in _WITHOUT_EFFECT.items():
        if schema.get(keyword) in values:
            schema.pop(keyword, None)
    if not isinstance(schema.get("items"), list):
        schema.pop("additionalItems", None)  # llguidance reads such a schema as one of an older draft
    if schema.get("format", "date") not in _FORMATS:
        del schema["format"]
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        schema["pattern"] = _PATTERNS.get(pattern, pattern)
    for keyword, sign in _BOUNDS.items():
        bound = schema.get(keyword)
        if isinstance(bound, (int, float)) and sign * bound > MAX_EXACT:
            schema[keyword] = sign * MAX_EXACT
    _check_numbers([schema.get(name) for name in ("const", "enum", *_BOUNDS)], field)


def _check_numbers(values: list[Any], field: str) -> None:
    while values:
        value = values.pop()
        if isinstance(value, (list, dict)):
            values += value if isinstance(value, list) else value.values()
        elif isinstance(value, (int, float)) and abs(value) > MAX_EXACT:
            raise InvalidArgumentError(field, f"the number {value}", f"from -{MAX_EXACT} to {MAX_EXACT}")


def _is_scattered(schema: dict[str, Any]) -> bool:
    """Return whether several places describe one object, each of which may list a part of its properties."""
    parts = schema.get("allOf")
    places = len(parts) if isinstance(parts, list) else 0
    return places + sum(name in schema for name in _ELSEWHERE) + (not _OWN.isdisjoint(schema)) > 1


def _lists_all_properties(schema: dict[str, Any]) -> bool:
    known, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(known, dict) or not isinstance(required, list) or "patternProperties" in schema:
        return False
    return all(isinstance(name, str) and name in known for name in required)


def _rename_exclusive(schema: dict[str, Any], root: dict[str, Any], field: str) -> None:
    options = schema["oneOf"]
    known = [_resolved(one, root) for one in options] if isinstance(options, list) else []
    if "anyOf" in schema or not all(_exclude(*pair) for pair in combinations(known, 2)):
        got = "oneOf with alternatives that may match the same value"
        raise InvalidArgumentError(field, got, "anyOf, or alternatives with different types or constants")
    schema["anyOf"] = schema.pop("oneOf")


def _resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Return an alternative, or what its reference leads to; empty if that is not known."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if isinstance(reference, str):
        _, _, name = reference.rpartition("#/$defs/")
        definitions = root.get("$defs")
        schema = definitions.get(name) if isinstance(definitions, dict) else None
    return schema if isinstance(schema, dict) else {}


def _exclude(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether it is sure that no value matches both."""
    types, others = _types(one), _types(other)
    if types and others and not types & others:
        return True
    if {"object"} not in (types, others):
        return False
    return any(
        not values & other_values
        for name in (*_required(one), *_required(other))
        if (values := _texts(one, name)) and (other_values := _texts(other, name))
    )


def _types(schema: dict[str, Any]) -> set[str]:
    """Return the types of a schema with integers as numbers; empty if it names none."""
    types = schema.get("type", [])
    names = [types] if isinstance(types, str) else types if isinstance(types, list) else []
    return {"number" if name == "integer" else name for name in names if isinstance(name, str)}


def _required(schema: dict[str, Any]) -> list[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _texts(schema: dict[str, Any], name: str) -> set[str]:
    """Return the texts that a property has to be; empty if it may be another value."""
    properties = schema.get("properties")
    given = properties.get(name) if isinstance(properties, dict) else None
    if not isinstance(given, dict):
        return set()
    values = [given["const"]] if "const" in given else given.get("enum")
    is_texts = isinstance(values, list) and all(isinstance(value, str) for value in values)
    return set(values) if is_texts else set()  # type: ignore[arg-type]
