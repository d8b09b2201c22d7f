"""Characters have the drafter or origin of the token that completed them, at any chunk boundaries."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray import DrafterKind, TokenOrigin
from gammaray.cli.render import OriginPainter, is_colored, paint, style_of
from tests.support.sdk_helpers import last, piece, token

ACCEPTED, CORRECTION, BONUS = TokenOrigin.ACCEPTED, TokenOrigin.CORRECTION, TokenOrigin.BONUS

DRAFTERS = [kind for kind in DrafterKind if kind is not DrafterKind.NONE]


def runs_of(*chunks):
    painter = OriginPainter()
    return [run for chunk in chunks for run in painter.runs(chunk)]


def test_painter_character_split_across_chunks_is_shown_once_and_whole():
    data = "🙂".encode()
    chunks = [piece("", token(data[:3], ACCEPTED)), last("🙂!", token(data[3:] + b"!", CORRECTION))]
    assert runs_of(*chunks) == [("🙂!", CORRECTION)]


def test_painter_text_that_was_held_back_keeps_the_origin_of_its_token():
    held = piece("a", token("a", BONUS), token("\n", ACCEPTED))
    assert runs_of(held, last("\nb", token("b", CORRECTION))) == [
        ("a", BONUS),
        ("\n", ACCEPTED),
        ("b", CORRECTION),
    ]


def test_painter_text_cut_before_a_stop_string_is_not_completed():
    assert runs_of(last("ab", token("abSTOP", ACCEPTED), token("more", BONUS))) == [("ab", ACCEPTED)]


def test_painter_special_tokens_have_bytes_but_no_text():
    chunk = piece("ab", token("<s>", BONUS), token("ab", ACCEPTED))
    assert runs_of(chunk, last("", token("</s>", CORRECTION))) == [("ab", ACCEPTED)]


def test_painter_incomplete_character_at_the_end_is_the_replacement_character():
    chunk = last("a\ufffd", token("a", ACCEPTED), token("🙂".encode()[:2], CORRECTION))
    assert runs_of(chunk) == [("a", ACCEPTED), ("\ufffd", CORRECTION)]


def test_painter_shows_text_that_differs_from_the_bytes():
    chunk = last("Hello there", token("▁Hello", ACCEPTED), token("▁there", BONUS))
    assert "".join(text for text, _ in runs_of(chunk)) == "Hello there"


@given(
    text=st.text(max_size=30),
    cuts=st.lists(st.integers(0, 120), max_size=8),
    origins=st.lists(st.sampled_from(TokenOrigin), min_size=1, max_size=9),
    per_chunk=st.integers(1, 4),
)
def test_painter_any_cut_into_tokens_and_chunks_shows_the_text(text, cuts, origins, per_chunk):
    data = text.encode()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in pairwise(edges)]
    tokens = [token(part, origins[i % len(origins)]) for i, part in enumerate(pieces)]
    groups = [tokens[i : i + per_chunk] for i in range(0, len(tokens), per_chunk)]
    chunks, shown, sent = [], 0, b""
    for group in groups:
        sent += b"".join(item.token_bytes for item in group)
        complete = sent.decode(errors="ignore")
        chunks.append(piece(complete[shown:], *group))
        shown = len(complete)
    assert "".join(part for part, _ in runs_of(*chunks, last("", token("")))) == text


def test_painter_distinguishes_accepted_tokens_by_drafter():
    tokens = [token(kind.value, ACCEPTED, drafter=kind) for kind in DRAFTERS]
    chunk = piece("".join(kind.value for kind in DRAFTERS), *tokens)
    assert runs_of(chunk) == [(kind.value, kind) for kind in DRAFTERS]


def test_every_source_has_a_style_of_its_own():
    assert len({style_of(source) for source in [*DRAFTERS, *TokenOrigin]}) == len(DRAFTERS) + len(TokenOrigin)


@pytest.mark.parametrize(
    ("color", "no_color", "expected"),
    [(None, "", True), (None, "1", False), (True, "1", True), (False, "", False)],
)
def test_terminal_is_coloured_unless_no_color_is_set_or_an_option_decides(
    monkeypatch, color, no_color, expected
):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")  # pytest's standard output is no terminal
    monkeypatch.setenv("NO_COLOR", no_color)
    assert is_colored(color) is expected


def test_pipe_is_not_coloured(monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert not is_colored(None)


def test_paint_control_characters_become_visible():
    painted = paint("a\x1b[2Jb\tc\n", ACCEPTED)
    assert "\x1b[2J" not in painted
    assert "a\u241b[2Jb\tc\n" in painted
