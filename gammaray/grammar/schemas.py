"""Prepares a JSON schema for llguidance, so that every text of its grammar matches the schema.

Keywords that restrict nothing are dropped, some others are rewritten as keywords that llguidance knows, and
what cannot be followed exactly is refused with its place in the schema.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Any, NamedTuple
from urllib.parse import unquote

from gammaray.errors import InvalidArgumentError

MAX_DEPTH = 100
"""Upper bound of the nesting of a JSON schema."""

MAX_CONSTANT = 2**53
"""Upper bound of the absolute value of numbers in `const` and `enum`."""

KEYS_KEYWORD = "x-unique-keys"
"""Keyword of schemas in grammars that asks to keep keys apart, see `gammaray.grammar.keys`. Its values:"""

FREE_KEYS = "free"
"""Whatever a key begins with, it can go on in endlessly many ways."""

BOUNDED_KEYS = "bounded"
"""An object may have all keys that are possible, or all that begin alike."""

_MAX_BOUND = 2**63 - 1024  # the largest number of 64 bits that a float has exactly
_MAX_LENGTH = 2**31 - 1  # longer than any completion
_MAX_COMPARISONS = 2000  # of alternatives of `oneOf` in one schema
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

# Keywords with one schema, with a list of schemas, and with schemas by name.
_ONE = (
    *("items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not", "if", "then"),
    *("else", "unevaluatedItems", "unevaluatedProperties"),
)
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "dependentSchemas")

_ANNOTATIONS = frozenset(
    [
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$id", "$schema", "$anchor", "$defs", "definitions", "contentEncoding"),
        *("contentMediaType", "contentSchema"),
    ]
)
# Keywords that describe an object here, and keywords whose schemas describe it elsewhere.
_OWN = frozenset(["properties", "patternProperties", "additionalProperties", "required"])
_ELSEWHERE = ("$ref", "anyOf", "oneOf", "not", "if")
_OWN_NAMES = _OWN | {"minProperties", "maxProperties"}
_IN_PLACE = ("$ref", "anyOf", "oneOf", "allOf")

# The kind of values that a keyword restricts, for those that llguidance refuses even beside another type.
_KINDS = {
    "array": ("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
    "object": (
        *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
        *("patternProperties", "minProperties", "maxProperties"),
    ),
}

# That of pydantic's decimals, without the look-ahead that llguidance does not know.
_PATTERNS = {r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$"}


class _Part(NamedTuple):
    """A schema, and where it is in the root."""

    schema: dict[str, Any]
    step: str = ""  # from the outer schema; without one, from the root
    outer: _Part | None = None

    @property
    def path(self) -> str:
        """Names and indices from the root, with a dot before each."""
        return (self.outer.path if self.outer is not None else "") + (f".{self.step}" if self.step else "")


def prepare(root: dict[str, Any], field: str) -> None:
    """Change a schema to one that llguidance follows exactly, which may have fewer texts.

    Raises:
        InvalidArgumentError: `field` has a keyword that cannot be followed, or is nested too deeply.
    """
    whole = _Root(root, field)
    for part in reversed(whole.parts([root])):
        _Simplifier(part, whole).simplify()
    parts = whole.parts([root])
    schemas = [part.schema for part in parts]
    is_scattered = any(map(_is_scattered, schemas))
    exclusive = {
        id(schema) for schema in schemas if "oneOf" in schema and whole.are_exclusive(schema["oneOf"])
    }
    if not is_scattered:
        options = [schema["oneOf"] for schema in schemas if "oneOf" in schema and id(schema) not in exclusive]
        _close(
            schemas, whole.parts([one for several in options if isinstance(several, list) for one in several])
        )
    for schema in schemas:
        if id(schema) in exclusive and "anyOf" not in schema:
            _rename(schema, "oneOf", "anyOf")
    is_bounded = any(map(_has_bounded_keys, schemas))
    for part in parts:
        _check_counts(part, field, is_scattered=is_scattered, is_bounded=is_bounded)
    if is_bounded or any(map(_has_free_keys, schemas)):
        root[KEYS_KEYWORD] = BOUNDED_KEYS if is_bounded else FREE_KEYS


class _Root:
    """A whole schema, within which references are resolved."""

    def __init__(self, root: dict[str, Any], field: str) -> None:
        self.field = field
        self._root = root
        self._targets: dict[str, Any] = {}
        self._num_comparisons = 0

    def parts(self, starts: Sequence[Any]) -> list[_Part]:
        """Return schemas and those that describe parts of their values, also by references."""
        found: dict[int, _Part] = {}
        rest = [[_Part(start) for start in starts if isinstance(start, dict)]]
        while rest:
            level, depth = rest.pop(), 0
            while level:
                if depth > MAX_DEPTH:
                    got = "a schema that is nested too deeply"
                    raise InvalidArgumentError(self.field, got, f"{MAX_DEPTH} levels")
                own = list({id(part.schema): part for part in level if id(part.schema) not in found}.values())
                found.update((id(part.schema), part) for part in own)
                for part in own:
                    target = self.target(part.schema)
                    if isinstance(target, dict) and id(target) not in found:
                        rest.append([_Part(target, part.schema["$ref"].lstrip("#/").replace("/", "."))])
                level, depth = [inner for part in own for inner in _inner(part)], depth + 1
        return list(found.values())

    def target(self, schema: dict[str, Any]) -> Any:
        """Return what the reference of a schema leads to; None if it has none to a place in the root."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return None
        if reference not in self._targets:
            self._targets[reference] = _found(self._root, unquote(reference[1:]).split("/")[1:])
        return self._targets[reference]

    def are_exclusive(self, options: Any) -> bool:
        """Return whether it is sure that no value matches two of the alternatives."""
        if not isinstance(options, list):
            return False
        return all(
            self._exclude(one, other, 4)
            for index, one in enumerate(options)
            for other in options[index + 1 :]
        )

    def _exclude(self, one: Any, other: Any, depth: int) -> bool:
        self._num_comparisons += 1
        if depth == 0 or self._num_comparisons > _MAX_COMPARISONS:
            return False
        for _ in range(4):
            one, other = (
                self.target(each) or each if isinstance(each, dict) else each for each in (one, other)
            )
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        types, others = _types(one), _types(other)
        if types and others and not types & others:
            return True
        values, other_values = _texts(one), _texts(other)
        if values is not None and other_values is not None and not values & other_values:
            return True
        known, other_known = one.get("properties"), other.get("properties")
        if (
            not isinstance(known, dict)
            or not isinstance(other_known, dict)
            or {"object"} not in (types, others)
        ):
            return False
        return any(
            self._exclude(known[name], other_known[name], depth - 1)
            for schema in (one, other)
            for name in _required(schema)
            if name in known and name in other_known
        )


def _inner(part: _Part) -> Iterator[_Part]:
    """Yield the schemas directly in a schema, without those that are true or false."""
    for name in _ONE:
        if isinstance(part.schema.get(name), dict):
            yield _Part(part.schema[name], name, part)
    for names, kind in ((_SEVERAL, list), (_NAMED, dict)):
        for name in names:
            schemas = part.schema.get(name)
            if isinstance(schemas, kind):
                pairs = schemas.items() if isinstance(schemas, dict) else enumerate(schemas)
                yield from (_Part(one, f"{name}.{key}", part) for key, one in pairs if isinstance(one, dict))


def _found(root: Any, steps: Sequence[str]) -> Any:
    """Return what the steps of a pointer lead to, None if there is no such place."""
    place = root
    for step in steps:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        elif isinstance(place, dict) and name in place:
            place = place[name]
        else:
            return None
    return place


class _Simplifier:
    """Drops and rewrites keywords of one schema, and refuses those that then cannot be followed."""

    def __init__(self, part: _Part, whole: _Root) -> None:
        self._part, self._whole, self._schema = part, whole, part.schema

    def simplify(self) -> None:
        schema = self._schema
        types = schema.get("type", [])
        for name in types if isinstance(types, list) else [types]:
            if name not in _TYPES:
                self._refuse("type", ", ".join(_TYPES))
        for kind, keywords in _KINDS.items():
            if not _admits(schema, kind):
                self._drop(*keywords)
        self._drop("$dynamicAnchor", "$recursiveAnchor", "contentSchema", KEYS_KEYWORD)
        if not isinstance(schema.get("items"), list):
            self._drop("additionalItems")
        self._lengths()
        self._bounds()
        self._constants()
        if "format" in schema and schema["format"] not in _FORMATS:
            del schema["format"]
        self._pattern()
        self._array()
        self._logic()
        self._dependencies()
        self._unevaluated("unevaluatedProperties", "additionalProperties")
        self._unevaluated("unevaluatedItems", "items")
        self._property_names()
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in schema:
                self._refuse(keyword, "references by $ref")

    def _pattern(self) -> None:
        pattern = self._schema.get("pattern")
        if not isinstance(pattern, str):
            return
        self._schema["pattern"] = pattern = _PATTERNS.get(pattern, pattern)
        marks = _marks(pattern)
        around = [sign for sign in ("(?=", "(?!", "(?<=", "(?<!") if sign in "".join(marks)]
        around += [mark for mark in marks if mark[:1] == "\\" and mark[1:] in "bB123456789"]
        if around:
            self._refuse("pattern", f"a regular expression without {around[0]}")

    def _lengths(self) -> None:
        for name in ("Length", "Items", "Properties"):
            for keyword in (f"min{name}", f"max{name}"):
                value = self._schema.get(keyword)
                if isinstance(value, float) and value.is_integer():
                    self._schema[keyword] = value = int(value)
                if keyword[:3] == "max" and isinstance(value, int):
                    self._schema[keyword] = min(value, _MAX_LENGTH)

    def _bounds(self) -> None:
        """Make bounds exact, as llguidance reads them as floats and counts in 64 bits."""
        for keyword, sign in (
            *(("minimum", -1), ("exclusiveMinimum", -1)),
            *(("maximum", 1), ("exclusiveMaximum", 1)),
        ):
            value = self._schema.get(keyword)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if sign * value < -_MAX_BOUND:
                self._refuse(keyword, f"an absolute value of at most {_MAX_BOUND}")
            if sign * value > _MAX_BOUND:
                self._schema[keyword] = sign * _MAX_BOUND
            elif isinstance(value, int) and int(float(value)) != value:
                nearest = float(value)
                is_outside = sign * int(nearest) > sign * value
                self._schema[keyword] = int(
                    math.nextafter(nearest, -sign * math.inf) if is_outside else nearest
                )

    def _constants(self) -> None:
        for keyword in ("const", "enum"):
            values = [self._schema.get(keyword)]
            while values:
                value = values.pop()
                if isinstance(value, (list, dict)):
                    values += value if isinstance(value, list) else value.values()
                elif isinstance(value, (int, float)) and abs(value) > MAX_CONSTANT:
                    # llguidance would round it.
                    raise self._error(keyword, f"the constant {value}", f"at most {MAX_CONSTANT}")

    def _array(self) -> None:
        schema = self._schema
        unique = schema.get("uniqueItems")
        if unique is False or (unique is True and schema.get("maxItems") in (0, 1)):
            self._drop("uniqueItems")
        elif unique is not None:
            self._refuse("uniqueItems", "false: items are not compared with each other")
        if "contains" in schema and schema.get("minContains", 1) == 0 and "maxContains" not in schema:
            self._drop("contains")
        if "contains" in schema:
            self._refuse("contains", "items, prefixItems, minItems and maxItems")
        self._drop("minContains", "maxContains")

    def _logic(self) -> None:
        schema = self._schema
        if schema.get("not") is False:
            self._drop("not")
        if "not" in schema:
            self._refuse("not", "keywords that say what is allowed")
        if "if" not in schema or all(_is_any(schema.get(name, True)) for name in ("then", "else")):
            self._drop("if", "then", "else")
        if "if" in schema:
            self._refuse("if", "anyOf")

    def _dependencies(self) -> None:
        required = self._schema.get("required")
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            found = self._schema.get(keyword)
            if isinstance(found, dict) and all(
                (isinstance(one, list) and all(name in (required or ()) for name in one)) or _is_any(one)
                for one in found.values()
            ):
                self._drop(keyword)
            if keyword in self._schema:
                self._refuse(keyword, "required or anyOf")

    def _unevaluated(self, keyword: str, here: str) -> None:
        """Rewrite a keyword about what no other keyword describes, if all of that is described here."""
        schema = self._schema
        if keyword not in schema:
            return
        if _is_any(schema[keyword]):
            self._drop(keyword)
        elif any(name in schema for name in _IN_PLACE):
            self._refuse(keyword, here)
        else:
            schema.setdefault(here, schema.pop(keyword))

    def _property_names(self) -> None:
        """Rewrite a restriction of names as properties or as a pattern of properties."""
        schema = self._schema
        if "propertyNames" not in schema:
            return
        names = schema["propertyNames"]
        target = self._whole.target(names) if isinstance(names, dict) else None
        if isinstance(target, dict) and _ANNOTATIONS.union(["$ref"]).issuperset(names):
            names = target
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        texts, pattern = _listed_names(names), _names_pattern(names)
        if _is_any(names, "string"):
            self._drop("propertyNames")
        elif texts is not None and isinstance(known, dict) and "patternProperties" not in schema:
            schema["properties"] = {name: one if name in texts else False for name, one in known.items()}
            if others is not False:
                schema["properties"].update((name, others) for name in texts if name not in known)
            self._finish_names()
        elif pattern is not None and not known and "patternProperties" not in schema:
            schema["patternProperties"] = {pattern: others}
            self._finish_names()
        else:
            allowed = (
                "an enum; or a pattern or lengths, in an object without properties and patternProperties"
            )
            self._refuse("propertyNames", allowed)

    def _finish_names(self) -> None:
        self._schema["additionalProperties"] = False
        self._drop("propertyNames")

    def _drop(self, *keywords: str) -> None:
        for keyword in keywords:
            self._schema.pop(keyword, None)

    def _refuse(self, keyword: str, allowed: str) -> None:
        raise self._error(keyword, f"{keyword} {json.dumps(self._schema[keyword])[:100]}", allowed)

    def _error(self, keyword: str, got: str, allowed: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self._whole.field}{self._part.path}.{keyword}", got, allowed)


def _admits(schema: dict[str, Any], kind: str) -> bool:
    """Return whether values of a kind are possible by the type of a schema."""
    types = schema.get("type", kind)
    return types == kind or (isinstance(types, list) and kind in types)


def _is_any(schema: Any, kind: str = "") -> bool:
    """Return whether a schema restricts nothing; with a kind, no value of that kind."""
    if not isinstance(schema, dict):
        return schema is True
    rest = {name: value for name, value in schema.items() if name not in _ANNOTATIONS}
    if kind and _admits(schema, kind):
        rest.pop("type", None)
    return all(
        name in ("minLength", "minItems", "minProperties") and value == 0 for name, value in rest.items()
    )


def _keywords(schema: Any) -> set[str]:
    return (
        set(schema) - _ANNOTATIONS - {"type"}
        if isinstance(schema, dict) and _admits(schema, "string")
        else set()
    )


def _listed_names(schema: Any) -> list[str] | None:
    """Return the names that the schema of names lists; None if it does not."""
    keywords = _keywords(schema)
    if keywords not in ({"const"}, {"enum"}):
        return None
    values = [schema["const"]] if "const" in schema else schema["enum"]
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else None


def _names_pattern(schema: Any) -> str | None:
    """Return the pattern that the schema of names has or means; None if there is none."""
    keywords = _keywords(schema)
    if keywords == {"pattern"} and isinstance(schema["pattern"], str):
        return schema["pattern"]
    if not keywords or not keywords <= {"minLength", "maxLength"}:
        return None
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    return f"^(?s:.{{{low},{high}}})$" if all(type(one) is int for one in (low, high or 0)) else None


# Objects without properties that a schema does not list


def _is_scattered(schema: dict[str, Any]) -> bool:
    """Return whether several places describe one object, each of which may list a part of its properties."""
    parts = schema.get("allOf")
    places = len(parts) if isinstance(parts, list) else 0
    return places + sum(name in schema for name in _ELSEWHERE) + (not _OWN.isdisjoint(schema)) > 1


def _close(schemas: Sequence[dict[str, Any]], kept: Sequence[_Part]) -> None:
    """Let objects that list properties have no other ones.

    Those in `kept` stay as they are: alternatives of `oneOf`, of which exactly one must match. A value that
    does not match a closed one may match it as it was, beside another one.
    """
    kept_ids = {id(part.schema) for part in kept}
    for schema in schemas:
        if id(schema) not in kept_ids and _lists_all_properties(schema):
            schema.setdefault("additionalProperties", False)


def _rename(schema: dict[str, Any], keyword: str, other: str) -> None:
    """Write a keyword as another one in its place, as the order of keywords is that of properties."""
    items = list(schema.items())
    schema.clear()
    schema.update((other if name == keyword else name, value) for name, value in items)


def _lists_all_properties(schema: dict[str, Any]) -> bool:
    known, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(known, dict) or not isinstance(required, list) or "patternProperties" in schema:
        return False
    return all(isinstance(name, str) and name in known for name in required)


def _required(schema: dict[str, Any]) -> list[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _types(schema: dict[str, Any]) -> set[str]:
    """Return the types of a schema with integers as numbers; empty if it names none."""
    types = schema.get("type", [])
    names = [types] if isinstance(types, str) else types if isinstance(types, list) else []
    return {"number" if name == "integer" else name for name in names if isinstance(name, str)}


def _texts(schema: dict[str, Any]) -> set[str] | None:
    """Return the texts that are the only values of a schema; None if others may be."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    is_texts = isinstance(values, list) and all(isinstance(value, str) for value in values)
    return set(values) if is_texts else None  # type: ignore[arg-type]


# Keys that a schema does not list


def _has_free_keys(schema: dict[str, Any]) -> bool:
    """Return whether a value may have keys that no schema lists, as far as this schema says."""
    if "const" in schema or "enum" in schema:
        return False
    schemas = [
        one for name in _NAMED[:2] if isinstance(schema.get(name), dict) for one in schema[name].values()
    ]
    schemas += [one for name in _SEVERAL if isinstance(schema.get(name), list) for one in schema[name]]
    if True in [one for one in schemas if isinstance(one, bool)]:
        return True
    if "type" not in schema and any(name in schema for name in _IN_PLACE) and _OWN_NAMES.isdisjoint(schema):
        return False
    if (_admits(schema, "array") and "items" not in schema) or schema.get("items") is True:
        prefix, most = schema.get("prefixItems"), schema.get("maxItems")
        if not isinstance(prefix, list) or not isinstance(most, int) or most > len(prefix):
            return True
    is_closed = schema.get("additionalProperties", True) is False and not schema.get("patternProperties")
    return _admits(schema, "object") and not is_closed


def _has_bounded_keys(schema: dict[str, Any]) -> bool:
    """Return whether all keys that go on in some way may be taken."""
    patterns = schema.get("patternProperties")
    if not isinstance(patterns, dict):
        return False
    is_closed = schema.get("additionalProperties", True) is False
    return any(one is False and not is_closed for one in patterns.values()) or not all(
        map(_is_endless, patterns)
    )


def _is_endless(pattern: str) -> bool:
    """Return whether it is sure that every match can be continued to endlessly many others."""
    marks = _marks(pattern)
    if "$" not in marks and "\\z" not in marks:
        return True
    last = marks[-3:-1] if marks[-2:-1] == ["?"] else marks[-2:-1]
    return marks.index("$" if "$" in marks else "\\z") == len(marks) - 1 and last[:1] in (["+"], ["*"])


def _marks(pattern: str) -> list[str]:
    """Return the characters of an expression: escapes as one, classes as [], an endless repetition as +."""
    found: list[str] = []
    at = 0
    while at < len(pattern):
        size = 2 if pattern[at] == "\\" else 1
        mark = pattern[at : at + size]
        if found[-1:] == ["["]:
            found[-1] = "[]" if mark == "]" else "["
        elif mark == "}" and found[-2:-1] and found[-1] == "," and "{" in found[-22:]:
            while found.pop() != "{":
                pass
            found.append("+")
        else:
            found.append(mark)
        at += size
    return found


def _check_counts(part: _Part, field: str, *, is_scattered: bool, is_bounded: bool) -> None:
    """Check bounds of the number of properties.

    llguidance counts properties that are not listed only. An object that may run out of keys must not need
    several of them.

    Args:
        is_scattered: Whether the properties of an object may be in several schemas.
        is_bounded: Whether one of them may run out of keys.
    """
    schema, place = part.schema, f"{field}{part.path}."
    low, high = schema.get("minProperties", 0), schema.get("maxProperties")
    known, required = schema.get("properties", {}), set(_required(schema))
    if not isinstance(low, int) or not isinstance(high, (int, NoneType)) or not isinstance(known, dict):
        return
    is_closed = schema.get("additionalProperties", True) is False and not schema.get("patternProperties")
    if is_closed and high is not None and high >= len(required.union(known)):
        schema.pop("maxProperties")
        high = None
    more, most = low - len(required), None if high is None else high - len(required)
    if more > 1 and is_bounded and (is_scattered or _has_bounded_keys(schema)):
        allowed = "at most 1 more than required has, with patternProperties that may have few names"
        raise InvalidArgumentError(f"{place}minProperties", f"minProperties {low}", allowed)
    if required.issuperset(known) or (more <= 0 and most is None):
        return
    if not (is_closed and more <= 1 and most in (None, 1)):
        keyword = "minProperties" if more > 0 else "maxProperties"
        allowed = "no such bound of an object that lists optional properties"
        raise InvalidArgumentError(f"{place}{keyword}", f"{keyword} {schema[keyword]}", allowed)
