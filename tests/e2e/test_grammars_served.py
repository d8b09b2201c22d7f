"""Completions that follow a grammar: valid documents, and the tokens of gamma 0 however they are drafted."""

import asyncio
import random

import pytest

from benchmarks.schemas import WAYS, ids_of, is_valid, random_schema
from gammaray import AsyncClient, FinishReason
from gammaray.grammar.texts import json_schema_grammar

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.timeout(600)]

PROMPT = "# An example\nexample = "


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_documents_are_valid_and_equal_in_every_way_to_draft(cluster, temperature):
    draw = random.Random(5)
    async with AsyncClient(cluster.grpc) as client:
        for number in range(6):
            schema = random_schema(draw)
            asked = {
                "grammar": json_schema_grammar(schema),
                "max_tokens": 300,
                "temperature": temperature,
                "seed": number,
            }
            plain = await client.complete(PROMPT, **asked, gamma=0)
            ways = (client.complete(PROMPT, **asked, **options) for options in WAYS.values())
            for way, made in zip(WAYS, await asyncio.gather(*ways), strict=True):
                assert ids_of(made) == ids_of(plain), (way, schema)
            if plain.finish_reason is FinishReason.STOP:
                assert is_valid(plain.text, schema), schema
            assert {token.drafter for token in plain.tokens} == {None}
