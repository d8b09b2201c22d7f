"""Forced tool calls through the official openai client's parsers and stream helpers."""

from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.timeout(600)]

MESSAGES = [{"role": "user", "content": "What is the weather in Oslo?"}]
MANY_CALLS = 1000  # tokens; a tiny model makes as many parallel calls as it may


class GetWeather(BaseModel):
    """Look the weather up."""

    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)


class Weather(BaseModel):
    """What is asked for."""

    city: Literal["Oslo", "Rome"]
    degrees: int = Field(ge=-40, le=50)


TOOL = openai.pydantic_function_tool(GetWeather)
FLAT_TOOL = {"type": "function", **TOOL["function"]}
NAMED = {"type": "function", "function": {"name": "GetWeather"}}
CHAT = {"model": "", "messages": MESSAGES, "tools": [TOOL], "seed": 1}
RESPONSE = {"model": "", "input": "Weather?", "tools": [FLAT_TOOL], "extra_body": {"seed": 2}}


@pytest.fixture
def client(cluster):
    with cluster.openai() as client:
        yield client


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_named_call_is_one_and_parsed(client, seed):
    answer = client.chat.completions.parse(**{**CHAT, "seed": seed}, tool_choice=NAMED, max_tokens=128)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert isinstance(call.function.parsed_arguments, GetWeather)


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


def test_result_of_a_call_is_followed_by_an_answer_in_a_format(client):
    called = client.chat.completions.create(**CHAT, tool_choice=NAMED, max_tokens=128).choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "sun"}
    answer = client.chat.completions.parse(
        **{**CHAT, "messages": [*MESSAGES, called.to_dict(), result]},
        tool_choice="none",
        response_format=Weather,
        max_tokens=128,
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)


def test_calls_of_streamed_responses_and_what_follows_them(client):
    options = {**RESPONSE, "tool_choice": "required", "max_output_tokens": MANY_CALLS}
    with client.responses.stream(**options) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.status == "completed"
    for index, call in enumerate(final.output):
        assert (call.type, call.name) == ("function_call", "GetWeather")
        text = "".join(
            event.delta
            for event in events
            if event.type == "response.function_call_arguments.delta" and event.output_index == index
        )
        assert text == call.arguments
        assert GetWeather.model_validate_json(text)
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in final.output
    ]
    after = client.responses.parse(
        model="",
        input=results,
        previous_response_id=final.id,
        text_format=Weather,
        max_output_tokens=128,
        extra_body={"seed": 2},
    )
    assert isinstance(after.output_parsed, Weather)
    kinds = [item.type for item in client.responses.input_items.list(after.id, order="asc", limit=100)]
    assert kinds == ["message", *["function_call"] * len(results), *["function_call_output"] * len(results)]


def test_named_call_of_a_response_is_one_and_parsed(client):
    options = {**RESPONSE, "tool_choice": {"type": "function", "name": "GetWeather"}}
    answer = client.responses.parse(**options, max_output_tokens=128)
    (call,) = answer.output
    assert GetWeather.model_validate(call.parsed_arguments)
