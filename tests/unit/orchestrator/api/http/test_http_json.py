"""JSON within bounds: the values, errors and bytes of `json`, at a bounded cost."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from orchestrator.api.http.json_text import MAX_VALUES, decode, encode

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.lists(st.integers()),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=5),
    max_leaves=20,
)
TEXTS = st.tuples(VALUES, st.booleans(), st.sampled_from([None, 1])).map(
    lambda given: json.dumps(given[0], ensure_ascii=given[1], indent=given[2])
)


def outcome(read, text):
    try:
        return repr(read(text))
    except ValueError as error:
        return str(error)


def whole(text):
    decoded = decode(text)
    assert decoded.open_path is None
    return decoded.value


@given(TEXTS)
def test_values_are_those_of_json(text):
    assert outcome(whole, text) == outcome(json.loads, text)


@given(TEXTS, st.integers(0, 300))
def test_encoded_bytes_are_those_of_starlette(text, count):
    value = [json.loads(text)] * count
    try:
        expected = JSONResponse({"a": value, "b": {"c": value}}).body
    except ValueError:  # infinity
        with pytest.raises(ValueError, match="Out of range float"):
            encode({"a": value})
    else:
        assert encode({"a": value, "b": {"c": value}}) == expected


@given(TEXTS, st.data())
def test_errors_are_those_of_json(text, data):
    at = data.draw(st.integers(0, len(text)))
    put = data.draw(
        st.sampled_from(["", ",", "[", "]", "{", "}", '"', ":", "-", ".", "1", "e", " ", "\n", "\\"])
    )
    changed = text[:at] + put + text[at + data.draw(st.integers(0, 1)) :]
    assert outcome(whole, changed) == outcome(json.loads, changed)


def test_long_lists_of_integers_are_those_of_json(subtests):
    for text in [
        "",
        "\ufeff{}",
        "[" + "1, " * 50_000 + "]",
        "[" + "1," * 40_000 + ",1]",
        "[" + "1," * 40_000 + "1 2]",
        "[" + "1," * 40_000 + "01]",
        "[1," + " " * 100_000 + "2]",
        "[" + "7," * 40_000 + '{"a": [1,\t2]}, -0, 1.5]',
        "[" + "7," * 40_000 + "\u0661]",
        '{"a": ' + "9" * 5000 + "}",
        "[1]\u00a0",
    ]:
        with subtests.test(str(text)[:80]):
            assert outcome(whole, text) == outcome(json.loads, text)


@pytest.mark.parametrize(
    ("text", "path", "num_items"),
    [
        ("[" + "{}," * MAX_VALUES, (MAX_VALUES - 1,), MAX_VALUES),
        ('{"a": {"b": [' + "[]," * MAX_VALUES, ("a", "b", MAX_VALUES - 3), 1),
        ('{"a": 1, "b": [0, [' + '"",' * MAX_VALUES, ("b", 1, MAX_VALUES - 4), 2),
    ],
    ids=["list", "nested", "later"],
)
def test_parsing_stops_at_the_bound(text, path, num_items):
    decoded = decode(text)  # nothing after the bound is looked at, not even whether it is JSON
    assert decoded.open_path == path
    assert len(decoded.value) == num_items


def test_body_at_the_bound_is_parsed_completely():
    text = "[" + "{}," * (MAX_VALUES - 2) + "{}]"
    assert decode(text).open_path is None


def test_integers_in_lists_are_not_counted():
    assert whole("[" + "5," * (2 * MAX_VALUES) + "5]") == [5] * (2 * MAX_VALUES + 1)


def test_endless_nesting_is_an_error():
    with pytest.raises(RecursionError):
        decode("[" * 100_000)
