"""Completions that follow a grammar: valid documents, and the tokens of gamma 0 however they are drafted."""

import asyncio
import json

import pytest

from benchmarks.schemas import WAYS, SchemaMaker, ids_of, is_valid
from gammaray import AsyncClient, FinishReason
from gammaray.errors import InvalidArgumentError
from gammaray.grammar.texts import json_schema_grammar
from gammaray.types import DrafterKind

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.timeout(600)]

PROMPT = "# An example\nexample = "
TABLE = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "is_open": {"type": "boolean"}},
        "required": ["name", "is_open"],
    },
    "minItems": 3,
    "maxItems": 3,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_documents_are_valid_and_equal_in_every_way_to_draft(cluster, temperature):
    maker = SchemaMaker(seed=5)
    async with AsyncClient(cluster.grpc) as client:
        for number in range(6):
            schema = maker.schema()
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


async def test_forced_tokens_are_drafts_without_a_model(cluster):
    async with AsyncClient(cluster.grpc) as client:
        grammar = json_schema_grammar(TABLE)
        made = await client.complete(PROMPT, grammar=grammar, drafter="grammar", temperature=1, seed=4)
    rows = json.loads(made.text)
    assert len(rows) == 3
    assert made.summary.grammar_cycles > 3
    assert made.summary.grammar_cycles + made.summary.plain_cycles == made.summary.cycles
    assert made.summary.accepted_tokens == made.summary.drafted_tokens > 20
    assert {token.drafter for token in made.tokens if token.origin.value == "accepted"} == {
        DrafterKind.GRAMMAR
    }


@pytest.mark.parametrize(
    ("grammar", "got"),
    [
        ("start: a b", "unknown name"),
        ("start: start", "without a text"),
    ],
)
async def test_wrong_grammar_is_refused_by_name(cluster, grammar, got):
    async with AsyncClient(cluster.grpc) as client:
        with pytest.raises(InvalidArgumentError, match=r"^grammar: got") as raised:
            await client.complete(PROMPT, grammar=grammar)
    assert got in str(raised.value)
