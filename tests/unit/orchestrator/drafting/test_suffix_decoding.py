"""Suffix decoding of one session: what it finds, and that every verification method stays exact."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gammaray.types import DrafterKind, Proposal, SamplingParams, VerificationMethod
from orchestrator.drafting.matches import to_proposal
from orchestrator.drafting.suffix_decoding import SuffixDrafter
from services.engine.sampling.noise import Noise
from services.verification.rules import verify
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
        pytest.param([1, 9, *range(20, 40), 1], 64, (9, 20, 21, 22), id="four-tokens-after-one"),
        pytest.param([5, 1, 9, 8, 1], 2, (9, 8), id="single-token"),
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


@pytest.mark.statistical
@pytest.mark.parametrize("method", VerificationMethod)
def test_suffix_proposals_leave_the_targets_distribution(method):
    """The first emitted token has the target's distribution, whatever was proposed (chi square, seeded)."""
    distribution = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05], dtype=torch.float64)
    session = session_with([2, 1, 0, 3, 2, 1], method=method)
    proposal = proposed(SuffixDrafter(), session, 2)
    assert proposal.token_ids == (0, 3)
    assert (proposal.draft_distributions is not None) is method.uses_draft_distributions
    counts, samples = [0] * len(distribution), 1500
    for seed in range(samples):
        params = SamplingParams(seed=seed)
        noise = Noise(seed, 0, len(distribution))
        verdict = verify(
            method, distribution.log().expand(3, -1), proposal, params, noise, len(session.token_ids)
        )
        accepted = [proposal.token_ids[node] for node in verdict.accepted_path]
        counts[[*accepted, verdict.next_token_id][0]] += 1
    chi_square = sum(
        (n - samples * p) ** 2 / (samples * p) for n, p in zip(counts, distribution.tolist(), strict=True)
    )
    assert chi_square < 18.5  # 4 degrees of freedom: passed by chance once in a thousand seeds
