"""All verification methods: verdicts as the CPU engine's, and the target's law.

The functions that judge are the CPU engine's, whose exactness `tests/unit/services/target_worker` shows by
enumeration. Here the rows, noise and proposals that vLLM's runner hands them are tested: verdict for verdict
on the same seeds, and by a chi-square test of the tokens of many seeds.
"""

import random
from collections import Counter

import pytest

from gammaray.types import Proposal, SamplingParams, SparseDistribution, VerificationMethod
from tests.support.law_helpers import check_law, pair_law
from tests.support.vllm_helpers import WEIGHT_BITS, Session, answers, drafted, end, generate, prompt

METHODS = list(VerificationMethod)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0}, {"temperature": 0.6, "top_p": 0.9}, {"presence_penalty": 0.7, "top_k": 12}],
    ids=["sampled", "greedy", "filtered", "edited"],
)
def test_verdicts_equal_the_cpu_engines(scheduler, reference, method, fields):
    """Proposals drawn from their distributions, likely tokens without distributions, and none."""
    verdicts = []
    for engine in (scheduler, reference):
        rng = random.Random(7)
        sessions = [
            Session(prompt(length, length), SamplingParams(seed=length, **fields), method)
            for length in (1, 20, 64, 140)
        ]
        generate(engine, sessions, 1)
        seen = []
        for cycle in range(8):
            guesses = [Session(session.tokens) for session in sessions]
            likely = generate(reference, guesses, 8)
            end(reference, *guesses)
            tasks = []
            for number, session in enumerate(sessions):
                proposal = drafted(likely[number][: rng.randrange(9)], rng)
                if (cycle + number) % 3 == 0:
                    proposal = Proposal(proposal.token_ids)
                tasks.append(session.block(proposal))
            for session, task, reply in zip(sessions, tasks, answers(engine, tasks), strict=True):
                seen.append(session.take(task, reply))
        verdicts.append(seen)
        end(engine, *sessions)
    assert verdicts[0] == verdicts[1]
    lengths = Counter(len(verdict.accepted_path) for verdict in verdicts[0])
    assert len(lengths) > 2
    assert lengths[0] > 2


@pytest.mark.parametrize("method", METHODS)
def test_at_temperature_0_every_method_gives_the_greedy_tokens(scheduler, reference, method):
    plain = Session(prompt(30), SamplingParams(temperature=0, seed=0))
    (expected,) = generate(reference, [plain], 20)
    end(reference, plain)
    rng = random.Random(1)

    def propose(session):
        own = expected[len(session.output) :][: rng.randrange(6)]
        tokens = [token if rng.random() < 0.7 else rng.randrange(97) for token in own]
        shipped = [
            SparseDistribution((token, 96 - token), (1000, 24), WEIGHT_BITS)
            if token != 48
            else SparseDistribution((token,), (1 << WEIGHT_BITS,), WEIGHT_BITS)
            for token in tokens
        ]
        return Proposal(tuple(tokens), None, tuple(shipped))

    session = Session(prompt(30), SamplingParams(temperature=0, seed=0), method)
    assert generate(scheduler, [session], 20, propose) == [expected]


VOCAB = 8
ALLOWED = tuple(range(10, 10 + VOCAB))
"""Tokens that the law below leaves."""
TEMPERATURE = 2.0
NUM_SEEDS = 2000
ALPHA = 1e-4


@pytest.fixture(scope="module")
def law(llama):
    """P(token 1, token 2) after a prompt, when only `VOCAB` tokens are allowed, from transformers."""
    return pair_law(llama, prompt(6), ALLOWED, TEMPERATURE)


def drafts(law):
    """Return the distributions of two drafted tokens: half the target's, half an even one."""
    shipped = []
    for at in range(2):
        probs = Counter[int]()
        for outcome, prob in law.items():
            probs[outcome[at]] += 0.5 * prob + 0.5 / len(law)
        weights = {token: 1 + int(prob * ((1 << WEIGHT_BITS) - VOCAB)) for token, prob in probs.items()}
        weights[10] += (1 << WEIGHT_BITS) - sum(weights.values())
        shipped.append(SparseDistribution(tuple(weights), tuple(weights.values()), WEIGHT_BITS))
    return tuple(shipped)


def draw(shipped, rng):
    """Draw a proposal from its distributions."""
    tokens = tuple(rng.choices(one.token_ids, one.weights)[0] for one in shipped)
    return Proposal(tokens, None, shipped)


@pytest.mark.statistical
@pytest.mark.parametrize("method", METHODS)
def test_two_tokens_over_many_seeds_have_the_targets_law(scheduler, law, method):
    """The first block of a session has a proposal of two tokens; what is short of two is decoded plainly."""
    rng = random.Random(5)
    counts, accepted, shipped = Counter(), 0, drafts(law)
    for start in range(0, NUM_SEEDS, 200):
        sessions = [
            Session(
                prompt(6),
                SamplingParams(temperature=TEMPERATURE, seed=seed, allowed_token_ids=ALLOWED),
                method,
                salt="one",
            )
            for seed in range(start, start + 200)
        ]
        tasks = [session.block(draw(shipped, rng)) for session in sessions]
        for session, task, reply in zip(sessions, tasks, answers(scheduler, tasks), strict=True):
            accepted += len(session.take(task, reply).accepted_path)
        generate(scheduler, sessions, 2)
        counts.update(tuple(session.output[:2]) for session in sessions)
        end(scheduler, *sessions)
    assert 0.1 * NUM_SEEDS < accepted < 1.5 * NUM_SEEDS
    check_law(counts, law, ALPHA)
