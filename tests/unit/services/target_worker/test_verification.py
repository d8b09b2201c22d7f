"""Verdicts case by case: all, none and some accepted, trees, temperature 0, and broken drafts."""

import math
import random
from fractions import Fraction

import pytest
import torch

from gammaray.blocks import Verdict
from gammaray.errors import InternalError, InvalidArgumentError
from gammaray.types import Proposal, SamplingParams, SparseDistribution, TokenOrigin, VerificationMethod
from services.engine.sampling.edits import LogitEdits
from services.engine.sampling.noise import Noise
from services.scheduling.tasks import SessionSpec
from services.verification.rules import cut_before, is_accepted, verify
from services.verification.verdicts import judge
from tests.support.maths_helpers import GREEDY, SAMPLED, ScriptedNoise
from tests.support.processing_helpers import small_compiler

COUPLED, REJECTION, NAIVE, BLOCK = VerificationMethod
METHODS = list(VerificationMethod)
CORRECTION, BONUS = TokenOrigin.CORRECTION, TokenOrigin.BONUS
VOCAB = 7
TREE_PARENTS = (-1, -1, 0, 0, 2, 1)


def greedy_rows(*token_ids):
    """Return the rows of a target at temperature 0 whose tokens are these."""
    rows = torch.full((len(token_ids), VOCAB), -math.inf)
    for row, token_id in enumerate(token_ids):
        rows[row, token_id] = 0.0
    return rows


CHAIN_CASES = {
    "empty": ((3,), (), Verdict((), 3, BONUS, 0)),
    "gamma_1_accepted": ((3, 5), (3,), Verdict((0,), 5, BONUS, 1)),
    "gamma_1_rejected": ((3, 5), (4,), Verdict((), 3, CORRECTION, 1)),
    "all_accepted": ((3, 5, 1), (3, 5), Verdict((0, 1), 1, BONUS, 2)),
    "first_wrong": ((3, 5, 1), (4, 5), Verdict((), 3, CORRECTION, 1)),
    "last_wrong": ((3, 5, 1), (3, 6), Verdict((0,), 5, CORRECTION, 2)),
    "match_after_rejection_does_not_count": ((3, 5, 1, 2), (3, 6, 1), Verdict((0,), 5, CORRECTION, 2)),
}


@pytest.mark.parametrize("method", METHODS)
def test_verify_chain_of_a_certain_target_gives_verdict(method, subtests):
    for name, (target, proposed, verdict) in CHAIN_CASES.items():
        with subtests.test(name):
            for params, noise in ((GREEDY, None), (SAMPLED, Noise(3, 0, VOCAB))):
                assert verify(method, greedy_rows(*target), Proposal(proposed), params, noise, 17) == verdict


def test_verdict_is_cut_before_the_first_row_that_is_not_the_targets():
    proposal = Proposal((3, 5, 1))
    verdict = Verdict((0, 1, 2), 6, BONUS, 3)
    assert cut_before(verdict, proposal, ()) == verdict
    assert cut_before(verdict, proposal, (3,)) == Verdict((0, 1), 1, BONUS, 2)
    assert cut_before(verdict, proposal, {2, 3}) == Verdict((0,), 5, BONUS, 1)
    assert cut_before(verdict, proposal, {1, 3}) == Verdict((), 3, BONUS, 0)
    early = Verdict((0,), 2, CORRECTION, 2)
    assert cut_before(early, proposal, {2, 3}) == early
    tree = Proposal((2, 5, 1), (-1, -1, 1))
    assert cut_before(Verdict((1, 2), 4, BONUS, 2), tree, {1, 3}) == Verdict((1,), 1, BONUS, 1)


def test_no_token_is_taken_from_rows_beyond_the_limits_of_a_grammar():
    """An ambiguous grammar, whose parser takes the more the longer the proposal."""
    eos, q, x, y = range(4)
    symbols = [f"s{number}" for number in range(70)]
    rules = [f"b: {' | '.join(symbols)}", *(f'{name}: "q" | {name} {name}' for name in symbols)]
    grammar = "\n".join(['start: "y" | "x" b', *rules])
    params = SamplingParams(temperature=0.0, grammar=grammar)
    state = small_compiler(("<eos>", "q", "x", "y"), 4, (eos,)).begin(grammar)
    edits = LogitEdits(params, (eos,), 1, 4, grammar=state)
    edits.follow([y])
    proposal, logits = Proposal((x, *[q] * 15)), torch.tensor([0.0, 3.0, 2.0, 1.0]).repeat(17, 1)
    verdict = judge(SessionSpec(params, COUPLED, 1, (eos,)), proposal, logits, 1, None, edits)
    beyond = min(edits.unmasked_rows)
    assert 1 < beyond < 17
    assert verdict == Verdict(tuple(range(beyond - 1)), q, BONUS, beyond - 1)


# Nodes:            0   1  2  3  4  5       0 and 1 follow the prefix, 2 and 3 node 0, 4 node 2, 5 node 1.
TREE_TOKENS = (2, 5, 1, 3, 6, 4)
TREE_CASES = {
    "no_child": ((4, 0, 0, 0, 0, 0, 0), Verdict((), 4, CORRECTION, 1)),
    "second_child_then_its_child": ((5, 0, 4, 0, 0, 0, 1), Verdict((1, 5), 1, BONUS, 2)),
    "first_child_then_correction": ((2, 0, 9, 9, 9, 9, 9), Verdict((0,), 0, CORRECTION, 2)),
    "leaf_before_deepest": ((2, 3, 9, 9, 6, 9, 9), Verdict((0, 3), 6, BONUS, 2)),
    "deepest_path": ((2, 1, 9, 6, 9, 5, 9), Verdict((0, 2, 4), 5, BONUS, 3)),
}


@pytest.mark.parametrize(("target", "verdict"), TREE_CASES.values(), ids=TREE_CASES)
def test_verify_greedy_tree_walks(target, verdict):
    rows = greedy_rows(*(token_id % VOCAB for token_id in target))
    assert verify(COUPLED, rows, Proposal(TREE_TOKENS, TREE_PARENTS), GREEDY, None, 0) == verdict


def test_verify_duplicate_siblings_take_the_first():
    proposal = Proposal((2, 2, 5), (-1, -1, 1))
    verdict = verify(COUPLED, greedy_rows(2, 1, 5, 0), proposal, GREEDY, None, 0)
    assert verdict == Verdict((0,), 1, BONUS, 1)


def test_verify_chain_written_as_parents_equals_chain():
    torch.manual_seed(0)
    rows = torch.randn(4, VOCAB).log_softmax(-1)
    for method in METHODS:
        verdicts = {
            verify(method, rows, Proposal((1, 2, 3), parents), SAMPLED, Noise(5, 0, VOCAB), 9)
            for parents in (None, (-1, 0, 1))
        }
        assert len(verdicts) == 1


@pytest.mark.parametrize("method", [REJECTION, NAIVE, BLOCK])
@pytest.mark.parametrize("params", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_verify_tree_without_coupling_is_refused(method, params):
    with pytest.raises(InvalidArgumentError, match=r"proposal\.parents"):
        verify(method, greedy_rows(1, 1, 1), Proposal((1, 2), (-1, -1)), params, Noise(1, 0, VOCAB), 0)


def test_is_accepted_equals_exact_rational_comparison():
    rng = random.Random(0)
    for _ in range(3000):
        bits = rng.randint(1, 24)
        weight, word = rng.randint(1, 1 << bits), rng.choice((0, 2**32 - 1, rng.getrandbits(32)))
        uniform = Fraction(2 * word + 1, 2**33)
        on_the_edge = float(uniform * weight / (1 << bits))
        target_prob = rng.choice((rng.random(), on_the_edge, math.nextafter(on_the_edge, 0), 0.0, 1.0))
        expected = uniform * weight < (1 << bits) * Fraction(target_prob)
        assert is_accepted(float(uniform), target_prob, weight, bits) == expected


@pytest.mark.parametrize("method", [REJECTION, BLOCK])
def test_verify_empty_residual_uses_the_target_distribution(method):
    # p is a rounding error below q at y and nowhere above it: the test can fail, and then (p - q)+ is zero.
    distribution = SparseDistribution((1,), (1 << 12,), 12)
    rows = torch.tensor([[-math.inf, -1e-9, -math.inf]], dtype=torch.float64).repeat(2, 1)
    noise = ScriptedNoise({5: 1 - 2**-33}, torch.zeros(3, dtype=torch.float64))
    verdict = verify(method, rows, Proposal((1,), None, (distribution,)), SAMPLED, noise, 5)
    assert verdict == Verdict((), 1, CORRECTION, 1)


@pytest.mark.parametrize("method", [REJECTION, BLOCK])
def test_verify_token_outside_its_distribution_is_resampled_from_the_target(method):
    """A draft that lies about where its token came from must not choose the output."""
    distribution = SparseDistribution((0,), (16,), 4)
    rows = torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 3, dtype=torch.float64).log()
    noise = Noise(1, 0, 4)
    for base in range(100):
        verdict = verify(
            method, rows, Proposal((2, 1), None, (distribution, distribution)), SAMPLED, noise, base
        )
        expected = int((rows[0] + noise.residual_gumbel(base)).argmax())
        assert verdict == Verdict((), expected, CORRECTION, 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [math.nan, -math.inf], ids=["nan", "nothing"])
def test_verify_nan_target_logits_are_an_internal_error(method, bad):
    with pytest.raises(InternalError, match="finite"):
        verify(method, torch.full((1, VOCAB), bad), Proposal(), SAMPLED, Noise(0, 0, VOCAB), 0)


@pytest.mark.parametrize("method", METHODS)
def test_verify_ignores_a_bad_row_that_is_not_reached(method):
    rows = greedy_rows(3, 5, 1)
    rows[2] = math.nan
    verdict = verify(method, rows, Proposal((4, 5)), SAMPLED, Noise(0, 0, VOCAB), 0)
    assert verdict == Verdict((), 3, CORRECTION, 1)


@pytest.mark.parametrize("method", [REJECTION, BLOCK])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_verify_nan_in_a_reached_row_is_an_internal_error(method, row):
    distribution = SparseDistribution((0, 1), (8, 8), 4)
    rows = torch.tensor([[0.5, 0.5, 0.0]] * 3, dtype=torch.float64).log()
    rows[row] = math.nan
    proposal = Proposal((0, 1), None, (distribution, distribution))
    with pytest.raises(InternalError, match="finite"):
        verify(method, rows, proposal, SAMPLED, Noise(0, 0, 3), 0)


def test_verify_float32_ties_take_the_lowest_id():
    rows = torch.zeros(1, VOCAB).log_softmax(-1)
    noise = ScriptedNoise(shared=torch.zeros(1, VOCAB, dtype=torch.float64))
    assert verify(COUPLED, rows, Proposal(), SAMPLED, noise, 0).next_token_id == 0
