"""Token ids, addresses and texts: invalid ones are named, long ones cut, those of others shown as escapes."""

import json

import pytest
from google.rpc import status_pb2
from hypothesis import given
from hypothesis import strategies as st

from gammaray import GenerationRequest, InvalidArgumentError, SamplingParams
from gammaray.checks import MAX_TOKEN_IDS, check_token_ids, is_wildcard, join_address, split_address
from gammaray.errors import escaped, rendering
from gammaray.wire.rpc_errors import error_from_status


def test_token_ids_outside_the_vocabulary_name_the_first_wrong_one():
    for wrong in (10, -1, True, 2.0, "2"):
        with pytest.raises(InvalidArgumentError, match=rf"^prompt: got {wrong}, "):
            check_token_ids("prompt", (1, wrong, 11), 10)
    check_token_ids("prompt", range(10), 10)
    check_token_ids("prompt", (2**32 - 1,))  # without a vocabulary, ids fit the wire


def test_too_many_token_ids_are_rejected_before_they_are_read():
    with pytest.raises(InvalidArgumentError, match=f"{MAX_TOKEN_IDS + 1} token ids"):
        GenerationRequest((1,) * (MAX_TOKEN_IDS + 1)).validate()


def test_mask_longer_than_the_vocabulary_is_refused():
    SamplingParams(allowed_token_ids=tuple(range(10))).validate(10)
    with pytest.raises(InvalidArgumentError, match="allowed_token_ids: got 11 token ids"):
        SamplingParams(allowed_token_ids=(*range(10), 0)).validate(10)


def test_error_of_a_worker_keeps_its_field():
    error = InvalidArgumentError(
        "allowed_token_ids, min_tokens", "masks: all", "masks, that leave a token: any"
    )
    again = error_from_status(status_pb2.Status(code=3, message=str(error)))
    assert isinstance(again, InvalidArgumentError)
    assert (again.field, again.got, again.allowed) == (error.field, error.got, error.allowed)
    assert str(again) == str(error)


NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(NESTED)
def test_rendering_is_repr(value):
    assert rendering(value) == repr(value)


@pytest.mark.parametrize("value", [[0] * 10**6, {n: [n] for n in range(10**6)}, ("a" * 50,) * 10**6])
def test_rendering_of_a_long_value_is_its_beginning(value):
    shown, dots, rest = rendering(value).partition("... (over ")
    assert (shown, dots) == (repr(value)[:80], "... (over ")
    assert rest.endswith(" characters)")
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert rendering(deep).startswith("[" * 80 + "... (over ")


def test_address_is_split_as_it_was_joined():
    for host in ("127.0.0.1", "a.example.com", "::", "fd00::4"):
        assert split_address("listen", join_address(host, 50051)) == (host, 50051)
    assert join_address("[fd00::4]", 1) == join_address("fd00::4", 1) == "[fd00::4]:1"


def test_address_without_one_reading_is_refused():
    wrong = ("", "host", ":1", "host:", "host:-1", "host:65536", "[]:1", "fd00::4:5", "[host]:1", "[::1:1")
    for address in wrong:
        with pytest.raises(InvalidArgumentError) as caught:
            split_address("listen", address)
        assert (caught.value.field, caught.value.got) == ("listen", address)


def test_wildcards_of_both_families():
    assert all(map(is_wildcard, ("0.0.0.0", "::", "[::]", "[0:0:0:0:0:0:0:0]")))
    assert not any(map(is_wildcard, ("127.0.0.1", "[::1]", "localhost", "")))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("größer, 大きい, 🙂", "größer, 大きい, 🙂"),
        ("\x1b]0;title\x07", r"\u001b]0;title\u0007"),
        ("\x9b31m\x7f", r"\u009b31m\u007f"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("\u202eevil\u2066", r"\u202eevil\u2066"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\udb40\udc41"),
        ("\u2028", r"\u2028"),
    ],
)
def test_escaped_text_is_printable_and_keeps_the_meaning_of_json(text, shown):
    assert escaped(text) == shown
    assert escaped(escaped(text)) == shown
    assert json.loads(escaped(json.dumps(text, ensure_ascii=False))) == text
