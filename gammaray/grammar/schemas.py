"""Prepares a JSON schema for llguidance, which refuses keywords that it does not know.

Keywords that restrict nothing are dropped, and objects that list their properties are closed. `oneOf` becomes
`anyOf` where its alternatives exclude each other, as those with a discriminator do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any
from urllib.parse import unquote

from gammaray.errors import InvalidArgumentError

MAX_DEPTH = 100
"""Upper bound of the nesting of a JSON schema."""

MAX_EXACT = 2**53
"""llguidance reads larger numbers as floats. Looser bounds are tightened to this, other numbers refused."""

MAX_DISCRIMINATORS = 8
"""Required properties of an alternative of `oneOf` that may tell it from the others."""

_WORD = re.compile(r"[$\w]+")
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

_KINDS: dict[type, str] = {str: "string", bool: "boolean", NoneType: "null"}

# Keywords that describe an object here, and keywords whose schemas describe it elsewhere.
_OWN = frozenset(["properties", "patternProperties", "additionalProperties", "required"])
_ELSEWHERE = ("$ref", "anyOf", "oneOf")

# That of pydantic's decimals, without the look-ahead that llguidance does not know.
_PATTERNS = {r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$"}


def prepare(root: dict[str, Any], field: str) -> None:
    """Change a schema to one that llguidance follows, which may have fewer texts.

    InvalidArgumentError if `field` is nested too deeply, has a number that is too large, a `minProperties`
    that repeated keys would count for, or a `oneOf` whose alternatives may match the same value.
    """
    schemas = list(_schemas(root, field))
    is_scattered = any(_is_scattered(schema) for _, schema in schemas)
    for place, schema in schemas:
        _simplify(schema, place)
    if options := [(place, schema) for place, schema in schemas if "oneOf" in schema]:
        # A schema with an id resolves references in it from there.
        definitions = {} if any("$id" in schema for _, schema in schemas[1:]) else _definitions(root)
        for place, schema in options:
            _rename_exclusive(schema, definitions, place)
    if not is_scattered:
        for _, schema in schemas:
            if _lists_all_properties(schema):
                schema.setdefault("additionalProperties", False)


def place_of(root: Mapping[str, Any], field: str, reason: str) -> str | None:
    """Return the place in a schema that llguidance refuses for a reason; None if it cannot be told."""
    for place, schema in _schemas(dict(root), field):
        for keyword, value in schema.items():
            if _is_meant(reason, keyword, value):
                return f"{place}.{keyword}"
    return None


def _is_meant(reason: str, keyword: str, value: Any) -> bool:
    """Return whether a reason is about this value of a keyword.

    Reasons name unknown keywords, or a wrong value, or a keyword and its type, or what an expression has.
    """
    if "Unimplemented keys" in reason:
        return f'"{keyword}"' in reason
    if reason.startswith(f"{keyword} must be"):
        return not isinstance(value, (str, list, dict))
    if keyword == "pattern" and reason.startswith(("look-around", "un", "repetition", "invalid", "empty")):
        return isinstance(value, str) and _is_odd(value)
    return (keyword in _WORD.findall(reason) or keyword == "$ref") and str(value).lstrip("#") in reason


def _is_odd(pattern: str) -> bool:
    """Return whether Rust's regular expressions, which llguidance uses, refuse one or find it too large."""
    from pydantic_core import SchemaError, SchemaValidator, core_schema  # rarely needed

    try:
        SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError:
        return True
    return False


def _schemas(root: dict[str, Any], field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a schema, those in it, and those that they refer to, each after its place below `field`."""
    starts, seen = [(field, root)], set[int]()
    while starts:
        level = [starts.pop()]
        for _ in range(MAX_DEPTH + 1):
            level = [entry for entry in level if id(entry[1]) not in seen]
            seen.update(id(schema) for _, schema in level)
            yield from level
            starts += [target for _, schema in level if (target := _target(schema, root, field)) is not None]
            level = [inner for entry in level for inner in _inner(*entry)]
        if level:
            raise InvalidArgumentError(field, "a schema that is nested too deeply", f"{MAX_DEPTH} levels")


def _target(schema: dict[str, Any], root: dict[str, Any], field: str) -> tuple[str, dict[str, Any]] | None:
    """Return the schema that the reference of a schema leads to, after its place; None if there is none."""
    reference = schema.get("$ref")
    place: Any = root
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    steps = [step.replace("~1", "/").replace("~0", "~") for step in unquote(reference[2:]).split("/")]
    for name in steps:
        if isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        else:
            place = place.get(name) if isinstance(place, dict) else None
    return (".".join([field, *steps]), place) if isinstance(place, dict) else None


def _inner(place: str, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas directly in a schema, after their places, without those that are true or false."""
    values: list[tuple[str, Any]] = [(f"{place}.{name}", schema.get(name)) for name in _ONE]
    for name in _SEVERAL:
        if isinstance(several := schema.get(name), list):
            values += ((f"{place}.{name}.{number}", value) for number, value in enumerate(several))
    for name in _NAMED:
        if isinstance(named := schema.get(name), dict):
            values += ((f"{place}.{name}.{key}", value) for key, value in named.items())
    return ((place, value) for place, value in values if isinstance(value, dict))


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
    low = schema.get("minProperties", 0)
    if isinstance(low, int) and low > len(_required(schema)) + 1:
        allowed = "at most 1 more than required has, as a key may come twice"
        raise InvalidArgumentError(field, f"minProperties {low}", allowed)
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


def _rename_exclusive(schema: dict[str, Any], definitions: dict[str, Any], field: str) -> None:
    options = schema["oneOf"]
    if isinstance(options, list) and "anyOf" not in schema:
        known = [definitions.get(one["$ref"], {}) if _is_reference(one) else one for one in options]
        if _are_exclusive([one if isinstance(one, dict) else {} for one in known]):
            schema["anyOf"] = schema.pop("oneOf")
            return
    got = "oneOf with alternatives that may match the same value"
    raise InvalidArgumentError(field, got, "anyOf, or alternatives with different types or constants")


def _is_reference(schema: Any) -> bool:
    return isinstance(schema, dict) and isinstance(schema.get("$ref"), str)


def _definitions(root: dict[str, Any]) -> dict[str, Any]:
    """Return the definitions of a schema by the references that lead to them."""
    return {
        f"#/{place}/{name}": one
        for place in ("$defs", "definitions")
        for name, one in (root[place].items() if isinstance(root.get(place), dict) else ())
        if not {"~", "%", "/"} & set(name)
    }


def _are_exclusive(options: Sequence[dict[str, Any]]) -> bool:
    """Return whether it is sure that no value matches two alternatives, in a time linear in their size."""
    if _are_apart(map(_constants, options)):
        return True
    objects = [one for one in options if _types(one) == {"object"}]
    others = [_types(one) for one in options if _types(one) != {"object"}]
    if not _are_apart([*others, {"object"}] if objects else others):
        return False
    names = _required(objects[0])[:MAX_DISCRIMINATORS] if objects else []
    return len(objects) < 2 or any(_are_apart(_given(one, name) for one in objects) for name in names)


def _are_apart(sets: Iterable[set[Any]]) -> bool:
    """Return whether no set is empty, and no two have a common element."""
    listed = list(sets)
    return all(listed) and sum(map(len, listed)) == len(set[Any]().union(*listed))


def _types(schema: dict[str, Any]) -> set[str]:
    """Return the types of a schema's values with integers as numbers; empty if they are not known."""
    types = schema.get("type", [])
    names = [types] if isinstance(types, str) else types if isinstance(types, list) else []
    found = {"number" if name == "integer" else name for name in names if isinstance(name, str)}
    return found or {kind for kind, _ in _constants(schema)}


def _required(schema: dict[str, Any]) -> list[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _given(schema: dict[str, Any], name: str) -> set[tuple[str, Any]]:
    """Return the values of which a property has to have one; empty if it may have others, or be absent."""
    properties = schema.get("properties")
    value = properties.get(name) if isinstance(properties, dict) and name in _required(schema) else None
    return _constants(value) if isinstance(value, dict) else set()


def _constants(schema: dict[str, Any]) -> set[tuple[str, Any]]:
    """Return the values that a schema lists, with their types; empty if others match, or numbers do."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(type(one) in _KINDS for one in values):
        return set()
    return {(_KINDS[type(one)], one) for one in values}
