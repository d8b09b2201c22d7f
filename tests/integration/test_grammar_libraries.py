"""Target workers that compute other masks than the orchestrator get no session with a grammar."""

from __future__ import annotations

import dataclasses

import pytest

from gammaray.errors import FailedPreconditionError
from gammaray.grammar.identity import grammar_identity
from tests.support.engine_helpers import tiny_model
from tests.support.workers.resume_helpers import request_of
from tests.support.workers.scripted_workers import scripted
from tests.support.workers.service_helpers import complete, tokens_of
from tests.support.workers.service_helpers import running as orchestrating
from tests.support.workers.workers_helpers import running

pytestmark = [pytest.mark.integration]

FOREIGN = "f" * 64 + "/llguidance-1.7.6"
DEMO = {"vocab_size": 2048, "max_context": 1024}
GRAMMAR = "start: /[a-z]*/"


async def test_request_with_a_grammar_is_refused_at_once(redis_server):
    async with (
        scripted("target", grammars=FOREIGN, **DEMO) as target,
        orchestrating(redis_server, target.address, "", worker_wait_s=300.0) as orchestrator,
    ):
        request = request_of(max_tokens=4)
        sampling = dataclasses.replace(request.sampling, grammar=GRAMMAR)
        asked = dataclasses.replace(request, session_id="grammar", sampling=sampling, ignore_eos=False)
        with pytest.raises(FailedPreconditionError, match=f"{FOREIGN[:12]}.*{grammar_identity()[:12]}"):
            await complete(orchestrator, asked)
        assert target.blocks == []
        assert len(tokens_of(await complete(orchestrator, request))) == 4


async def test_target_worker_tells_its_library(tmp_path):
    async with running("target", tiny_model("llama", tmp_path, seed=1)) as (link, _):
        assert (await link.info()).grammar_identity == grammar_identity()
