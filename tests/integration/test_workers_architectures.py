"""Each served architecture drafts for each, on workers."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from gammaray.types import SamplingParams
from tests.support.engine_helpers import SUPPORTED, random_tokens, tiny_model
from tests.support.vocabulary_helpers import CODE, byte_level
from tests.support.workers.workers_helpers import Driver, running

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PROMPT = random_tokens(7, seed=3)
LENGTH = 10
GAMMA = 3


async def test_each_architecture_drafts_for_each_and_the_tokens_are_those_of_plain_decoding(tmp_path):
    tokenizer = byte_level(CODE, 300)
    models = {arch: tiny_model(arch, tmp_path, seed=1, vocab_size=len(tokenizer)) for arch in SUPPORTED}
    for directory in models.values():
        tokenizer.save_pretrained(directory)
    params = SamplingParams(temperature=0.8, seed=7)
    async with AsyncExitStack() as stack:
        drafts = {}
        for arch, directory in models.items():
            settings = {"target": str(models["llama"]), "draft_ahead": False}
            drafts[arch], _ = await stack.enter_async_context(running("draft", directory, **settings))
            assert (await drafts[arch].info()).vocab_size == len(tokenizer)
        for target, directory in models.items():
            async with running("target", directory) as (verifier, _):
                plain = await Driver(verifier, None, PROMPT, params, session_id="plain").generate(LENGTH)
                for draft, link in drafts.items():
                    name = f"{target}-{draft}"
                    driver = Driver(verifier, link, PROMPT, params, gamma=GAMMA, session_id=name)
                    assert await driver.generate(LENGTH) == plain, name
                    if draft == target:
                        assert driver.accepted >= LENGTH / 2, name
