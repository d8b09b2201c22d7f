"""Calls of the Responses API over a scripted orchestrator."""

import json
import re

import httpx
import openai

from tests.support.http_helpers import http_client
from tests.support.openapi_helpers import check_answer, document, validator

PATH = "/v1/responses"


def client(backend) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="none", http_client=http_client(backend), max_retries=0
    )


async def respond(backend, **body) -> httpx.Response:
    async with http_client(backend) as http:
        return await http.post(PATH, json=body)


async def get(backend, path: str, method: str = "GET", **query) -> httpx.Response:
    async with http_client(backend) as http:
        return await http.request(method, f"{PATH}/{path}", params=query)


def parsed_events(text: str) -> list[dict]:
    """Return the events of a stream, checked against the OpenAPI document."""
    *parts, end = text.split("\n\n")
    assert end == ""
    content = document()["paths"][PATH]["post"]["responses"]["200"]["content"]
    check = validator(content["text/event-stream"]["schema"]["properties"]["data"]["contentSchema"])
    events = []
    for part in parts:
        match = re.fullmatch(r"event: (\S+)\ndata: (.*)", part)
        assert match is not None, part
        event = json.loads(match[2])
        assert event["type"] == match[1]
        check.validate(event)
        events.append(event)
    return events


async def events(backend, **body) -> list[dict]:
    answer = await respond(backend, stream=True, **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return parsed_events(answer.text)


def check_response(answer: httpx.Response) -> dict:
    assert answer.status_code == 200, answer.text
    check_answer(PATH, answer.json())
    return answer.json()
