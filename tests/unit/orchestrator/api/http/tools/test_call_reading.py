"""Calls read from chunks: with markers that are special tokens, and after a resumption."""

import functools
import random

import pytest

from gammaray.types import Chunk, EmittedToken, FinishReason, TokenOrigin
from orchestrator.api.http.tools.calls import CallPlan, ToolChoice
from orchestrator.api.http.tools.formats import CallFormat
from orchestrator.api.http.tools.reading import CallReader
from tests.support.tool_helpers import MISTRAL_CHAT, PLAIN_CHAT, TOOLS, assembled

SPECIAL = 0
CALLS = '[{"name": "get_weather", "arguments": {"city": "Zürich 😀"}}, {"name": "now", "arguments": {}}]'
FOUND = [("get_weather", '{"city": "Zürich 😀"}'), ("now", "{}")]


class Pieces:
    """A tokenizer with a token for each piece of text that was asked for."""

    has_exact_bytes = True

    def __init__(self):
        self._pieces = [b""]

    def token(self, piece):
        self._pieces.append(piece)
        return EmittedToken(len(self._pieces) - 1, TokenOrigin.BONUS, piece)

    def token_bytes(self, token_id):
        return self._pieces[token_id]

    def is_special(self, token_id):
        return token_id == SPECIAL


TOKENIZER = Pieces()


def plan_of(chat):
    return CallPlan(tuple(TOOLS), ToolChoice("auto"), True, CallFormat.of(chat))


def tokens_of(*parts, size=3):
    """Return tokens of bytes: of texts a few each, of markers, given as bytes, one that is special."""
    found = []
    for part in parts:
        if isinstance(part, bytes):
            found.append(EmittedToken(SPECIAL, TokenOrigin.BONUS, part))
            continue
        data = part.encode()
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        found += map(TOKENIZER.token, pieces)
    return found


def shown(tokens):
    """Return the text that tokens complete, as the detokeniser does."""
    data = b"".join(token.token_bytes for token in tokens if token.token_id != SPECIAL)
    return data.decode("utf-8", "ignore")


def chunks_of(tokens, sizes, delay=0):
    """Yield chunks of so many tokens; their text comes `delay` characters late, as before a stop string."""
    sent = start = 0
    while start < len(tokens):
        end = min(len(tokens), start + sizes())
        text = shown(tokens[:end])
        until = len(text) if end == len(tokens) else max(sent, len(text) - delay)
        reason = FinishReason.STOP if end == len(tokens) else None
        yield Chunk("s", text[sent:until], tuple(tokens[start:end]), 7, reason, offset=start)
        sent, start = until, end


def reader_of(plan, stop=()):
    return CallReader(plan, TOKENIZER, stop)


def calls_of(events):
    text, calls = assembled(events)
    assert all(is_whole for *_, is_whole in calls)
    return text, [(name, arguments) for _, name, arguments, _ in calls]


@pytest.mark.parametrize("delay", [0, 1, 4])
def test_special_markers_reach_the_parser_at_their_place(delay):
    for seed in range(20):
        choice = random.Random(seed).choice
        tokens = tokens_of("Ünd 😀 so ", b"[TOOL_CALLS]", CALLS, b"<|end|>", size=choice((1, 2, 3, 7)))
        reader = reader_of(plan_of(MISTRAL_CHAT))
        chunks = chunks_of(tokens, functools.partial(choice, (1, 2, 9, 60)), delay)
        events = [event for chunk in chunks for event in reader.read(chunk)]
        assert calls_of(events) == ("Ünd 😀 so", FOUND), seed
        assert reader.has_whole_calls


def test_special_marker_at_the_end_and_other_special_tokens_are_no_text():
    tokens = tokens_of("a", b"<|other|>", "b", b"[TOOL_CALLS]")
    (chunk,) = chunks_of(tokens, lambda: 9)
    assert assembled(reader_of(plan_of(MISTRAL_CHAT)).read(chunk)) == ("ab", [])


@pytest.mark.parametrize("stop", [(), ("😀!", "u}"), ('"}', "never")])
@pytest.mark.parametrize("chat", [MISTRAL_CHAT, PLAIN_CHAT], ids=["mistral", "plain"])
def test_resumed_completion_goes_on_where_the_client_is(chat, stop):
    text = [f"<tool_call>{one}</tool_call>" for one in ('{"name": "now", "arguments": {"a": "ü"}}',) * 2]
    parts = ("Hm 😀", b"[TOOL_CALLS]", CALLS) if chat is MISTRAL_CHAT else ("Hm 😀", *text)
    tokens = tokens_of(*parts, size=2)

    def held(known):
        longest = [n for s in stop for n in range(len(s)) if shown(known).endswith(s[:n])]
        return max(longest, default=0)

    # A stop string that the text has would end it; those that only begin hold text back.
    stop = tuple(one for one in stop if one not in shown(tokens))
    for start in range(1, len(tokens)):
        whole = reader_of(plan_of(chat), stop)
        cut = len(shown(tokens[:start])) - held(tokens[:start])
        head = Chunk("s", shown(tokens[:start])[:cut], tuple(tokens[:start]), 7, None)
        tail = Chunk("s", shown(tokens)[cut:], tuple(tokens[start:]), 7, FinishReason.STOP, offset=start)
        whole.read(head)
        expected = whole.read(tail)
        resumed = reader_of(plan_of(chat), stop)
        for at in range(0, start, 5):
            resumed.recall(tokens[at : min(at + 5, start)])
        assert resumed.read(tail) == expected, start


def test_ids_are_those_of_the_session_and_its_seed():
    def ids(session_id, seed):
        reader = reader_of(plan_of(PLAIN_CHAT))
        text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>' * 2
        events = reader.read(Chunk(session_id, text, (), seed, FinishReason.STOP))
        return [found for found, *_ in assembled(events)[1]]

    assert ids("s", 1) == ids("s", 1)
    assert len({*ids("s", 1), *ids("t", 1), *ids("s", 2)}) == 6
