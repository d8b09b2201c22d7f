"""Sampled losslessness: the first two tokens of whole cycles against the target's exact distribution.

Seeded, so a verdict never changes by chance. Each test also shows that it would see a bias of two per cent.
"""

import dataclasses
from collections import Counter

import pytest

from gammaray.types import Proposal, SamplingParams, VerificationMethod
from services.engine.sampling.noise import Noise
from tests.support.maths_loop_helpers import Speculator, TableModel, chain_of, exact_joint, g_test

pytestmark = pytest.mark.statistical

COUPLED, REJECTION, NAIVE, BLOCK = VerificationMethod
VOCAB, SAMPLES, STRIDE = 5, 4000, 8
FAIR, BIASED = 1e-3, 1e-6
SETTINGS = {
    "temperature_1": SamplingParams(),
    "top_p": SamplingParams(temperature=0.9, top_p=0.97),
    "penalties": SamplingParams(repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=-0.4),
}


def speculator(method, params, seed=13, target_seed=3):
    target = TableModel(VOCAB, target_seed, 1.3)
    return Speculator(method, target, target.blurred(4, 0.8), params, Noise(seed, 0, VOCAB))


FAITHFUL = chain_of(2)


def counts_of(speculation, drafter=FAITHFUL, samples=SAMPLES):
    counts = Counter()
    for sample in range(samples):
        speculation.offset = sample * STRIDE
        counts[speculation.generate(2, drafter)] += 1
    return [counts[first, second] for first in range(VOCAB) for second in range(VOCAB)]


@pytest.mark.slow
@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("method", list(VerificationMethod))
def test_generation_follows_the_target_distribution(method, params):
    speculation = speculator(method, params)
    distribution = exact_joint(speculation)
    counts = counts_of(speculation)
    assert g_test(counts, distribution) > FAIR
    # Power: distributions that differ by two per cent are distinguished.
    moved = exact_joint(with_bias(speculation, 0.02))
    assert g_test(counts, moved) < BIASED


def with_bias(speculation, bias):
    return dataclasses.replace(speculation, bias=bias, known={})


@pytest.mark.slow
@pytest.mark.parametrize("method", list(VerificationMethod))
def test_generation_with_a_planted_two_per_cent_bias_is_caught(method):
    """The rows that verify gets are changed, the expected distribution is not."""
    honest = speculator(method, SETTINGS["temperature_1"])
    assert g_test(counts_of(with_bias(honest, 0.02)), exact_joint(honest)) < BIASED


@pytest.mark.parametrize("method", [COUPLED, NAIVE])
def test_generation_from_an_unrelated_draft_follows_the_target_distribution(method):
    """Matching needs no faith in the draft: here it always proposes token 0."""
    speculation = speculator(method, SETTINGS["temperature_1"])
    counts = counts_of(speculation, lambda *_: Proposal((0, 0, 0)))
    assert g_test(counts, exact_joint(speculation)) > FAIR


@pytest.mark.slow
def test_rejection_without_draft_distributions_follows_the_target_distribution():
    speculation = speculator(REJECTION, SETTINGS["temperature_1"])
    counts = counts_of(speculation, lambda *_: Proposal((0, 0, 0)))
    assert g_test(counts, exact_joint(speculation)) > FAIR


class AcceptIsDraft(Noise):
    """The acceptance test looks at the bits the token was drawn with."""

    def accept_uniform(self, position):
        return (self.draft_bits(self.base, position, 32) + 0.5) / 2**32


class ConstantRow(Noise):
    """The same noise at every position."""

    def gumbel(self, start, count):
        return super().gumbel(start // STRIDE * STRIDE, 1).expand(count, -1)


def one_token(speculation, context):
    speculation.noise.base = speculation.offset + len(context)
    return speculation.propose(context, 1)


NOISE_MUTANTS = {
    "acceptance_from_the_draft_bits": (REJECTION, AcceptIsDraft, one_token),
    "coupled_with_one_row_for_all_positions": (COUPLED, ConstantRow, chain_of(2)),
}


@pytest.mark.parametrize(("method", "mutant", "drafter"), NOISE_MUTANTS.values(), ids=NOISE_MUTANTS)
def test_noise_used_twice_is_caught(method, mutant, drafter):
    speculation = speculator(method, SETTINGS["temperature_1"])
    distribution = exact_joint(speculation)
    speculation.noise = mutant(13, 0, VOCAB)
    assert g_test(counts_of(speculation, drafter, 2000), distribution) < BIASED
