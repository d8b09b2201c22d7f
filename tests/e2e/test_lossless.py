"""The cluster emits the tokens of the target alone, and those of gamma 0 by a grammar."""

import asyncio
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.schemas import WAYS, ids_of, is_valid, random_schema
from gammaray import AsyncClient, FinishReason
from gammaray.grammar.texts import json_schema_grammar
from services.demo_pair import TARGET_DIR
from tests.chaos.load import PROMPTS

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.timeout(600)]

EXAMPLE = "# An example\nexample = "


@pytest.fixture(scope="module")
def greedy():
    """Return the target's own greedy continuations, 48 tokens each."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR)
    model = AutoModelForCausalLM.from_pretrained(TARGET_DIR, dtype=torch.float32)
    expected = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=48)
        expected.append(out[0, ids.shape[1] :].tolist())
    return expected


@pytest.mark.parametrize("gamma", [0, 4, "adaptive"])
async def test_greedy_equals_transformers_generate(cluster, greedy, gamma):
    async with AsyncClient(cluster.grpc) as client:
        runs = [client.complete(prompt, temperature=0, max_tokens=48, gamma=gamma) for prompt in PROMPTS]
        made = await asyncio.gather(*runs)
    assert [[token.token_id for token in one.tokens] for one in made] == greedy


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_documents_are_valid_and_equal_in_every_way_to_draft(cluster, temperature):
    draw = random.Random(5)
    async with AsyncClient(cluster.grpc) as client:
        for number in range(6):
            schema = random_schema(draw)
            asked = {"grammar": json_schema_grammar(schema), "temperature": temperature, "seed": number}
            asked["max_tokens"] = 300
            plain = await client.complete(EXAMPLE, **asked, gamma=0)
            ways = (client.complete(EXAMPLE, **asked, **options) for options in WAYS.values())
            for way, made in zip(WAYS, await asyncio.gather(*ways), strict=True):
                assert ids_of(made) == ids_of(plain), (way, schema)
            if plain.finish_reason is FinishReason.STOP:
                assert is_valid(plain.text, schema), schema
            assert {token.drafter for token in plain.tokens} == {None}
