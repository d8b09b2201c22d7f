"""Known bugs of speculative decoders, planted here: the checks of this suite must catch every one.

Each mutant is paired with the check that finds it, and the same check passes on the real code.
"""

import itertools

import pytest
import torch

from gammaray.types import Proposal, SparseDistribution, VerificationMethod
from services.verification import rules as verification
from tests.support.maths_helpers import (
    Fixed,
    TinyModel,
    chain_proposals,
    completed,
    distance,
    drawn_tokens,
    matched_distribution,
    mixed,
    plain_distribution,
    quantised_drafter,
    rejection_distribution,
)

START = (0,)
CLEAR = 1e-3
COUPLED = VerificationMethod.COUPLED


def check_rejection():
    """The check of the code: distributions with zeros, sparse drafts, and drafts wider than the target."""
    for seed, zeros in itertools.product(range(3), (0.0, 0.5)):
        target, draft = TinyModel(4, seed, zeros), TinyModel(4, seed + 50)
        for _, proposal in chain_proposals(quantised_drafter(draft, 3, 5), START, 2):
            rejection_distribution(target, START, proposal)


def bias_of(target, cycle):
    """The check of the drafter: total variation of a cycle's tokens from the target's."""
    parts = list(cycle)
    length = 1 + max(len(proposal) for _, proposal in parts)
    distribution = mixed((prob, rejection_distribution(target, START, proposal)) for prob, proposal in parts)
    return distance(completed(distribution, target, START, length), plain_distribution(target, START, length))


def accept_at_most(uniform, target_prob, weight, bits):
    return weight > 0 and uniform * weight <= target_prob * 2**bits


def accept_without_quantisation(uniform, target_prob, weight, bits):
    # Ratio to the distribution before rounding: here the nearest multiple of 1/16.
    return weight > 0 and uniform * max(1, round(weight / 2 ** (bits - 4))) < 16 * target_prob


def residual_of_draft_support(row, draft):
    # Residual over the shipped top-K only (I5).
    probs, support = row.double().exp(), torch.tensor(draft.token_ids)
    residual = torch.zeros_like(probs)
    weights = torch.tensor(draft.weights).double() / 2**draft.weight_bits
    residual[support] = (probs[support] - weights).clamp(min=0)
    return residual if bool(residual.any()) else probs


def residual_forgotten(row, draft):
    return row.double().exp()


def residual_renormalised_first(row, draft):
    # (p - q)+ with q divided by its largest weight instead of its sum.
    probs, support = row.double().exp(), torch.tensor(draft.token_ids)
    weights = torch.tensor(draft.weights).double() / max(draft.weights)
    probs[support] = (probs[support] - weights).clamp(min=0)
    return probs


def residual_absolute(row, draft):
    probs, support = row.double().exp(), torch.tensor(draft.token_ids)
    probs[support] = (probs[support] - torch.tensor(draft.weights).double() / 2**draft.weight_bits).abs()
    return probs


CODE_MUTANTS = {
    "accept_with_p_zero": ("is_accepted", accept_at_most),
    "accept_always": ("is_accepted", lambda *_: True),
    "accept_against_another_distribution": ("is_accepted", accept_without_quantisation),
    "accept_if_more_likely": ("is_accepted", lambda _, p, w, bits: p * 2**bits >= w),
    "residual_of_the_top_k_only": ("residual_distribution", residual_of_draft_support),
    "residual_forgotten": ("residual_distribution", residual_forgotten),
    "residual_badly_scaled": ("residual_distribution", residual_renormalised_first),
    "residual_absolute": ("residual_distribution", residual_absolute),
}


def test_check_passes_on_the_real_code():
    check_rejection()


@pytest.mark.parametrize(("name", "mutant"), CODE_MUTANTS.values(), ids=CODE_MUTANTS)
def test_mutant_of_rejection_is_caught(monkeypatch, name, mutant):
    monkeypatch.setattr(verification, name, mutant)
    with pytest.raises(AssertionError):
        check_rejection()


def reuse_first_row_noise(scores, real=verification.best_tokens):
    return real(scores) if len(scores) < 2 else [real(scores)[0], *real(scores)[:-1]]


def last_child_wins(target_token_ids, proposal, real=verification.walk):
    path = real(target_token_ids, proposal).accepted_path[:-1]
    return verification.make_verdict(path, target_token_ids[0], failed=True)


MATCH_MUTANTS = {
    "row_of_the_parent": ("best_tokens", reuse_first_row_noise),
    "correction_of_another_row": ("walk", last_child_wins),
    "depth_of_row_forgotten": ("row_depths", lambda proposal: [0] * (len(proposal) + 1)),
    "tree_read_as_chain": ("children_of", lambda proposal, row: [row] if row < len(proposal) else []),
}


@pytest.mark.parametrize(("name", "mutant"), MATCH_MUTANTS.values(), ids=MATCH_MUTANTS)
def test_mutant_of_matching_is_caught(monkeypatch, name, mutant):
    target, proposal = TinyModel(3, 2), Proposal((0, 1, 0, 2, 1), (-1, -1, 0, 1, 2))
    plain = plain_distribution(target, START, 4)
    distribution = matched_distribution(COUPLED, target, START, proposal)
    assert distance(completed(distribution, target, START, 4), plain) < 1e-12
    monkeypatch.setattr(verification, name, mutant)
    try:
        distribution = matched_distribution(COUPLED, target, START, proposal)
    except AssertionError:
        return
    assert distance(completed(distribution, target, START, 4), plain) > CLEAR


P, Q = (0.5, 0.3, 0.2), (0.2, 0.2, 0.6)


def proposals_of(draft, shipped, keep=lambda token_id: True, choose=None):
    """Return a gamma-1 cycle: tokens sampled from `draft`, sent with the distribution `shipped`."""
    for token_id, prob in draft.items():
        yield prob, Proposal((token_id,), None, (shipped,)) if keep(token_id) else Proposal()


def shipped_distribution(*probs):
    return quantised_drafter(Fixed(*probs), len(probs), 10)(START)


def test_mutant_dropping_a_sampled_token_of_low_confidence_is_caught():
    """Drop y when q(y) < .5 and take a bonus: the distribution becomes (.5, .22, .28)."""
    shipped = shipped_distribution(*Q)
    drawn = drawn_tokens(shipped)
    assert bias_of(Fixed(*P), proposals_of(drawn, shipped)) < 1e-12
    dropping = list(proposals_of(drawn, shipped, keep=lambda token_id: drawn[token_id] >= 0.5))
    distribution = mixed(
        (prob, rejection_distribution(Fixed(*P), START, proposal)) for prob, proposal in dropping
    )
    first = [sum(prob for tokens, prob in distribution.items() if tokens[0] == v) for v in range(3)]
    assert first == pytest.approx([0.5, 0.22, 0.28], abs=1e-3)
    assert bias_of(Fixed(*P), dropping) > 0.05


def test_mutant_ratio_test_on_a_deterministic_token_is_caught():
    """p = q = (.51, .49), the top token proposed as if sampled from q: the distribution becomes (1, 0)."""
    target, shipped = Fixed(0.51, 0.49), shipped_distribution(0.51, 0.49)
    assert bias_of(target, proposals_of({0: 1.0}, shipped)) > 0.4
    assert bias_of(target, [(1.0, Proposal((0,)))]) < 1e-12


def test_mutant_drawing_before_quantisation_is_caught():
    shipped = quantised_drafter(Fixed(*Q), 3, 3)(START)
    assert bias_of(Fixed(*P), proposals_of(drawn_tokens(shipped), shipped)) < 1e-12
    assert bias_of(Fixed(*P), proposals_of(dict(enumerate(Q)), shipped)) > CLEAR


def test_mutant_keeping_a_token_outside_its_distribution_is_caught(monkeypatch):
    """Drawn before truncation: harmless, as such a token is redrawn from p, unless the test lets it pass."""
    shipped = quantised_drafter(Fixed(*Q), 2, 10)(START)
    untruncated = list(proposals_of(dict(enumerate(Q)), shipped))
    assert bias_of(Fixed(*P), untruncated) < 1e-12
    real = verification.weight_of
    monkeypatch.setattr(verification, "weight_of", lambda *args: max(1, real(*args)))
    with pytest.raises(AssertionError):
        bias_of(Fixed(*P), untruncated)


@pytest.mark.parametrize("change", [1, -1])
def test_mutant_weight_off_by_one_is_caught(change):
    shipped = quantised_drafter(Fixed(0.4, 0.3, 0.2, 0.1), 4, 4)(START)
    first, second, *rest = shipped.weights
    altered = SparseDistribution(shipped.token_ids, (first + change, second - change, *rest), 4)
    target = Fixed(0.3, 0.4, 0.1, 0.2)
    assert bias_of(target, proposals_of(drawn_tokens(shipped), shipped)) < 1e-12
    assert bias_of(target, proposals_of(drawn_tokens(shipped), altered)) > CLEAR


def test_mutant_choosing_between_drafts_by_their_tokens_is_caught():
    """Two drafts sample from the same distribution and the more likely token is sent."""
    shipped = shipped_distribution(*Q)
    drawn = drawn_tokens(shipped)
    best = dict.fromkeys(drawn, 0.0)
    for (left, p), (right, q) in itertools.product(drawn.items(), repeat=2):
        best[max(left, right, key=lambda token_id: drawn[token_id])] += p * q
    assert bias_of(Fixed(*P), proposals_of(best, shipped)) > 0.05


def test_mutant_choosing_by_tokens_is_lossless_when_matching():
    """The same choices are lossless if the target samples by itself, for any proposal."""
    for token_id in range(3):
        distribution = matched_distribution(COUPLED, Fixed(*P), START, Proposal((token_id,)))
        assert (
            distance(completed(distribution, Fixed(*P), START, 2), plain_distribution(Fixed(*P), START, 2))
            < 1e-12
        )
