"""Structured output and forced calls: the official openai client's parsers and streams, the SDK's objects."""

import asyncio
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from gammaray import AsyncClient, InvalidArgumentError

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.timeout(600)]

MESSAGES = [{"role": "user", "content": "What is the weather in Oslo?"}]
MANY_CALLS = 1000  # tokens; a tiny model makes as many parallel calls as it may


class GetWeather(BaseModel):
    """Look the weather up."""

    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)


class Part(BaseModel):
    kind: str = Field(pattern="^[a-z]{1,8}$")
    size: int = Field(ge=0, le=99)


class Machine(BaseModel):
    name: str = Field(max_length=10)
    is_on: bool
    parts: list[Part] = Field(max_length=2)


TOOL = openai.pydantic_function_tool(GetWeather)
CHAT = {"model": "", "messages": MESSAGES, "tools": [TOOL], "seed": 1}


@pytest.fixture
def client(cluster):
    with cluster.openai() as client:
        yield client


def test_streamed_calls_are_those_of_the_whole_answer(client):
    options = {**CHAT, "tool_choice": "required", "max_tokens": MANY_CALLS}
    whole = client.chat.completions.parse(**options).choices[0].message.tool_calls
    with client.chat.completions.stream(**options) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        (choice,) = stream.get_final_completion().choices
    calls = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert len({call.id for call in calls}) == len(calls) >= 1
    for index, call in enumerate(calls):
        assert isinstance(call.function.parsed_arguments, GetWeather)
        text = "".join(delta.arguments_delta for delta in deltas if delta.index == index)
        assert text == call.function.arguments
    assert [call.function.arguments for call in calls] == [call.function.arguments for call in whole]


async def test_sdk_parses_and_streams(cluster):
    async with AsyncClient(cluster.grpc) as client:
        options = {"json_schema": Machine, "max_tokens": 300, "seed": 5, "temperature": 0.8}
        whole, again = await asyncio.gather(
            client.complete("example = ", **options), client.complete("example = ", **options, gamma=0)
        )
        streamed = [chunk.text async for chunk in client.generate("example = ", **options)]
        assert isinstance(whole.parsed, Machine)
        assert whole.text == again.text == "".join(streamed)
        assert (await client.complete("example = ", choice=["a", "b"], max_tokens=5)).text in ("a", "b")
        with pytest.raises(InvalidArgumentError, match=r"^json_schema\.not: got not"):
            await client.complete("example = ", json_schema={"not": {}})
