"""LangChain's chat model of OpenAI's API: structured output in each method, tools, agents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import Field
from reporting import QUESTION, Weather, check, demand, report

ASKED: Any = {"messages": [HumanMessage(QUESTION)]}

Maker = Callable[..., ChatOpenAI]


@tool
def get_weather(city: Literal["Oslo", "Rome"], days: Annotated[int, Field(ge=1, le=9)]) -> str:
    """Look the weather up."""
    return f"{city}, {days} days: sun"


def steered(**then: Any) -> Any:
    """Return a middleware that forces one call at first, and overrides `then` once there is its result.

    A tiny model would not call by itself, or call for ever where a grammar leaves it the choice.
    """

    @wrap_model_call
    def steer(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> Any:
        if any(isinstance(message, ToolMessage) for message in request.messages):
            return handler(request.override(**then))
        forced = {"tool_choice": "get_weather", "model_settings": {"parallel_tool_calls": False}}
        return handler(request.override(**forced, response_format=None))

    return steer


@check
def structured_json_schema(make: Maker, model: str) -> None:
    for options in ({}, {"strict": True}):
        chat = make(model=model, seed=1).with_structured_output(
            Weather, method="json_schema", include_raw=True, **options
        )
        answer: Any = chat.invoke(QUESTION)
        demand(isinstance(answer["parsed"], Weather) and answer["parsing_error"] is None, answer)


@check
def structured_function_calling(make: Maker, model: str) -> None:
    chat = make(model=model, seed=3).with_structured_output(
        Weather, method="function_calling", include_raw=True
    )
    answer: Any = chat.invoke(QUESTION)
    demand(isinstance(answer["parsed"], Weather) and len(answer["raw"].tool_calls) == 1, answer)


@check
def structured_stream(make: Maker, model: str) -> None:
    for method in ("json_schema", "function_calling"):
        chat = make(model=model, seed=4).with_structured_output(Weather, method=method)
        pieces = list(chat.stream(QUESTION))
        demand(isinstance(pieces[-1], Weather) and pieces[-1] == chat.invoke(QUESTION), (method, pieces))


@check
def structured_responses_api(make: Maker, model: str) -> None:
    for method in ("json_schema", "function_calling"):
        chat = make(model=model, use_responses_api=True).with_structured_output(Weather, method=method)
        demand(isinstance(answer := chat.invoke(QUESTION), Weather), (method, answer))


@check
def bound_tools_streamed(make: Maker, model: str) -> None:
    chat = make(model=model, seed=5).bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    whole = None
    for piece in chat.stream(QUESTION):
        whole = piece if whole is None else whole + piece
    demand(isinstance(whole, AIMessageChunk) and not whole.invalid_tool_calls, whole)
    calls = whole.tool_calls if isinstance(whole, AIMessageChunk) else []
    demand([call["name"] for call in calls] == ["get_weather"], whole)
    demand(calls[0]["args"] == chat.invoke(QUESTION).tool_calls[0]["args"], calls)


@check
def call_or_answer(make: Maker, model: str) -> None:
    """With a format and tools the model chooses, and either choice is valid."""
    chat = make(model=model, seed=6).bind_tools(
        [get_weather], response_format=Weather, strict=True, parallel_tool_calls=False
    )
    for question in (QUESTION, "Hello"):
        answer: Any = chat.invoke(question)
        if answer.tool_calls:
            demand(get_weather.invoke(answer.tool_calls[0]["args"]), answer)
        else:
            demand(isinstance(answer.additional_kwargs["parsed"], Weather), answer)


@check
def agent_calls_a_tool(make: Maker, model: str) -> None:
    agent = create_agent(make(model=model, seed=7), [get_weather], middleware=[steered()])
    messages = agent.invoke(ASKED, {"recursion_limit": 10})["messages"]
    demand([message.type for message in messages] == ["human", "ai", "tool", "ai"], messages)
    demand(messages[2].text.endswith("days: sun") and messages[3].text, messages)


@check
def agent_with_tool_strategy(make: Maker, model: str) -> None:
    middleware = [steered(tools=[], model_settings={"parallel_tool_calls": False})]
    agent = create_agent(
        make(model=model, seed=8), [get_weather], middleware=middleware, response_format=ToolStrategy(Weather)
    )
    answer = agent.invoke(ASKED, {"recursion_limit": 10})
    demand(isinstance(answer["structured_response"], Weather), answer)
    names = [message.name for message in answer["messages"] if message.type == "tool"]
    demand(names == ["get_weather", "Weather"], answer)


@check
def agent_with_provider_strategy(make: Maker, model: str) -> None:
    middleware = [steered(model_settings={"tool_choice": "none"})]
    agent = create_agent(
        make(model=model, seed=9),
        [get_weather],
        middleware=middleware,
        response_format=ProviderStrategy(Weather),
    )
    answer = agent.invoke(ASKED, {"recursion_limit": 10})
    demand(isinstance(answer["structured_response"], Weather), answer)
    demand([message.type for message in answer["messages"]] == ["human", "ai", "tool", "ai"], answer)


def maker(address: str) -> Maker:
    """Return what makes chat models of the server."""

    def make(**options: Any) -> ChatOpenAI:
        return ChatOpenAI(
            base_url=address, api_key="none", max_retries=0, timeout=120, max_tokens=1000, **options
        )

    return make


if __name__ == "__main__":
    report(maker)
