"""Text of other programs, as it is shown."""

import json

import pytest

from gammaray.errors import escaped


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
