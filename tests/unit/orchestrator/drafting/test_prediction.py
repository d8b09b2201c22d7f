"""Predicted outputs: where the pointer is, and that proposals leave every verification method exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray.demo_pair import resolve_model
from gammaray.types import DrafterKind, VerificationMethod
from orchestrator.cycle.types import Match
from orchestrator.drafting.matches import to_proposal
from orchestrator.drafting.prediction import PredictionDrafter
from orchestrator.text.tokenizer import LONG_TEXT, Tokenizer
from tests.support.cycle_helpers import PROMPT, make_session

TEXT = (10, 11, 12, 13, 14, 15, 16, 17)


def session_with(emitted, **options):
    session = make_session(**options)
    session.token_ids = [*PROMPT, *emitted]
    return session


def look_up(prediction, emitted, depth=3):
    match = PredictionDrafter(prediction).look_up(session_with(emitted), depth)
    return match and (match.token_ids, match.length)


@pytest.mark.parametrize(
    ("prediction", "emitted", "expected"),
    [
        pytest.param((257, 1, 256, 7), [9, 1, 256], ((7,), 2), id="bytes-of-two-tokens"),
        pytest.param((256, 65536, 256), [9, 1, 256], None, id="bytes-across-tokens-do-not-match"),
    ],
)
def test_prediction_proposes_what_follows_the_pointer(prediction, emitted, expected):
    assert look_up(prediction, emitted) == expected


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=40), st.integers(1, 6))
def test_prediction_pointer_is_that_of_a_search_by_brute_force(prediction, emitted, depth):
    """One call per emitted token, as in plain decoding."""
    drafter, pointer, length, is_lost = PredictionDrafter(prediction), 0, 0, False
    for end in range(len(emitted) + 1):
        if end:
            is_lost = is_lost or prediction[pointer : pointer + 1] != [emitted[end - 1]]
            pointer, length = pointer + 1, 0 if is_lost else length + 1
        if is_lost and end >= 2:
            ends, latest = range(2, len(prediction) + 1), emitted[end - 2 : end]
            places, near = [at for at in ends if prediction[at - 2 : at] == latest], max(2, pointer)
            if places:
                pointer = min(places, key=lambda at: (abs(at - near), at < near))
                is_lost, length = False, 2
                while (
                    length < min(pointer, end)
                    and prediction[pointer - length - 1] == emitted[end - length - 1]
                ):
                    length += 1
        wanted = tuple(prediction[pointer : pointer + depth])
        match = Match(DrafterKind.PREDICTION, wanted, length, (1.0,) * len(wanted))
        found = drafter.look_up(session_with(emitted[:end]), depth)
        assert found == (None if is_lost or not wanted else match)


def test_prediction_is_found_again_after_a_long_deviation_and_a_takeover():
    """A new drafter, as after a takeover, sees all emitted tokens at once."""
    prediction = list(range(100, 400))
    emitted = [*prediction[:50], *range(1000, 1200), *prediction[120:140]]
    drafter = PredictionDrafter(prediction)
    for end in range(len(emitted) + 1):
        match = drafter.look_up(session_with(emitted[:end]), 5)
    assert match.token_ids == tuple(prediction[140:145])
    assert look_up(prediction, emitted, 5) == (match.token_ids, match.length) == (tuple(range(240, 245)), 20)


@pytest.mark.parametrize("method", VerificationMethod)
def test_match_becomes_a_proposal_with_the_distributions_that_verification_needs(method):
    session = session_with([], method=method)
    match = PredictionDrafter(TEXT).look_up(session, 2)
    proposal = to_proposal(match, session, 2)
    assert (proposal.token_ids, proposal.parents) == ((10, 11), None)
    assert proposal.drafter is DrafterKind.PREDICTION
    if method.uses_draft_distributions:
        found = [(d.token_ids, d.weights, 2**d.weight_bits) for d in proposal.draft_distributions]
        assert found == [((10,), (2,), 2), ((11,), (2,), 2)]
    else:
        assert proposal.draft_distributions is None


async def test_prediction_ids_are_those_of_the_text_without_special_tokens():
    tokenizer = Tokenizer(resolve_model("demo"))
    text = "def read(path):\n"
    expected = tuple(tokenizer.encode(text, is_start=False))
    assert await tokenizer.ids_of(text, is_start=False) == expected
    assert await tokenizer.ids_of((4, 5), is_start=False) == (4, 5)
    assert await tokenizer.ids_of((), is_start=False) == ()
    long = text * (LONG_TEXT // len(text) + 1)
    assert await tokenizer.ids_of(long, is_start=False) == tuple(tokenizer.encode(long, is_start=False))
