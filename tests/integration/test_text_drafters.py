"""Past outputs and predictions as drafts: the tokens stay the same, and no tenant gets another one's text."""

import dataclasses
from collections import Counter

import pytest

from gammaray.types import DrafterKind, GenerationRequest, TokenOrigin, VerificationMethod
from orchestrator.access.caller import Caller
from orchestrator.drafting.corpus import Corpus
from tests.support.workers.service_helpers import PROMPTS, SEEDED, running, tokens_of

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ALICE, BOB = Caller("alice"), Caller("bob")
NUM_TOKENS = 48


@pytest.fixture
async def orchestrator(redis_server, target):
    async with running(redis_server, target.address, "") as orchestrator:
        yield orchestrator


def request_of(**fields) -> GenerationRequest:
    fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "sampling": SEEDED, **fields}
    return GenerationRequest(PROMPTS[0], **fields)


@pytest.fixture
def lookups(monkeypatch):
    """Whether each look-up in past outputs found something."""
    found, look_up = [], Corpus.look_up

    def noted(*given):
        found.append(look_up(*given) is not None)
        return look_up(*given)

    monkeypatch.setattr(Corpus, "look_up", noted)
    return found


async def complete(orchestrator, request, caller=ALICE):
    chunks = [chunk async for chunk in orchestrator.generate(request, caller)]
    return tokens_of(chunks), chunks[-1].summary, chunks[-1].usage


async def test_past_output_of_the_tenant_is_proposed_and_changes_no_token(orchestrator):
    first, summary, _ = await complete(orchestrator, request_of())
    assert summary.cycles == NUM_TOKENS
    again, summary, usage = await complete(orchestrator, request_of())
    assert again == first
    assert summary.suffix_cycles > 0
    assert summary.cycles < NUM_TOKENS / 2
    assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (0, 0)


@pytest.mark.parametrize("method", [VerificationMethod.REJECTION, VerificationMethod.BLOCK])
@pytest.mark.parametrize(("temperature", "is_proposed"), [(1.0, False), (0.0, True)])
async def test_past_output_is_not_tested_by_the_noise_that_made_it(
    orchestrator, lookups, method, temperature, is_proposed
):
    sampling = dataclasses.replace(SEEDED, temperature=temperature)
    request = request_of(verification=method, sampling=sampling)
    await complete(orchestrator, request)
    await complete(orchestrator, request)
    assert any(lookups) is is_proposed


@pytest.mark.parametrize("settings", [{"max_gamma": 0}, {"prefix_caching": False}], ids=str)
async def test_server_without_adaptive_gamma_or_prefix_caching_proposes_no_past_output(
    redis_server, target, lookups, settings
):
    async with running(redis_server, target.address, "", **settings) as orchestrator:
        await complete(orchestrator, request_of())
        _, summary, _ = await complete(orchestrator, request_of())
    assert not any(lookups)
    assert summary.suffix_cycles == 0 or "max_gamma" not in settings


@pytest.mark.parametrize("other", ["tenant", "salt"])
async def test_past_output_is_not_proposed_to_another_tenant_or_salt(orchestrator, lookups, other):
    await complete(orchestrator, request_of())
    await complete(orchestrator, request_of())
    assert any(lookups)
    lookups.clear()
    request, caller = request_of(), BOB
    if other == "salt":
        request, caller = dataclasses.replace(request, cache_salt="other"), ALICE
    await complete(orchestrator, request, caller)
    assert not any(lookups)


async def test_past_output_is_forgotten_with_its_session(orchestrator, redis_server):
    await complete(orchestrator, request_of(session_id="mine"))
    assert orchestrator.corpus.num_sessions == 1
    assert await orchestrator.sessions.delete("mine", ALICE)
    assert orchestrator.corpus.num_sessions == 0
    _, summary, _ = await complete(orchestrator, request_of(session_id="mine"))
    assert summary.cycles == NUM_TOKENS
    async with running(redis_server, "", "") as other:
        assert await other.sessions.delete("mine", ALICE)
    assert orchestrator.corpus.num_sessions == 1
    await orchestrator.corpus.forget_missing(orchestrator.store.exist)
    assert orchestrator.corpus.num_sessions == 0


@pytest.mark.parametrize("method", VerificationMethod)
@pytest.mark.parametrize("drafter", [DrafterKind.MODEL, DrafterKind.PREDICTION])
async def test_prediction_is_proposed_and_counted_and_changes_no_token(orchestrator, method, drafter):
    plain = request_of(verification=method, drafter=DrafterKind.NONE, cache_salt="plain")
    expected, _, _ = await complete(orchestrator, plain)
    wrong = tuple((token_id + 1) % 2048 for token_id in expected)
    predictions = {"right": tuple(expected)}
    if drafter is DrafterKind.PREDICTION:  # the others may find a match elsewhere
        predictions["wrong"] = wrong
    for salt, prediction in predictions.items():
        predicted = dataclasses.replace(plain, drafter=drafter, cache_salt=salt, prediction=prediction)
        tokens, summary, usage = await complete(orchestrator, predicted)
        assert tokens == expected
        if salt == "right":
            assert summary.prediction_cycles > 0
            assert summary.cycles < NUM_TOKENS / 2
            assert usage.accepted_prediction_tokens > NUM_TOKENS / 2
            assert usage.rejected_prediction_tokens == 0
        else:
            assert (usage.accepted_prediction_tokens, summary.cycles) == (0, NUM_TOKENS)
            assert usage.rejected_prediction_tokens > 0


async def test_tokens_name_the_drafter_that_proposed_them_until_they_are_replayed(orchestrator):
    plain = request_of(drafter=DrafterKind.NONE, cache_salt="plain")
    expected, _, _ = await complete(orchestrator, plain)
    request = dataclasses.replace(plain, drafter=DrafterKind.PREDICTION, prediction=tuple(expected))
    request = dataclasses.replace(request, session_id="mine")
    tokens = [token async for chunk in orchestrator.generate(request, ALICE) for token in chunk.tokens]
    by_drafter = Counter((token.origin, token.drafter) for token in tokens)
    assert by_drafter[TokenOrigin.ACCEPTED, DrafterKind.PREDICTION] > NUM_TOKENS / 2
    assert {drafter for origin, drafter in by_drafter if origin is not TokenOrigin.ACCEPTED} == {None}
    again = dataclasses.replace(request, resume_from=0)
    replayed = [token async for chunk in orchestrator.generate(again, ALICE) for token in chunk.tokens]
    assert replayed == [dataclasses.replace(token, drafter=None) for token in tokens]
