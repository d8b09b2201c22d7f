"""An HTTP proxy that plants faults between `gammaray audit` and a real server."""

from __future__ import annotations

import asyncio
import json
import math
import random
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response

Body = dict[str, Any]


@dataclass
class Fault:
    """A planted fault.

    Args:
        check: The check that must find it.
        request: Changes a request on its way to the server.
        answer: Changes a whole answer; streams are made of whole answers, token by token.
        stream: Changes the texts of a stream's pieces.
        share: Share of sampled tokens that are replaced by the most likely one; the rest of the text follows
            from the replaced token.
    """

    check: str
    request: Callable[[Body], None] = lambda body: None
    answer: Callable[[Body, Body], None] = lambda body, answer: None
    stream: Callable[[list[str]], None] = lambda pieces: None
    share: float = 0.0


def without(name: str) -> Callable[[Body], None]:
    return lambda body: body.pop(name, None)


def _colder(body: Body) -> None:
    body["temperature"] = body.get("temperature", 1) * 0.95


def _equal_choices(body: Body, answer: Body) -> None:
    for choice in answer["choices"]:
        choice |= {**answer["choices"][0], "index": choice["index"]}


def _zeros(body: Body, answer: Body) -> None:
    for choice in answer["choices"]:
        found = choice["logprobs"] or {"token_logprobs": []}
        found["token_logprobs"] = [lp if i % 3 else 0.0 for i, lp in enumerate(found["token_logprobs"])]


def _one_more(body: Body) -> None:
    body["max_tokens"] += 1


def _one_counted_more(body: Body, answer: Body) -> None:
    answer["usage"]["completion_tokens"] += 1
    answer["usage"]["total_tokens"] += 1


def _without_a_piece(pieces: list[str]) -> None:
    pieces[len(pieces) // 2] = ""


FAULTS = {
    "temperature 5 % too low": Fault("law", _colder),
    "2 % of tokens are the most likely ones": Fault("law", share=0.02),
    "top_p ignored": Fault("top-p", without("top_p")),
    "top_k ignored": Fault("top-k", without("top_k")),
    "min_p ignored": Fault("min-p", without("min_p")),
    "seed ignored": Fault("seed", without("seed")),
    "choices equal": Fault("choices", answer=_equal_choices),
    "logprob 0.0": Fault("logprob-zero", answer=_zeros),
    "one token too many": Fault("max-tokens", _one_more),
    "min_tokens ignored": Fault("min-tokens", without("min_tokens")),
    "streams lose a piece": Fault("stream", stream=_without_a_piece),
    "usage counts one more": Fault("usage", answer=_one_counted_more),
    "stop ignored": Fault("stop", without("stop")),
    "penalties ignored": Fault(
        "penalties",
        lambda body: [
            body.pop(name, None) for name in list(body) if "presence" in name or "frequency" in name
        ],
    ),
    "bias ignored": Fault("bias", without("logit_bias")),
    "schema ignored": Fault("json-schema", without("response_format")),
    "greedy at temperature 0.3": Fault(
        "greedy", lambda body: body.update(temperature=body["temperature"] or 0.3)
    ),
}


@dataclass
class Proxy:
    """Forwards requests to a server, with faults."""

    url: str
    faults: Sequence[Fault]
    requests: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(7))

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_api_route("/v1/models", self._models, methods=["GET"], response_model=None)
        app.add_api_route("/v1/completions", self._complete, methods=["POST"], response_model=None)
        return app

    async def _models(self) -> Response:
        answer = await self._http.get("/v1/models")
        return Response(answer.content, answer.status_code, media_type="application/json")

    async def _complete(self, request: Request) -> Response:
        self.requests += 1
        body = await request.json()
        streamed = body.pop("stream", False)
        asked = dict(body)
        if streamed:
            asked.pop("stream_options", None)
        for fault in self.faults:
            fault.request(asked)
        is_sampled = asked.get("temperature", 1) > 0 and not {"response_format", "logit_bias"} & asked.keys()
        if any(fault.share for fault in self.faults) and is_sampled:
            probe = await self._http.post("/v1/completions", json={**asked, "max_tokens": 1})
            if probe.status_code != 200:
                return Response(probe.content, probe.status_code, media_type="application/json")
            answer = await self._replaced(asked)
        else:
            answered = await self._http.post("/v1/completions", json=asked)
            if answered.status_code != 200:
                return Response(answered.content, answered.status_code, media_type="application/json")
            answer = answered.json()
        # Not this project's extension, so that the audit has no other way to ask.
        for fault in self.faults:
            fault.answer(body, answer)
        if not streamed:
            return Response(json.dumps(answer), media_type="application/json")
        return Response(self._events(answer), media_type="text/event-stream")

    async def _replaced(self, body: Body) -> Body:
        """Complete choice by choice; a replaced token is the context of what follows."""
        share = sum(fault.share for fault in self.faults)
        choices, usage = [], {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        for index in range(body.get("n") or 1):
            seed = body.get("seed")
            rng = random.Random(f"{body['prompt']}{seed}{index}") if seed is not None else self._random
            columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
            text, reason, left = "", "length", body["max_tokens"]
            while left:
                gap = math.floor(math.log(1 - rng.random()) / math.log(1 - share))
                piece = {**body, "prompt": body["prompt"] + text, "max_tokens": min(gap + 1, left), "n": 1}
                piece |= {"logprobs": 20} | ({} if seed is None else {"seed": seed + 7919 * index})
                answer = (await self._http.post("/v1/completions", json=piece)).json()
                (choice,) = answer["choices"]
                usage["prompt_tokens"] = usage["prompt_tokens"] or answer["usage"]["prompt_tokens"]
                found = choice["logprobs"]
                if gap + 1 <= left and len(found["tokens"]) == gap + 1:
                    top = found["top_logprobs"][-1]
                    best = max(top, key=top.get)
                    if not best.startswith("bytes:") and not found["tokens"][-1].startswith("bytes:"):
                        choice["text"] = choice["text"][: found["text_offset"][-1]] + best
                        found["tokens"][-1], found["token_logprobs"][-1] = best, top[best]
                for name, column in columns.items():
                    column += found[name]
                text += choice["text"]
                left -= len(found["tokens"])
                if choice["finish_reason"] == "stop":
                    reason = "stop"
                    break
            usage["completion_tokens"] += len(columns["tokens"])
            logprobs = columns if body.get("logprobs") else None
            choices.append({"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason})
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        return {"choices": choices, "usage": usage}

    def _events(self, answer: Body) -> bytes:
        events: list[Body] = []
        for choice in answer["choices"]:
            text, index = choice["text"], choice["index"]
            pieces = [text[i : i + 5] for i in range(0, len(text), 5)] or [""]
            for fault in self.faults:
                fault.stream(pieces)
            events += [{"choices": [{"index": index, "text": piece}]} for piece in pieces]
            last = {"index": index, "text": "", "logprobs": choice["logprobs"]}
            events.append({"choices": [{**last, "finish_reason": choice["finish_reason"]}]})
        events.append({"choices": [], "usage": answer["usage"]})
        return "".join(f"data: {e}\n\n" for e in [*map(json.dumps, events), "[DONE]"]).encode()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Serve on a free loopback port and yield the URL."""
        limits = httpx.Limits(max_keepalive_connections=0)  # a server may close an idle one at any time
        async with httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits) as self._http:
            async with listening(self.app()) as url:
                yield url


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """Serve an ASGI application on a free loopback port, in this event loop, and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        task = asyncio.ensure_future(server.serve([listener]))
        try:
            async with asyncio.timeout(30):
                while not server.started:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, 30)
