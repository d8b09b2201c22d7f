"""instructor: response models by tools and by schema, whole, streamed, and of the Responses API.

Its mode PARALLEL_TOOLS leaves the call to the model, which a tiny one does not make: it is not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import instructor
from instructor import Mode
from openai import OpenAI
from reporting import QUESTION, Weather, check, demand, report

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
OPTIONS: Any = {"messages": MESSAGES, "max_retries": 0, "max_tokens": 256}

Maker = Callable[..., Any]


@check
def tools(make: Maker, model: str) -> None:
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT):
        answer = make(mode).create(model=model, response_model=Weather, seed=1, **OPTIONS)
        demand(isinstance(answer, Weather), (mode, answer))


@check
def json_schema(make: Maker, model: str) -> None:
    answer, raw = make(Mode.JSON_SCHEMA).create_with_completion(
        model=model, response_model=Weather, seed=3, **OPTIONS
    )
    demand(isinstance(answer, Weather) and raw.choices[0].finish_reason == "stop", (answer, raw))


@check
def partial_stream(make: Maker, model: str) -> None:
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        pieces = list(make(mode).create_partial(model=model, response_model=Weather, seed=4, **OPTIONS))
        demand(len(pieces) > 1 and Weather.model_validate(pieces[-1].model_dump()), (mode, pieces))


@check
def responses_tools(make: Maker, model: str) -> None:
    answer = make(Mode.RESPONSES_TOOLS).create(
        model=model, messages=MESSAGES, response_model=Weather, max_retries=0, max_output_tokens=256
    )
    demand(isinstance(answer, Weather), answer)


@check
def from_provider(make: Maker, model: str) -> None:
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        client = make(mode, provider=f"openai/{model}")
        demand(
            isinstance(answer := client.create(response_model=Weather, seed=6, **OPTIONS), Weather), answer
        )


def maker(address: str) -> Maker:
    """Return what makes clients of the server."""

    def make(mode: Mode, provider: str | None = None) -> Any:
        if provider is not None:
            return instructor.from_provider(provider, mode=mode, base_url=address, api_key="none")
        return instructor.from_openai(OpenAI(base_url=address, api_key="none", max_retries=0), mode=mode)

    return make


if __name__ == "__main__":
    report(maker)
