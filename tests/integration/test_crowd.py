"""Plain requests of a crowd, which their worker decodes ahead: the tokens that each gets alone."""

import asyncio
from dataclasses import replace

import pytest

from gammaray.types import FinishReason, GammaPolicy, GenerationRequest, SamplingParams, VerificationMethod
from orchestrator.workers import verifier
from tests.support.workers.service_helpers import PROMPTS, complete, first_tokens, text_of, tokens_of

pytestmark = pytest.mark.integration

PLAIN = GenerationRequest(PROMPTS[0], max_tokens=60, gamma=GammaPolicy(0))


def sampled(seed, **fields):
    return replace(PLAIN, sampling=SamplingParams(temperature=1.0, seed=seed, **fields))


REQUESTS = [
    replace(PLAIN, sampling=SamplingParams(temperature=0.0, seed=0)),
    replace(sampled(1), num_top_logprobs=2),
    replace(sampled(2), prompt=PROMPTS[1], ignore_eos=True, max_tokens=100),
    sampled(3, top_p=0.9, frequency_penalty=0.7, min_tokens=20),
    replace(sampled(4), verification=VerificationMethod.NAIVE),
    *(replace(sampled(5), max_tokens=count) for count in (1, 2, 3)),
]


async def test_a_crowd_gets_the_tokens_that_each_request_gets_alone(orchestrator, monkeypatch):
    alone = [await complete(orchestrator, request) for request in REQUESTS]
    assert all(chunks[-1].summary.cycles == len(tokens_of(chunks)) for chunks in alone)
    stop = text_of(alone[0])[40:44]
    requests = [*REQUESTS, replace(REQUESTS[0], stop=(stop,))]
    alone.append(await complete(orchestrator, requests[-1]))
    monkeypatch.setattr(verifier, "CROWD", 1)
    together = await asyncio.gather(*(complete(orchestrator, request) for request in requests))
    for ours, theirs in zip(together, alone, strict=True):
        assert [token for chunk in ours for token in chunk.tokens] == [
            token for chunk in theirs for token in chunk.tokens
        ]
        assert text_of(ours) == text_of(theirs)
        assert ours[-1].finish_reason is theirs[-1].finish_reason
        assert ours[-1].usage == theirs[-1].usage
    assert together[-1][-1].finish_reason is FinishReason.STOP
    cycles, count = together[2][-1].summary.cycles, len(tokens_of(together[2]))
    assert cycles < count == 100


async def test_a_stream_that_is_closed_leaves_nothing_on_the_worker(orchestrator, monkeypatch):
    monkeypatch.setattr(verifier, "CROWD", 1)
    stream = orchestrator.generate(replace(sampled(6), max_tokens=500, ignore_eos=True))
    await first_tokens(stream)
    await stream.aclose()
    (link,) = orchestrator.fleet.targets.links.values()
    assert not [*link.pending, *link.sessions, *link.listeners]
    again = replace(REQUESTS[2], max_tokens=30)
    assert tokens_of(await complete(orchestrator, again)) == tokens_of(
        await complete(orchestrator, replace(again, gamma=GammaPolicy(4)))
    )
