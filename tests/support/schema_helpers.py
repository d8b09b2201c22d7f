"""Hypothesis strategies of JSON schemas that llguidance supports, and of values that match them.

hypothesis-jsonschema 0.23 cannot make objects with the present Hypothesis.
"""

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

_CHARACTERS = st.characters(exclude_categories=["Cs"])
TEXTS = st.text(_CHARACTERS, max_size=12)
"""Texts of any characters."""

# Some need escapes, or are keywords of JSON Schema.
_NAMES = st.sampled_from(["a", "b", 'q"', "é", "\\", "<[", "/", "type", "format", "properties", "allOf"])
_PATTERNS = ("^[a-c]+$", "^<[0-9]>/?$", "^[0-9]{2}/[0-9]{2}$", "^(é|\n)$", "x[^<]y")
_CONSTANTS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXTS

_SCALARS = st.one_of(
    st.sampled_from([{"type": kind} for kind in ("null", "boolean", "integer", "number", "string")]),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        *(st.integers(-1000, 1000), st.integers(0, 1000)),
    ),
    st.builds(
        lambda low, size: {"type": "string", "minLength": low, "maxLength": low + size},
        *(st.integers(0, 3), st.integers(0, 5)),
    ),
    st.sampled_from([{"type": "string", "pattern": pattern} for pattern in _PATTERNS]),
    _CONSTANTS.map(lambda value: {"const": value}),
    st.lists(_CONSTANTS, min_size=1, max_size=3).map(lambda values: {"enum": values}),
)


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy) -> dict[str, Any]:
    properties = draw(st.dictionaries(_NAMES, inner, max_size=3))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    schema = {"type": "object", "properties": properties, "required": required}
    more = draw(st.sampled_from([None, False, {"type": "integer"}]))
    return schema if more is None else {**schema, "additionalProperties": more}


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy) -> dict[str, Any]:
    low, size = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    return {"type": "array", "items": draw(inner), "minItems": low, "maxItems": low + size}


SCHEMAS: st.SearchStrategy[dict[str, Any]] = st.recursive(
    _SCALARS,
    lambda inner: (
        _objects(inner)
        | _arrays(inner)
        | st.lists(inner, min_size=1, max_size=3).map(lambda schemas: {"anyOf": schemas})
    ),
    max_leaves=6,
)
"""Schemas of a part of JSON Schema that llguidance supports as a whole."""


def nested(depth: int, **keywords: Any) -> dict[str, Any]:
    """Return the schema of a text in so many arrays, each of which has the keywords."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, **keywords}
    return schema


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return what a schema of SCHEMAS means here: its objects have no properties that it does not list."""
    if "anyOf" in schema:
        return {"anyOf": [closed(one) for one in schema["anyOf"]]}
    if "items" in schema:
        return {**schema, "items": closed(schema["items"])}
    if "properties" in schema:
        properties = {name: closed(one) for name, one in schema["properties"].items()}
        return {"additionalProperties": False, **schema, "properties": properties}
    return schema


@st.composite
def with_values(draw: st.DrawFn) -> tuple[dict[str, Any], Any]:
    """Draw a schema and a value that matches it, with its properties in the schema's order."""
    schema = draw(SCHEMAS)
    return schema, draw(_values(schema))


def _values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "anyOf" in schema:
        return st.sampled_from(schema["anyOf"]).flatmap(_values)
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    low = next((schema[key] for key in ("minimum", "minLength", "minItems") if key in schema), None)
    high = next((schema[key] for key in ("maximum", "maxLength", "maxItems") if key in schema), None)
    if schema["type"] == "array":
        return st.lists(_values(schema["items"]), min_size=low, max_size=high)
    if schema["type"] == "object":
        return _objects_of(schema)
    if "pattern" in schema:
        return st.from_regex(schema["pattern"].replace("$", r"\Z"))
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "null": st.none(),
        "boolean": st.booleans(),
        "integer": st.integers(low, high),
        "number": st.integers() | st.floats(allow_nan=False, allow_infinity=False),
        "string": st.text(_CHARACTERS, min_size=low or 0, max_size=12 if high is None else high),
    }
    return kinds[schema["type"]]


@st.composite
def _objects_of(draw: st.DrawFn, schema: dict[str, Any]) -> dict[str, Any]:
    more = schema.get("additionalProperties", False)
    known = {
        name: draw(_values(one))
        for name, one in schema["properties"].items()
        if name in schema["required"] or draw(st.booleans())
    }
    others = draw(st.dictionaries(TEXTS.map("+".__add__), _values(more), max_size=2)) if more else {}
    return known | others


def variations(value: Any) -> Iterator[Any]:
    """Yield values that differ from a JSON value, most of them in one place."""
    yield from (None, True, 7, 0.5, "x", [], {}, [value], {"a": value})
    if isinstance(value, dict):
        for name, one in value.items():
            yield {key: other for key, other in value.items() if key != name}
            yield from ({**value, name: other} for other in variations(one))
        yield {**value, "unlisted": "zz"}
    elif isinstance(value, list):
        yield from (value[1:], [*value, *value], [*value, {"unlisted": []}])
        for index, one in enumerate(value):
            yield from ([*value[:index], other, *value[index + 1 :]] for other in variations(one))
    elif isinstance(value, str):
        yield from (f"{value}?", value[1:], f"{value}{value}")
    elif isinstance(value, int):
        yield from (value + 1, value - 1, value * 1000)


# Schemas and walks that look for texts which do not match

_HARD_NAMES = st.sampled_from(["a", "b", "ab", "", '"', "\\", "\n", "\x01", "\x7f", "é", "😀", "u0061"])
_KEY_PATTERNS = st.sampled_from(
    [
        *("^a", "^[ab]{1,2}$", "b$", "^(a|bb*)$", "^b+$", "^[^a]$"),
        *("^é?$", "^\\\\$", "^(ab|a|)$", "^\\w$", "^..", "\n"),
    ]
)
_STEPS = (1, 2, 3, 7, 0.5, 0.1, 0.25, 1.5, 0.01)
_BOUNDS = st.integers(-12, 12) | st.sampled_from(
    [0.5, -0.5, 1.25, -0.1, 99.9, 2**53 + 1, -(2**53) - 1, 2**63 - 1]
)


def _some(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw a few keywords."""
    return st.fixed_dictionaries({}, optional=keywords)


_NUMBERS = st.builds(
    lambda kind, more: {"type": kind, **more},
    st.sampled_from(["integer", "number"]),
    _some(
        minimum=_BOUNDS,
        maximum=_BOUNDS,
        exclusiveMinimum=_BOUNDS,
        exclusiveMaximum=_BOUNDS,
        multipleOf=st.sampled_from(_STEPS),
    ),
)
_STRINGS = _some(
    minLength=st.integers(0, 3),
    maxLength=st.integers(0, 4),
    pattern=_KEY_PATTERNS,
    format=st.sampled_from(["date", "uuid", "unknown"]),
).map(lambda more: {"type": "string", **more})
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0, -0.0]) | _HARD_NAMES,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_HARD_NAMES, inner, max_size=2),
    max_leaves=3,
)
_HARD_LEAVES = st.one_of(
    _NUMBERS,
    _STRINGS,
    _VALUES.map(lambda value: {"const": value}),
    st.lists(_VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    st.sampled_from(
        [True, False, {}, {"type": "boolean"}, {"type": ["null", "integer"]}, {"$ref": "#/$defs/a"}]
    ),
)


def _hard(inner: st.SearchStrategy) -> st.SearchStrategy[Any]:
    objects = _some(
        type=st.just("object"),
        properties=st.dictionaries(_HARD_NAMES, inner, max_size=3),
        patternProperties=st.dictionaries(_KEY_PATTERNS, inner, max_size=2),
        additionalProperties=st.just(False) | inner,
        required=st.lists(_HARD_NAMES, max_size=2, unique=True),
        minProperties=st.integers(0, 3),
        maxProperties=st.integers(0, 4),
        propertyNames=_STRINGS
        | st.lists(_HARD_NAMES, min_size=1, max_size=3).map(lambda names: {"enum": names}),
        unevaluatedProperties=st.booleans(),
    )
    arrays = _some(
        type=st.just("array"),
        items=inner,
        prefixItems=st.lists(inner, max_size=2),
        additionalItems=st.booleans(),
        minItems=st.integers(0, 2),
        maxItems=st.integers(0, 3),
        uniqueItems=st.just(False),
        unevaluatedItems=st.booleans(),
        minContains=st.just(1),
    )
    options = st.lists(inner, min_size=1, max_size=3)
    logic = _some(anyOf=options, oneOf=options, allOf=options)
    mixed = st.builds(lambda *parts: {**parts[0], **parts[1], **parts[2]}, objects, arrays, logic)
    return objects | objects | arrays | logic | mixed


HARD_SCHEMAS: st.SearchStrategy[dict[str, Any]] = st.builds(
    lambda schema, other: {
        **(schema if isinstance(schema, dict) else {"anyOf": [schema]}),
        "$defs": {"a": other},
    },
    st.recursive(_HARD_LEAVES, _hard, max_leaves=6),
    st.recursive(_HARD_LEAVES, _hard, max_leaves=2),
)
"""Schemas with many keywords together, with names and numbers that are hard to compare; some are refused."""
