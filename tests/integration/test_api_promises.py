"""Promises of docs/api.md that need a real orchestrator with real workers, in the order of that page.

An orchestrator in this process serves the demo pair. What the HTTP API alone decides is tested in
tests/unit/orchestrator/api/http.
"""

import asyncio
import json
import re

import grpc
import httpx
import jsonschema
import openai
import pytest

from gammaray.errors import NotFoundError
from gammaray.types import DrafterKind, GenerationRequest
from gammaray.wire.sessions import SessionState
from orchestrator.access.caller import ANONYMOUS
from tests.support.grpc_helpers import generate
from tests.support.http_helpers import CHAT, http_client
from tests.support.workers.service_helpers import complete

pytestmark = [pytest.mark.integration, pytest.mark.slow]

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PROMPT = "def read_lines(path):\n"
GIVEN = {
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 12},
    CHATS: {"messages": CHAT, "max_tokens": 12},
    RESPONSES: {"input": "hi", "max_output_tokens": 12},
}
SCHEMA = {
    "type": "object",
    "properties": {"b": {"type": "integer", "minimum": 0, "maximum": 9}, "a": {"type": "boolean"}},
    "required": ["b", "a"],
    "additionalProperties": False,
}


class Api:
    def __init__(self, orchestrator, http: httpx.AsyncClient) -> None:
        self.orchestrator, self.http = orchestrator, http

    async def post(self, path: str, body: dict, **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body, headers=headers)

    async def served(self, path: str, **body) -> httpx.Response:
        answer = await self.post(path, {**GIVEN[path], **body})
        assert answer.status_code == 200, answer.text
        return answer

    async def complete(self, path: str = COMPLETIONS, **body) -> dict:
        return (await self.served(path, **body)).json()

    async def text(self, **body) -> str:
        return (await self.complete(**body))["choices"][0]["text"]

    async def refused(self, path: str, body: dict) -> dict:
        answer = await self.post(path, {**GIVEN[path], **body})
        assert answer.status_code == 400, (body, answer.text[:300])
        return answer.json()["error"]

    async def events(self, **body) -> list[dict]:
        text = (await self.served(COMPLETIONS, stream=True, **body)).text
        return [json.loads(data) for data in re.findall(r"^data: ({.*)$", text, re.MULTILINE)]


@pytest.fixture
async def api(orchestrator):
    async with http_client(orchestrator) as http:
        yield Api(orchestrator, http)


async def test_request_headers(api):
    late = await api.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 500}, **{"gammaray-timeout-ms": "1"})
    assert late.status_code == 504
    body = {"prompt": "a", "max_tokens": 1}
    for priority, status in (("-10", 200), ("10", 200), ("11", 400), ("-11", 400), ("x", 400)):
        answer = await api.post(COMPLETIONS, body, **{"gammaray-priority": priority})
        assert answer.status_code == status, priority
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = await api.post(COMPLETIONS, body, traceparent=trace)
    assert answer.status_code == 200


LOWEST = {
    "temperature": 0,
    "top_p": 0.001,
    "top_k": -1,
    "repetition_penalty": 0.01,
    "presence_penalty": -2,
    "frequency_penalty": -2,
    "logit_bias": {"5": -100},
    "seed": 0,
}
HIGHEST = {
    "temperature": 100,
    "top_k": 2**31,
    "min_p": 1,
    "repetition_penalty": 100,
    "presence_penalty": 2,
    "frequency_penalty": 2,
    "logit_bias": {str(n): 100 for n in range(300)},
    "stop_token_ids": [7] * 4096,
    "seed": 2**64 - 1,
    "prediction": {"type": "content", "content": "a" * 65_536},
    "prompt_logprobs": 20,
    "logprobs": 20,
}


async def test_outermost_values_of_sampling_fields_are_served(api):
    for values in (LOWEST, HIGHEST):
        assert (await api.complete(**values, max_tokens=1))["usage"]["completion_tokens"] == 1


async def test_allowed_tokens_bias_and_least_tokens_hold(api):
    allowed = [5, 6, 7]
    found = await api.complete(allowed_token_ids=allowed, seed=1)
    assert set(found["gammaray"]["token_ids"]) <= set(allowed)
    found = await api.complete(logit_bias={"9": 100}, temperature=0)
    assert set(found["gammaray"]["token_ids"]) == {9}
    (eos,) = api.orchestrator.tokenizer.eos_token_ids
    ended = await api.complete(logit_bias={str(eos): 100}, temperature=0, max_tokens=5)
    assert (ended["usage"]["completion_tokens"], ended["choices"][0]["finish_reason"]) == (1, "stop")
    least = await api.complete(logit_bias={str(eos): 100}, temperature=0, max_tokens=5, min_tokens=3)
    assert least["usage"]["completion_tokens"] == 4
    on = await api.complete(logit_bias={str(eos): 100}, temperature=0, max_tokens=5, ignore_eos=True)
    assert (on["usage"]["completion_tokens"], on["choices"][0]["finish_reason"]) == (5, "length")


async def test_drawn_seed_is_below_2_to_the_53_and_reproduces_the_tokens(api):
    seeds = []
    for path in GIVEN:
        for _ in range(8):
            found = (await api.complete(path))["gammaray"]
            seeds.append(found["seed"])
        again = (await api.complete(path, seed=found["seed"]))["gammaray"]
        assert again["token_ids"] == found["token_ids"]
    chunks = await complete(api.orchestrator, GenerationRequest(PROMPT, max_tokens=1))
    chunks += (await generate(api.orchestrator, text=PROMPT, max_tokens=1))[0]
    seeds += [chunk.seed for chunk in chunks]
    assert all(0 <= seed < 2**53 for seed in seeds)
    assert len(set(seeds)) == len(seeds)


async def test_samples_are_separate_sessions_and_each_is_its_own_function_of_the_seed(api):
    choices = (await api.complete(n=3, seed=1))["choices"]
    texts = [choice["text"] for choice in choices]
    assert len({choice["gammaray"]["session_id"] for choice in choices}) == len(set(texts)) == 3
    assert await api.text(seed=1) == texts[0]
    streamed = ["", "", ""]
    for event in await api.events(n=3, seed=1):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts


NAMED = {"name": "n", "schema": SCHEMA}
FORMS = [
    {"response_format": {"type": "json_schema", "json_schema": NAMED}},
    {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": True}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA)}},
]


async def test_completion_has_the_form_of_its_schema_written_as_json_dumps_does(api):
    texts = set()
    for form in FORMS:
        (choice,) = (await api.complete(**form, max_tokens=100, seed=3))["choices"]
        value = json.loads(choice["text"])
        jsonschema.validate(value, SCHEMA)
        assert choice["text"] == json.dumps(value)  # a space after comma and colon, no line breaks
        assert list(value) == ["b", "a"]  # the order of the schema
        assert choice["finish_reason"] == "stop"
        texts.add(choice["text"])
    assert len(texts) == 1  # text and seed mean the same, and `strict` changes nothing


async def test_wrong_forms_are_refused_by_name(api):
    for keyword in ({"not": {}}, {"if": {}, "then": {"minLength": 2}}):
        schema = {"type": "object", "properties": {"a": {"type": "string", **keyword}}}
        error = await api.refused(COMPLETIONS, {"structured_outputs": {"json": schema}})
        assert next(iter(keyword)) in error["message"]
    for grammar in ("start: /a/ & /b/", "start: ~/a/", "start: <[5]>"):
        await api.refused(COMPLETIONS, {"structured_outputs": {"grammar": grammar}})
    none_left = {"structured_outputs": {"regex": "a"}, "allowed_token_ids": [0]}
    assert (await api.refused(COMPLETIONS, none_left))["param"] == "structured_outputs"


async def test_form_is_cut_at_max_tokens_and_ends_before_min_tokens(api):
    form = FORMS[0]
    (choice,) = (await api.complete(**form, max_tokens=2))["choices"]
    assert choice["finish_reason"] == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice["text"])
    (choice,) = (await api.complete(**form, max_tokens=100, min_tokens=90))["choices"]
    assert choice["finish_reason"] == "stop"
    json.loads(choice["text"])


async def test_resume_from_token_0_with_prompt_logprobs_is_refused(api):
    body = {"prompt": PROMPT, "max_tokens": 4, "stream": True, "prompt_logprobs": 0}
    answer = await api.post(COMPLETIONS, body)
    session, turn = re.search(r"^id: ([^:]+):([^:]+)", answer.text, re.MULTILINE).groups()
    again = await api.post(COMPLETIONS, body, **{"Last-Event-ID": f"{session}:{turn}:0"})
    assert again.status_code == 409


async def test_options_change_no_token(api):
    text = await api.text(seed=7)
    absent = DrafterKind.HEAD
    error = await api.refused(COMPLETIONS, {"gammaray": {"drafter": absent.value}})
    assert error["param"] == "gammaray.drafter"
    same = (
        {"gamma": 0},
        {"gamma": 64},
        {"gamma": "adaptive", "max_gamma": 64},
        {"max_gamma": 0, "max_nodes": 256},
        *({"drafter": kind.value} for kind in DrafterKind if kind is not absent),
        {"cache_salt": "s" * 64},
        {"stream_tokens": True},
    )
    for options in same:
        assert await api.text(seed=7, gammaray=options) == text, options
    for method in ("coupled", "rejection", "naive", "block"):
        await api.complete(gammaray={"verification": method})


async def test_context_overflow_has_openais_code_and_words(api):
    limit = api.orchestrator.max_context
    long = "word " * (2 * limit)
    for path, body, param in (
        (CHATS, {"messages": [{"role": "user", "content": long}]}, "messages"),
        (CHATS, {"messages": [{"role": "user", "content": long}], "n": 2}, "messages"),
        (COMPLETIONS, {"prompt": long}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * limit}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * limit, "echo": True}, "prompt"),
        (RESPONSES, {"input": long}, "input"),
        (RESPONSES, {"input": "x", "instructions": long}, "input"),
    ):
        for stream in (False, True):
            error = await api.refused(path, {**body, "stream": stream})
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert error["type"] == "invalid_request_error"
            # What LiteLLM and LangChain look for.
            assert f"This model's maximum context length is {limit} tokens" in error["message"]
            assert "Input tokens exceed the configured limit" in error["message"]
    _, context = await generate(api.orchestrator, text=long)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (context.error.field, context.error.allowed.split()[:3]) == (
        "prompt",
        ["at", "most", str(limit - 1)],
    )


async def test_session_that_does_not_exist_has_its_own_code(api):
    body = {"prompt": "a", "stream": True}
    gone = await api.post(COMPLETIONS, body, **{"Last-Event-ID": "no-such-session:0:1"})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "session_not_found")


async def test_grpc_and_http_give_the_same_tokens(api):
    chunks, _ = await generate(api.orchestrator, text=PROMPT, max_tokens=12, sampling={"seed": 9})
    assert "".join(chunk.text for chunk in chunks) == await api.text(seed=9)


RESPONSE = {"model": "demo", "max_output_tokens": 24, "extra_body": {"seed": 3}}


@pytest.fixture
def client(api):
    return openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="none", http_client=api.http, max_retries=0
    )


async def test_stream_get_and_session_agree(api, client):
    async with client.responses.stream(input="def read(path):", **RESPONSE) as stream:
        found = [event async for event in stream]
    last = found[-1].response
    assert last.usage.output_tokens == len(last.gammaray["token_ids"]) > 0
    stored = await client.responses.retrieve(last.id)
    assert stored.to_dict() == last.to_dict()
    info, tokens = await api.orchestrator.sessions.get(last.id, ANONYMOUS)
    assert info.state is SessionState.FINISHED
    assert [token.token_id for token in tokens] == last.gammaray["token_ids"]
    deltas = [event.delta for event in found if event.type == "response.output_text.delta"]
    assert "".join(deltas) == last.output_text
    whole = await client.responses.create(input="def read(path):", **RESPONSE)
    assert whole.output_text == last.output_text
    await client.responses.delete(last.id)
    with pytest.raises(NotFoundError):
        await api.orchestrator.sessions.get(last.id, ANONYMOUS)


async def test_deleted_while_it_runs_the_response_fails(api, client):
    options = {**RESPONSE, "max_output_tokens": 400, "extra_body": {"seed": 3, "min_tokens": 400}}
    begun = asyncio.get_running_loop().create_future()
    create = api.orchestrator.responses.create

    async def noting(name, stored, room):
        await create(name, stored, room)
        begun.set_result(name)

    api.orchestrator.responses.create = noting
    running_one = asyncio.create_task(client.responses.create(input="a", **options))
    name = await asyncio.wait_for(begun, 30)
    assert (await client.responses.retrieve(name)).status == "in_progress"
    await client.responses.delete(name)
    with pytest.raises(openai.APIStatusError):
        await asyncio.wait_for(running_one, 60)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(name)
