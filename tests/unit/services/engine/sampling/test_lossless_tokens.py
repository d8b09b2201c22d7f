"""Bit equality: with coupled verification the tokens depend on prompt, seed and parameters alone."""

import random

import pytest

from gammaray.types import Proposal, SamplingParams, VerificationMethod
from services.engine.sampling.noise import Noise
from tests.support.maths_loop_helpers import Speculator, TableModel, chain_of

COUPLED = VerificationMethod.COUPLED
VOCAB, LENGTH, EOS = 12, 40, (3,)
SETTINGS = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "greedy": {"temperature": 0.0},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 4},
    "min_p": {"min_p": 0.15},
    "repetition": {"repetition_penalty": 1.6},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.9},
    "bias": {"logit_bias": {5: 2.0}},
    "allowed": {"allowed_token_ids": (1, 2, 3, 5, 8)},
    "banned": {"banned_token_ids": (0, 4)},
    "min_tokens": {"min_tokens": 23, "logit_bias": {3: 3.0}},
    "greedy_penalties": {"temperature": 0.0, "frequency_penalty": 0.9, "repetition_penalty": 1.3},
}


def random_tree(speculator, context):
    """Propose the token of the Gumbel-max draw and random siblings."""
    rng = random.Random(len(context))
    size = rng.randrange(1, 12)
    winners = speculator.propose(context, size).token_ids
    tokens = tuple(w if rng.random() < 0.7 else rng.randrange(VOCAB) for w in winners)
    return Proposal(tokens, tuple(rng.randrange(-1, node) for node in range(size)))


def random_tokens(speculator, context):
    rng = random.Random(len(context))
    return Proposal(tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(6))))


def random_gamma(speculator, context):
    return speculator.propose(context, random.Random(len(context)).randrange(9))


def foreign_noise(speculator, context):
    own, speculator.noise = speculator.noise, speculator.noise and Noise(999, 0, VOCAB)
    proposal = speculator.propose(context, 4)
    speculator.noise = own
    return proposal


DRAFTERS = {
    "gamma_1": chain_of(1),
    "gamma_4": chain_of(4),
    "gamma_16": chain_of(16),
    "random_gamma": random_gamma,
    "foreign_noise": foreign_noise,
    "random_tokens": random_tokens,
    "random_tree": random_tree,
}


def generate(method, setting, drafter, seed=5, draft_noise=0.8):
    target, params = TableModel(VOCAB, 1), SamplingParams(**setting)
    noise = None if params.temperature == 0 else Noise(seed, 0, VOCAB)
    draft = target.blurred(2, draft_noise)
    return Speculator(method, target, draft, params, noise, eos=EOS).generate(LENGTH, drafter)


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_coupled_tokens_equal_plain_decoding(setting, drafter):
    for seed in (5, 6):
        assert generate(COUPLED, setting, drafter, seed) == generate(COUPLED, setting, chain_of(0), seed)


@pytest.mark.parametrize("method", list(VerificationMethod))
def test_greedy_tokens_equal_plain_decoding_for_every_method(method):
    setting = SETTINGS["greedy_penalties"]
    plain = generate(COUPLED, setting, chain_of(0))
    for drafter in (chain_of(3), random_tokens, random_gamma):
        assert generate(method, setting, drafter) == plain


def test_coupled_tokens_depend_on_the_seed():
    outputs = {generate(COUPLED, {}, chain_of(2), seed) for seed in range(20)}
    assert len(outputs) == 20
