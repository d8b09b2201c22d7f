"""Suffix decoding of one session: what it finds, and that every verification method stays exact."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray.types import DrafterKind, Proposal
from orchestrator.drafting.matches import to_proposal
from orchestrator.drafting.suffix_decoding import SuffixDrafter
from tests.support.cycle_helpers import make_session


def proposed(lookup, session, depth):
    match = lookup.look_up(session, depth)
    return Proposal() if match is None else to_proposal(match, session)


def session_with(tokens, **options):
    session = make_session(**options)
    session.token_ids = list(tokens)
    return session


@pytest.mark.parametrize(
    ("tokens", "depth", "expected"),
    [
        pytest.param([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], 1, (3,), id="longest-wins"),
        pytest.param([1, 2, 3, 4], 64, (), id="nothing-occurs-again"),
    ],
)
def test_suffix_proposes_what_followed(tokens, depth, expected):
    proposal = proposed(SuffixDrafter(), session_with(tokens), depth)
    assert proposal.token_ids == expected
    assert proposal.drafter is (DrafterKind.SUFFIX if expected else Proposal().drafter)
    assert proposal.parents is proposal.draft_distributions is None


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(1, 8), st.integers(0, 2**32))
def test_suffix_index_grows_as_if_built_at_once(tokens, depth, seed):
    grown, session, chance = SuffixDrafter(), session_with([]), random.Random(seed)
    end = 0
    while end < len(tokens):
        end = min(len(tokens), end + chance.randint(1, 5))
        session.token_ids = tokens[:end]
        assert grown.look_up(session, depth) == SuffixDrafter().look_up(session, depth)
