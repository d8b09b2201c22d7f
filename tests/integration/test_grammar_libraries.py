"""Sessions with a grammar in clusters whose processes have several versions of llguidance."""

import dataclasses
import re

import pytest
from llguidance import LLMatcher

from gammaray.errors import FailedPreconditionError
from gammaray.grammar.matcher import grammar_identity
from tests.support.workers.resume_helpers import first_chunks, request_of, resumed, two_orchestrators
from tests.support.workers.scripted_workers import scripted
from tests.support.workers.service_helpers import SEEDED, complete, running, text_of, tokens_of

pytestmark = [pytest.mark.integration]

FOREIGN = "llguidance-1.9.1"
DEMO = {"vocab_size": 2048, "max_context": 1024}
GRAMMAR = "start: /[a-z]*/"


async def test_request_with_a_grammar_is_refused_at_once(redis_server):
    async with (
        scripted("target", grammars=FOREIGN, **DEMO) as target,
        running(redis_server, target.address, "", worker_wait_s=300.0) as orchestrator,
    ):
        request = request_of(max_tokens=4)
        sampling = dataclasses.replace(request.sampling, grammar=GRAMMAR)
        asked = dataclasses.replace(request, session_id="grammar", sampling=sampling, ignore_eos=False)
        with pytest.raises(FailedPreconditionError, match=f"{FOREIGN}.*{grammar_identity()}"):
            await complete(orchestrator, asked)
        assert target.blocks == []
        assert len(tokens_of(await complete(orchestrator, request))) == 4


LETTERS = "start: /[a-z]{400}/"


async def begun_session(orchestrator):
    """Return a request with a grammar, and its first chunks."""
    request = request_of(max_tokens=60, ignore_eos=False)
    request = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, grammar=LETTERS))
    return request, await first_chunks(orchestrator, request, 3)


def other_version(monkeypatch, compiled):
    """Let this process, an orchestrator's, compile each grammar as another one."""
    from_lark = LLMatcher.grammar_from_lark
    monkeypatch.setattr(LLMatcher, "grammar_from_lark", lambda text: from_lark(compiled))


@pytest.mark.parametrize("by_name", [False, True], ids=["same request", "only the name"])
async def test_session_resumes_where_its_tokens_follow_the_grammar(
    redis_server, workers, monkeypatch, by_name
):
    async with two_orchestrators(redis_server, workers) as (one, other):
        request, chunks = await begun_session(one)
        again = resumed(request, chunks)
        if by_name:
            again = dataclasses.replace(again, prompt=(), sampling=SEEDED)
        other_version(monkeypatch, "start: /[a-z0-9]{400}/")
        rest = await complete(other, again)
        assert len(tokens_of(chunks)) < len(tokens_of([*chunks, *rest])) == 60
        assert re.fullmatch("[a-z]+", text_of([*chunks, *rest]))


async def test_session_is_refused_where_its_tokens_do_not_follow_the_grammar(
    redis_server, workers, monkeypatch
):
    async with two_orchestrators(redis_server, workers) as (one, other):
        request, chunks = await begun_session(one)
        with monkeypatch.context() as patch:
            other_version(patch, "start: /[0-9]{400}/")
            with pytest.raises(FailedPreconditionError, match=r"tokens .* do not follow it with llguidance-"):
                await complete(other, resumed(request, chunks))
        rest = await complete(one, resumed(request, chunks))  # it is not lost
        assert re.fullmatch("[a-z]+", text_of([*chunks, *rest]))
