"""pydantic-ai: typed output by tool, by format and by prompt, with a tool that the agent runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelSettings, NativeOutput, PromptedOutput, RunContext, UsageLimits
from pydantic_ai.messages import ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ToolOrOutput
from reporting import QUESTION, Weather, check, demand, report

LIMITS = UsageLimits(request_limit=4)

Maker = Callable[..., Any]


def get_weather(city: Literal["Oslo", "Rome"], days: Annotated[int, Field(ge=1, le=9)]) -> str:
    """Look the weather up."""
    return f"{city}, {days} days: sun"


def call_then_answer(context: RunContext[None]) -> ModelSettings:
    """Force the tool's call, then the output: a tiny model would not call, or call for ever."""
    parts = [part for message in context.messages for part in message.parts]
    has_result = any(isinstance(part, ToolReturnPart) for part in parts)
    choice: Any = ToolOrOutput(function_tools=[]) if has_result else ["get_weather"]
    return ModelSettings(tool_choice=choice, parallel_tool_calls=False, max_tokens=256, seed=5)


def calls(result: Any) -> list[str]:
    """Return the names of the tools that were called."""
    parts = [part for message in result.all_messages() for part in message.parts]
    return [part.tool_name for part in parts if isinstance(part, ToolCallPart)]


def run(make: Maker, model: str, output_type: Any, seed: int) -> Any:
    """Return what an agent without tools answers."""
    settings = ModelSettings(seed=seed, max_tokens=256, parallel_tool_calls=False)
    return Agent(make(model), output_type=output_type, model_settings=settings).run_sync(
        QUESTION, usage_limits=LIMITS
    )


@check
def tool_output(make: Maker, model: str) -> None:
    result = run(make, model, Weather, 1)
    demand(isinstance(result.output, Weather) and calls(result) == ["final_result"], result)


@check
def native_output(make: Maker, model: str) -> None:
    result = run(make, model, NativeOutput(Weather), 2)
    demand(isinstance(result.output, Weather) and not calls(result), result)


@check
def union_of_outputs(make: Maker, model: str) -> None:
    class Unknown(BaseModel):
        """The city is unknown."""

        reason: Literal["far", "new"]

    result = run(make, model, [Weather, Unknown], 3)
    demand(isinstance(result.output, (Weather, Unknown)), result)


@check
def prompted_output(make: Maker, model: str) -> None:
    """The server gets `json_object` without the schema, so any object has to do."""

    class Anything(BaseModel, extra="allow"):
        """Some fields."""

    result = run(make, model, PromptedOutput(Anything), 4)
    demand(isinstance(result.output, Anything), result)


@check
def tool_then_tool_output(make: Maker, model: str) -> None:
    agent = Agent(make(model), output_type=Weather, tools=[get_weather], model_settings=call_then_answer)
    result = agent.run_sync(QUESTION, usage_limits=LIMITS)
    demand(isinstance(result.output, Weather), result)
    demand(calls(result) == ["get_weather", "final_result"], calls(result))


@check
def tool_then_native_output(make: Maker, model: str) -> None:
    agent = Agent(
        make(model), output_type=NativeOutput(Weather), tools=[get_weather], model_settings=call_then_answer
    )
    result = agent.run_sync(QUESTION, usage_limits=LIMITS)
    demand(isinstance(result.output, Weather) and calls(result) == ["get_weather"], result)


@check
def tool_then_text(make: Maker, model: str) -> None:
    agent = Agent(make(model), tools=[get_weather], model_settings=call_then_answer)
    result = agent.run_sync(QUESTION, usage_limits=LIMITS)
    demand(isinstance(result.output, str) and calls(result) == ["get_weather"], result)


@check
def tool_then_output_streamed(make: Maker, model: str) -> None:
    agent = Agent(make(model), output_type=Weather, tools=[get_weather], model_settings=call_then_answer)

    async def streamed() -> tuple[Any, list[str]]:
        async with agent.run_stream(QUESTION, usage_limits=LIMITS) as result:
            return await result.get_output(), calls(result)

    output, called = asyncio.run(streamed())
    demand(isinstance(output, Weather) and called == ["get_weather", "final_result"], (output, called))


@check
def responses_api(make: Maker, model: str) -> None:
    for output_type, expected in (
        (Weather, ["get_weather", "final_result"]),
        (NativeOutput(Weather), ["get_weather"]),
    ):
        agent = Agent(
            make(model, OpenAIResponsesModel),
            output_type=output_type,
            tools=[get_weather],
            model_settings=call_then_answer,
        )
        result = agent.run_sync(QUESTION, usage_limits=LIMITS)
        demand(isinstance(result.output, Weather) and calls(result) == expected, result)


def maker(address: str) -> Maker:
    """Return what makes models of the server."""

    def make(model: str, kind: Any = OpenAIChatModel) -> Any:
        return kind(model, provider=OpenAIProvider(base_url=address, api_key="none"))

    return make


if __name__ == "__main__":
    report(maker)
