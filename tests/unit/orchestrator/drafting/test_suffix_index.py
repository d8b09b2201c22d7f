"""The suffix index against a search by brute force, however its text was added, dropped and erased."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.drafting.suffix_decoding import SuffixDrafter
from orchestrator.drafting.suffix_index import (
    LENGTH_FACTOR,
    LEVELS,
    LONGEST,
    MAX_OCCURRENCES,
    MIN_PROBABILITY,
    SEPARATOR,
    Context,
    SuffixIndex,
)
from tests.support.cycle_helpers import make_session

BLOCK = 1024


def matched(text, end, context):
    """Return how many of the latest tokens of `context` stand before position `end` of `text`."""
    length = 0
    while length < min(end, len(context), LONGEST) and text[end - length - 1] == context[-length - 1]:
        length += 1
    return length


def slow_look_up(text, context, depth):
    """Return (tokens, probabilities, length), all found by looking everywhere; None without a match."""
    lengths = {end: matched(text, end, context) for end in range(len(text) - 1, 0, -1)}
    level = max((level for level in LEVELS if any(n >= level for n in lengths.values())), default=0)
    if not level:
        return None
    latest = [end for end, length in lengths.items() if length >= level][:MAX_OCCURRENCES]
    longest = max(lengths[end] for end in latest)
    ends, chain, shares, path = [end for end in latest if lengths[end] == longest], [], [], 1.0
    while len(chain) < min(depth, LENGTH_FACTOR * longest):
        known = [*text, *chain]
        following = [known[end + len(chain)] for end in ends]
        proposable = [token for token in following if token != SEPARATOR]
        if not proposable:
            break
        best = max(dict.fromkeys(proposable), key=proposable.count)
        path *= proposable.count(best) / len(ends)
        if path < MIN_PROBABILITY:
            break
        shares.append(proposable.count(best) / len(ends))
        ends = [end for end, token in zip(ends, following, strict=True) if token == best]
        chain.append(best)
    return (tuple(chain), tuple(shares), longest) if chain else None


def found_in(index, context, depth):
    match = index.look_up(context, depth)
    return match and (match.token_ids, match.probabilities, match.length)


def index_of(text):
    index = SuffixIndex(BLOCK)
    index.extend(text)
    return index


def test_index_keeps_to_the_shortest_match():
    index = index_of([5, 1, 9, 8, 1])
    assert index.look_up(index.context, 64, 2) is None


def test_index_proposes_nothing_improbable():
    """Eleven continuations of one bigram: each has less than a tenth of the counts."""
    text = [token for other in range(11) for token in (1, 2, 50 + other, 90 + other)]
    index = index_of([*text, 1, 2])
    assert index.look_up(index.context, 4) is None


@given(
    st.lists(st.integers(0, 2) | st.just(SEPARATOR), max_size=120),
    st.lists(st.integers(0, 2), max_size=80),
    st.integers(0, 70),
)
def test_index_agrees_with_brute_force_on_other_text(text, context, depth):
    text = [*text, SEPARATOR]  # without it a chain may continue with its own tokens
    assert found_in(index_of(text), Context.of(context), depth) == slow_look_up(text, context, depth)


@given(st.lists(st.integers(0, 3), max_size=200), st.integers(0, 12), st.randoms(use_true_random=False))
def test_index_agrees_with_brute_force_as_it_grows(tokens, depth, chance):
    index, end, drafter, session = SuffixIndex(), 0, SuffixDrafter(), make_session()
    while end < len(tokens):
        size = chance.choice((1, 2, 5, 60, 90))
        index.extend(tokens[end : end + size])
        end = min(len(tokens), end + size)
        assert found_in(index, index.context, depth) == slow_look_up(tokens[:end], tokens[:end], depth)
        session.token_ids = tokens[:end]
        assert drafter.look_up(session, depth) == index.look_up(index.context, depth)


@pytest.mark.parametrize("sizes", [[1], [5000], [47, 48, 49, 1], [1023, 1, 1024, 1025]])
def test_index_of_several_blocks_agrees_with_brute_force(sizes):
    chance = random.Random(5)
    text = [chance.randrange(40) for _ in range(2 * BLOCK)]
    text += text[100:400] + [chance.randrange(40) for _ in range(BLOCK)] + text[300:500]
    index, end, number = SuffixIndex(BLOCK), 0, 0
    while end < len(text):
        size = sizes[number % len(sizes)]
        index.extend(text[end : end + size])
        end, number = end + size, number + 1
    assert (index.start, index.end, index.num_blocks) == (0, len(text), 4)
    assert found_in(index, index.context, 8)[2] == LONGEST
    for at in chance.sample(range(70, len(text)), 40):
        context = Context.of(text[at - 70 : at])
        assert found_in(index, context, 8) == slow_look_up(text, text[at - 70 : at], 8)


def test_dropped_blocks_are_not_found_and_the_rest_is():
    chance = random.Random(7)
    text = [chance.randrange(30) for _ in range(3 * BLOCK + 500)]
    index = index_of(text)
    index.drop_oldest()
    assert (index.start, index.num_blocks, index.oldest_stop) == (BLOCK, 3, 2 * BLOCK)
    more = text[:100]  # occurred before, in the block that is dropped
    index.extend(more)
    left = [*text[BLOCK:], *more]
    for at in [3, 40, *chance.sample(range(80, len(left)), 40)]:
        context = left[max(0, at - 70) : at]
        assert found_in(index, Context.of(context), 8) == slow_look_up(left, context, 8)
    for blocks in (2, 1, 0):
        index.drop_oldest()
        assert index.num_blocks == blocks
    assert index.start == index.end == len(text) + len(more)
    assert index.look_up(Context.of(text[-10:]), 4) is None
    index.extend([3, 4, 5, 6, 3, 4])
    assert found_in(index, index.context, 2) == ((5, 6), (1.0, 1.0), 2)


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=80),
    st.integers(0, 80),
    st.integers(0, 90),
    st.lists(st.integers(0, 2), max_size=20),
)
def test_erased_tokens_are_neither_matched_nor_proposed(text, start, stop, context):
    text = [*text, SEPARATOR]
    index = index_of(text)
    index.erase(start, stop)
    left = [SEPARATOR if start <= at < stop else token for at, token in enumerate(text)]
    assert found_in(index, Context.of(context), 8) == slow_look_up(left, context, 8)
    assert index.end == len(text)
