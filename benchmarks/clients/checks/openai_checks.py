"""The official openai client: parsed answers, streams of calls, the Responses API."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
from openai import OpenAI
from pydantic import BaseModel, Field
from reporting import QUESTION, Weather, check, demand, report

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
MANY_CALLS = 1000  # tokens; a tiny model makes as many parallel calls as it may


class GetWeather(BaseModel):
    """Look the weather up."""

    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)


@check
def chat_parse(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Weather, max_tokens=128, seed=1
    )
    (choice,) = answer.choices
    demand(choice.finish_reason == "stop" and isinstance(choice.message.parsed, Weather), choice)
    demand(choice.message.refusal is None, choice)


@check
def chat_parse_calls(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model,
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=128,
        seed=2,
    )
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls or []
    demand(choice.finish_reason == "tool_calls" and choice.message.content is None, choice)
    demand(isinstance(call.function.parsed_arguments, GetWeather), call)


@check
def chat_parse_raises_when_cut(client: OpenAI, model: str) -> None:
    try:
        client.chat.completions.parse(model=model, messages=MESSAGES, response_format=Weather, max_tokens=4)
    except openai.LengthFinishReasonError:
        return
    raise AssertionError("a cut answer was parsed")


@check
def chat_stream_response_format(client: OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, response_format=Weather, max_tokens=128, seed=1
    ) as stream:
        events = list(stream)
        message = stream.get_final_completion().choices[0].message
    demand({"content.delta", "content.done"} <= {event.type for event in events}, events)
    deltas = "".join(event.delta for event in events if event.type == "content.delta")
    demand(isinstance(message.parsed, Weather) and deltas == message.content, message)
    whole = client.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Weather, max_tokens=128, seed=1
    )
    demand(whole.choices[0].message.parsed == message.parsed, whole)


@check
def chat_stream_calls(client: OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model,
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice={"type": "function", "function": {"name": "GetWeather"}},
        max_tokens=MANY_CALLS,
        seed=3,
    ) as stream:
        events = list(stream)
        (choice,) = stream.get_final_completion().choices
    calls = choice.message.tool_calls or []
    demand(len(calls) >= 1 and choice.finish_reason == "tool_calls", choice)
    for index, call in enumerate(calls):
        deltas = "".join(
            event.arguments_delta
            for event in events
            if event.type == "tool_calls.function.arguments.delta" and event.index == index
        )
        demand(deltas == call.function.arguments, (deltas, call))
        demand(isinstance(call.function.parsed_arguments, GetWeather), call)


@check
def chat_answers_after_a_result(client: OpenAI, model: str) -> None:
    tools = [openai.pydantic_function_tool(GetWeather)]
    first = client.chat.completions.create(
        model=model, messages=MESSAGES, tools=tools, tool_choice="required", max_tokens=MANY_CALLS, seed=4
    )
    message = first.choices[0].message
    results: Any = [
        {"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in message.tool_calls or []
    ]
    demand(results, message)
    history = [*MESSAGES, message.to_dict(), *results]
    second = client.chat.completions.parse(
        model=model, messages=history, tools=tools, tool_choice="none", response_format=Weather, seed=4
    )
    demand(isinstance(second.choices[0].message.parsed, Weather), second)


@check
def responses_parse(client: OpenAI, model: str) -> None:
    answer = client.responses.parse(
        model=model, input="The weather?", text_format=Weather, max_output_tokens=128, extra_body={"seed": 5}
    )
    demand(answer.status == "completed" and isinstance(answer.output_parsed, Weather), answer)


@check
def responses_stream_text_format(client: OpenAI, model: str) -> None:
    with client.responses.stream(
        model=model, input="The weather?", text_format=Weather, max_output_tokens=128, extra_body={"seed": 6}
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    demand(isinstance(final.output_parsed, Weather) and deltas == final.output_text, final)
    demand([event.sequence_number for event in events] == list(range(len(events))), events)


@check
def responses_parse_calls(client: OpenAI, model: str) -> None:
    answer = client.responses.parse(
        model=model,
        input="The weather?",
        tools=[openai.pydantic_responses_function_tool(GetWeather)],
        tool_choice={"type": "function", "name": "GetWeather"},
        parallel_tool_calls=False,
        max_output_tokens=128,
        extra_body={"seed": 7},
    )
    (call,) = answer.output
    demand(call.type == "function_call" and call.name == "GetWeather", call)
    demand(call.type == "function_call" and isinstance(call.parsed_arguments, GetWeather), call)


@check
def responses_stream_calls(client: OpenAI, model: str) -> None:
    with client.responses.stream(
        model=model,
        input="The weather?",
        tools=[openai.pydantic_responses_function_tool(GetWeather)],
        tool_choice="required",
        max_output_tokens=MANY_CALLS,
        extra_body={"seed": 8},
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    demand(len(final.output) >= 1, final)
    for index, call in enumerate(final.output):
        demand(call.type == "function_call", call)
        deltas = "".join(
            event.delta
            for event in events
            if event.type == "response.function_call_arguments.delta" and event.output_index == index
        )
        demand(call.type == "function_call" and deltas == call.arguments, (deltas, call))
        demand(call.type == "function_call" and GetWeather.model_validate_json(deltas), call)


@check
def responses_continue_after_a_call(client: OpenAI, model: str) -> None:
    first = client.responses.create(
        model=model,
        input="The weather?",
        tools=[openai.pydantic_responses_function_tool(GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=128,
        extra_body={"seed": 9},
    )
    (call,) = first.output
    demand(call.type == "function_call" and json.loads(call.arguments), call)
    second = client.responses.parse(
        model=model,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}],
        text_format=Weather,
        max_output_tokens=128,
        extra_body={"seed": 9},
    )
    demand(second.previous_response_id == first.id and isinstance(second.output_parsed, Weather), second)
    items = client.responses.input_items.list(second.id, order="asc").data
    demand(
        [item.type for item in items] == ["message", "function_call", "function_call_output"],
        items,
    )


if __name__ == "__main__":
    report(lambda address: OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120))
