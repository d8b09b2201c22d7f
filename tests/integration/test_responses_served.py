"""The Responses API over a real orchestrator: sessions, caches and stored responses agree."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from gammaray.errors import NotFoundError
from gammaray.wire.sessions import SessionState
from orchestrator.access.caller import ANONYMOUS
from orchestrator.api.http.server.app import create_app
from tests.support.workers.service_helpers import running

pytestmark = pytest.mark.integration

OPTIONS = {"model": "demo", "max_output_tokens": 24, "extra_body": {"seed": 3}}


@asynccontextmanager
async def served(redis_server, workers):
    async with running(redis_server, *workers) as orchestrator:
        transport = httpx.ASGITransport(create_app(orchestrator))
        http = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        async with openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0
        ) as client:
            yield orchestrator, client


@pytest.mark.slow
async def test_stream_get_and_session_agree(redis_server, workers):
    async with served(redis_server, workers) as (orchestrator, client):
        async with client.responses.stream(input="def read(path):", **OPTIONS) as stream:
            found = [event async for event in stream]
        last = found[-1].response
        assert last.usage.output_tokens == len(last.gammaray["token_ids"]) > 0
        stored = await client.responses.retrieve(last.id)
        assert stored.to_dict() == last.to_dict()
        info, tokens = await orchestrator.sessions.get(last.id, ANONYMOUS)
        assert info.state is SessionState.FINISHED
        assert [token.token_id for token in tokens] == last.gammaray["token_ids"]
        deltas = [event.delta for event in found if event.type == "response.output_text.delta"]
        assert "".join(deltas) == last.output_text
        whole = await client.responses.create(input="def read(path):", **OPTIONS)
        assert whole.output_text == last.output_text
        await client.responses.delete(last.id)
        with pytest.raises(NotFoundError):
            await orchestrator.sessions.get(last.id, ANONYMOUS)


async def test_next_response_reuses_the_cache_of_the_one_before(redis_server, workers):
    async with served(redis_server, workers) as (_, client):
        text = "Write a function that reads the lines of a file. " * 4
        first = await client.responses.create(input=text, **OPTIONS)
        second = await client.responses.create(input="And now?", previous_response_id=first.id, **OPTIONS)
        assert second.usage.input_tokens > first.usage.input_tokens
        assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens // 2
        items = [
            {"role": "user", "content": text},
            *first.to_dict()["output"],
            {"role": "user", "content": "And now?"},
        ]
        by_items = await client.responses.create(input=items, **OPTIONS)
        assert by_items.output_text == second.output_text


async def test_deleted_while_it_runs_the_response_fails(redis_server, workers):
    options = {**OPTIONS, "max_output_tokens": 400, "extra_body": {"seed": 3, "min_tokens": 400}}
    async with served(redis_server, workers) as (orchestrator, client):
        begun = asyncio.Event()
        names: list[str] = []
        create = orchestrator.responses.create

        async def noting(name, stored, room):
            await create(name, stored, room)
            names.append(name)
            begun.set()

        orchestrator.responses.create = noting
        running_one = asyncio.create_task(client.responses.create(input="a", **options))
        await asyncio.wait_for(begun.wait(), 30)
        assert (await client.responses.retrieve(names[0])).status == "in_progress"
        await client.responses.delete(names[0])
        with pytest.raises(openai.APIStatusError):
            await asyncio.wait_for(running_one, 60)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(names[0])
