"""Forced tool calls over HTTP, with an orchestrator, the demo pair in worker processes, and Redis."""

from __future__ import annotations

import json

import httpx
import jsonschema
import pytest

from orchestrator.api.http.server.app import create_app
from tests.support.http_helpers import CHAT
from tests.support.workers.service_helpers import running

pytestmark = pytest.mark.integration

PATH = "/v1/chat/completions"
SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "unit": {"enum": ["c", "f"]},
            "days": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": 9},
                "maxItems": 3,
            },
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]


@pytest.fixture
async def http(redis_server, workers):
    async with running(redis_server, *workers) as orchestrator:
        transport = httpx.ASGITransport(create_app(orchestrator))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


async def asked(http, **body):
    body = {"messages": CHAT, "tools": TOOLS, "tool_choice": "required", "max_tokens": 400, **body}
    answer = await http.post(PATH, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def check(calls):
    assert calls
    for call in calls:
        name = call["function"]["name"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[name])


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [0, 4, "adaptive"])
async def test_required_call_is_valid_and_the_same_with_every_speculation(http, gamma):
    for seed, temperature in ((1, 0), (2, 1), (3, 1)):
        body = {"seed": seed, "temperature": temperature, "parallel_tool_calls": False}
        plain = (await asked(http, **body, gammaray={"gamma": 0})).json()["choices"][0]
        (choice,) = (await asked(http, **body, gammaray={"gamma": gamma})).json()["choices"]
        names = [call["function"] for call in choice["message"]["tool_calls"]]
        assert names == [call["function"] for call in plain["message"]["tool_calls"]]
        assert (len(names), choice["message"]["content"], choice["finish_reason"]) == (1, None, "tool_calls")
        check(choice["message"]["tool_calls"])


def read(text):
    """Return the events of a stream: id, and the choice."""
    for event in text.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in event.split("\n"))
        if lines["data"] != "[DONE]":
            yield lines.get("id"), json.loads(lines["data"])["choices"][0]


def joined(choices):
    calls = []
    for choice in choices:
        for piece in choice["delta"].get("tool_calls", ()):
            if piece["index"] == len(calls):
                calls.append([piece["id"], piece["function"]["name"], ""])
            else:
                assert piece["index"] == len(calls) - 1
                calls[-1][2] += piece["function"]["arguments"]
    return calls


async def test_stream_resumed_after_any_event_has_the_same_calls(http):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    body = {"stream": True, "seed": 7, "tool_choice": choice, "parallel_tool_calls": False}
    body["gammaray"] = {"gamma": 0}
    events = list(read((await asked(http, **body)).text))
    whole = joined(choice for _, choice in events)
    assert len(whole) == 1
    json.loads(whole[0][2])
    places = [place for place, (event_id, _) in enumerate(events) if event_id]
    assert len(places) > 3
    for place in places[:-1]:
        request = {"messages": CHAT, "tools": TOOLS, "max_tokens": 400, **body}
        answer = await http.post(PATH, json=request, headers={"Last-Event-ID": events[place][0]})
        again = [choice for _, choice in events[: place + 1]] + [choice for _, choice in read(answer.text)]
        assert joined(again) == whole
        assert again[-1]["finish_reason"] == "tool_calls"
