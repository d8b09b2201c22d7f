"""The property that everything rests on: tokens do not depend on proposals or on the batch."""

import random

import pytest

from gammaray.types import Proposal, SamplingParams
from services.engine.loader import load_engine
from services.own.target_scheduler import TargetScheduler
from tests.support.vllm_helpers import Session, answers, end, generate, references
from tests.vllm.conftest import LIMITS

LENGTH = 30
NUM_SESSIONS = 12


@pytest.fixture(
    scope="module", params=[("llama", "shared"), ("moe", "shared_moe")], ids=["llama", "qwen3 with experts"]
)
def served(request):
    """vLLM's scheduler and the CPU engine's with the same model."""
    directory, scheduler = (request.getfixturevalue(name) for name in request.param)
    return scheduler, TargetScheduler(load_engine(str(directory)), LIMITS)


def parameters(rng):
    temperature = rng.choice([0, 0, 0.5, 1, 1.5])
    extra = rng.choice([{}, {}, {"top_p": 0.9}, {"top_k": 10}, {"frequency_penalty": 0.4}, {"min_p": 0.05}])
    return SamplingParams(temperature=temperature, seed=rng.randrange(1 << 30), **extra)


def sessions_of(seed):
    rng = random.Random(seed)
    return [
        Session([rng.randrange(4, 97) for _ in range(rng.choice([1, 2, 9, 60, 127, 200]))], parameters(rng))
        for _ in range(NUM_SESSIONS)
    ]


def proposal(session, expected, rng):
    """Return 0 to 10 tokens: the right ones, right ones with a mistake, or any."""
    gamma, kind = rng.randrange(11), rng.choice(["right", "mistaken", "any"])
    if kind == "any":
        return Proposal(tuple(rng.randrange(97) for _ in range(gamma)))
    tokens = expected[len(session.output) :][:gamma]
    if kind == "mistaken" and tokens:
        tokens[rng.randrange(len(tokens))] = rng.randrange(97)
    return Proposal(tuple(tokens))


@pytest.mark.parametrize("seed", range(2))
def test_tokens_equal_plain_decoding_whatever_is_proposed_and_beside_whom(served, seed):
    scheduler, reference = served
    plain = references(reference, sessions_of(seed), LENGTH)
    at_once = sessions_of(seed)
    outputs = {"vLLM at gamma 0": generate(scheduler, at_once, LENGTH)}
    end(scheduler, *at_once)
    sessions, rng = sessions_of(seed), random.Random(seed + 100)
    expected = {session.name: output for session, output in zip(sessions, plain, strict=True)}
    while active := [session for session in sessions if len(session.output) < LENGTH]:
        batch = rng.sample(active, min(len(active), rng.randrange(1, 9)))
        for session in batch:
            if session.output and rng.random() < 0.1:  # another owner, which has a part of the tokens
                session.epoch += 1
                del session.tokens[len(session.prompt) + rng.randrange(len(session.output)) :]
                session.held = min(session.held, len(session.tokens))
        tasks = [session.block(proposal(session, expected[session.name], rng)) for session in batch]
        for session, task, reply in zip(batch, tasks, answers(scheduler, tasks), strict=True):
            session.take(task, reply)
    outputs["vLLM with proposals"] = [session.output[:LENGTH] for session in sessions]
    end(scheduler, *sessions)
    for how, some in outputs.items():
        assert some == plain, how
