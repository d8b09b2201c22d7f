"""JSON within bounds: the values of `json` and the bytes of Starlette, at a bounded cost."""

import json
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from gammaray.checks import MAX_TOKEN_IDS
from gammaray.errors import InvalidArgumentError
from orchestrator.api.http import json_text
from orchestrator.api.http.json_text import MAX_DIGITS, MAX_ENTRIES, MAX_VALUES, SMALL_BYTES, decode, encode

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(['"', "\\", '\\"', '[{,"'])
    | st.lists(st.integers()),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=5),
    max_leaves=20,
)
TEXTS = st.tuples(VALUES, st.booleans(), st.sampled_from([None, 1])).map(
    lambda given: json.dumps(given[0], ensure_ascii=given[1], indent=given[2])
)


@given(TEXTS)
def test_values_are_those_of_json(text):
    assert repr(decode(text.encode())) == repr(json.loads(text))


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


def counted(value):
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(counted, value.values()))
    return 1 + sum(map(counted, value)) if isinstance(value, list) else isinstance(value, str)


@given(TEXTS, st.integers(1, 9))
def test_values_are_counted_whatever_the_slices(text, size):
    count = counted(json.loads(text))
    with patch.multiple(json_text, SMALL_BYTES=0, SLICE_BYTES=size, MAX_VALUES=count):
        decode(text.encode())
    if count:
        with patch.multiple(json_text, SMALL_BYTES=0, SLICE_BYTES=size, MAX_VALUES=count - 1):
            with pytest.raises(InvalidArgumentError, match="JSON values"):
                decode(text.encode())


def listed(item, count):
    return b"[" + b",".join([item] * count) + b"]"


@pytest.mark.parametrize(
    "body",
    [
        listed(b"{}", MAX_VALUES - 1),
        listed(b"5", MAX_TOKEN_IDS),
        listed(b"9" * (MAX_DIGITS - 1), 100),
        json.dumps({"prompt": '[{,"' * (MAX_TOKEN_IDS // 4)}).encode(),
        json.dumps({"prompt": "0" * MAX_TOKEN_IDS}).encode(),
    ],
    ids=["objects", "integers", "digits", "a prompt of brackets", "a prompt of zeros"],
)
def test_body_within_the_bounds_is_decoded(body):
    assert len(body) > SMALL_BYTES
    assert decode(body) == json.loads(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (listed(b"{}", MAX_VALUES), f"more than {MAX_VALUES} JSON values"),
        (listed(b"5", MAX_ENTRIES + 2), f"more than {MAX_ENTRIES} entries"),
        (listed(b"9" * MAX_DIGITS, 100), f"{MAX_DIGITS} digits"),
        (b"[" * 100_000, "recursion limit"),
        (b"[" * 1000, "recursion limit"),
        (b"9" * 5000, "out of range"),
        (b'"\\ud800 "', "malformed JSON"),
        (b'"\xff"', "malformed JSON"),
        (b"\xef\xbb\xbf{}", "malformed JSON"),
        (b"", "malformed JSON"),
    ],
    ids=lambda value: repr(value[:16]) if isinstance(value, bytes) else "",
)
def test_body_beyond_the_bounds_is_refused(body, message):
    with pytest.raises(InvalidArgumentError, match=message):
        decode(body)


def test_last_value_of_a_key_counts():
    assert decode(b'{"a": 1, "b": {"c": 1, "c": 2}, "a": 3}') == {"a": 3, "b": {"c": 2}}
