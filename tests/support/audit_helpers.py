"""An HTTP proxy that plants faults between `gammaray audit` and a real server."""

import asyncio
import copy
import itertools
import json
import math
import random
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response

from gammaray.audit.endpoint import Endpoint, Spent
from gammaray.audit.run import run_audit
from gammaray.audit.subject import Subject, default_prompts
from tests.support.http_helpers import listening

Body = dict[str, Any]


def always(body: Body) -> bool:
    return True


def streamed(body: Body) -> bool:
    return bool(body.get("stream"))


def several(body: Body) -> bool:
    return (body.get("n") or 1) > 1


def each(count: int) -> Callable[[Body], bool]:
    """Return what is true of one in `count` requests."""
    numbers = itertools.count(1)
    return lambda body: next(numbers) % count == 0


def repeated() -> Callable[[Body], bool]:
    """Return what is true of a request whose prompt was in one before."""
    seen = set[str]()

    def is_repeated(body: Body) -> bool:
        is_new = body["prompt"] not in seen
        seen.add(body["prompt"])
        return not is_new

    return is_repeated


@dataclass
class Fault:
    check: str  # the check that must find it
    request: Callable[[Body], None] = lambda body: None  # changes a request on its way to the server
    # Changes a whole answer; streams are made of whole answers, token by token.
    answer: Callable[[Body, Body], None] = lambda body, answer: None
    stream: Callable[[list[str]], None] = lambda pieces: None  # changes the texts of a stream's pieces
    where: Callable[[Body], bool] = always  # the requests that have it
    at_once: int = 1  # requests at once, this one among them, from which on a request has it
    later: bool = False  # whether only the choices after the first one come from the changed request
    # Tokens of an answer that come from the changed request, before those of the unchanged one.
    first: int = 0
    after: int = 0  # tokens of an answer that come from the unchanged request before those of the changed one


def without(*names: str) -> Callable[[Body], None]:
    return lambda body: [body.pop(name, None) for name in names] and None


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Body], None]:
    def request(body: Body) -> None:
        if body.get(name) is not None:
            body[name] = change(body[name])

    return request


def _at_temperature(factor: float, **where: Any) -> Fault:
    """Return what changes the law of tokens."""
    return Fault("law", lambda body: body.update(temperature=factor * body.get("temperature", 1)), **where)


def each_choice(change: Callable[[Body, Body], None]) -> Callable[[Body, Body], None]:
    """Return what changes an answer by a function of each choice and the first one."""

    def answer(body: Body, answer: Body) -> None:
        first = answer["choices"][0]
        for choice in answer["choices"]:
            change(choice, first)

    return answer


def each_list(change: Callable[[dict[str, float]], dict[str, float]]) -> Callable[[Body, Body], None]:
    """Return what changes an answer by a function of each token's alternatives."""

    def answer(body: Body, answer: Body) -> None:
        for choice in answer["choices"]:
            if found := choice["logprobs"]:
                found["top_logprobs"] = [change(top) for top in found["top_logprobs"]]
                pairs = zip(found["tokens"], found["top_logprobs"], found["token_logprobs"], strict=True)
                found["token_logprobs"] = [top.get(token, lp) for token, top, lp in pairs]

    return answer


def _normalised(power: float) -> Callable[[dict[str, float]], dict[str, float]]:
    def change(top: dict[str, float]) -> dict[str, float]:
        total = math.log(sum(math.exp(power * lp) for lp in top.values()))
        return {key: min(0.0, power * lp - total) for key, lp in top.items()}

    return change


def _zeros(body: Body, answer: Body) -> None:
    for choice in answer["choices"]:
        found = choice["logprobs"] or {"token_logprobs": []}
        found["token_logprobs"] = [lp if i % 3 else 0.0 for i, lp in enumerate(found["token_logprobs"])]


def counted(name: str, more: int) -> Callable[[Body, Body], None]:
    def answer(body: Body, answer: Body) -> None:
        answer["usage"][name] += more
        answer["usage"]["total_tokens"] += more

    return answer


def _without_a_piece(pieces: list[str]) -> None:
    pieces[len(pieces) // 2] = ""


def leaking(body: Body, answer: Body) -> None:
    """The text goes on with the stop string that ended it."""
    for choice in answer["choices"]:
        if body.get("stop") and choice["finish_reason"] == "stop":
            choice["text"] += body["stop"][0]


def _echoed(body: Body, answer: Body) -> None:
    for choice in answer["choices"]:
        choice["text"] = body["prompt"][-4:] + choice["text"]


def _reason(got: str, said: str) -> Callable[[Body, Body], None]:
    return each_choice(
        lambda choice, _: choice.update(finish_reason=said) if choice["finish_reason"] == got else None
    )


def _small_bias(body: Body) -> None:
    if all(abs(value) < 10 for value in body.get("logit_bias", {"": 99}).values()):
        del body["logit_bias"]


def _second_stop(body: Body) -> None:
    if body.get("stop"):
        body["stop"] = body["stop"][:1]


def _truncated_json(body: Body, answer: Body) -> None:
    if body.get("response_format") and body.get("seed", 0) % 6 == 5:
        for choice in answer["choices"]:
            choice["text"] = choice["text"][:-2]


def _looser_schema(body: Body) -> None:
    if body.get("response_format"):
        del body["response_format"]["json_schema"]["schema"]["properties"]["age"]["maximum"]


def _frequency_once(body: Body) -> None:
    if frequency := body.pop("frequency_penalty", 0):
        body["presence_penalty"] = body.get("presence_penalty", 0) + frequency


def scaled(factor: float) -> Callable[[Body], None]:
    def request(body: Body) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            changed(name, lambda value: value * factor)(body)

    return request


def _other_seed(body: Body) -> None:
    changed("seed", lambda seed: random.getrandbits(31))(body)


@each_choice
def _same_logprobs(choice: Body, first: Body) -> None:
    choice["logprobs"] = first["logprobs"]


@each_choice
def _same_alternatives(choice: Body, first: Body) -> None:
    if choice is not first and choice["logprobs"]:
        for name in ("token_logprobs", "top_logprobs"):
            choice["logprobs"][name] = (first["logprobs"] or {}).get(name)


ALL, STREAMS, SEVERAL, LATER = "", "in streams", "with n", "for later choices"
WAYS: dict[str, Body] = {ALL: {}, LATER: {"later": True}}
WAYS |= {STREAMS: {"where": streamed}, SEVERAL: {"where": several}}


def ways(what: str, fault: Fault, *names: str) -> dict[str, Fault]:
    """Return a fault in some ways of asking, by its name and theirs."""
    return {f"{what} {name}".strip(): replace(fault, **WAYS[name]) for name in names}


_EQUAL_CHOICES = each_choice(lambda c, f: c.update({**f, "index": c["index"]}))
_NINETEEN = each_list(lambda top: dict([*top.items()][:19]))
_ROUNDED = each_list(lambda top: {token: round(lp, 3) for token, lp in top.items()})
_NOT_GREEDY = Fault("greedy", lambda body: body.update(temperature=body["temperature"] or 0.3))

FAULTS = {
    "top_p ignored": Fault("top-p", without("top_p")),
    "top_k ignored": Fault("top-k", without("top_k")),
    "min_p ignored": Fault("min-p", without("min_p")),
    "seed ignored": Fault("seed", without("seed")),
    "choices equal": Fault("choices", answer=_EQUAL_CHOICES),
    "logprob 0.0": Fault("logprob-zero", answer=_zeros),
    "one token too many": Fault("max-tokens", changed("max_tokens", lambda bound: bound + 1)),
    "min_tokens ignored": Fault("min-tokens", without("min_tokens")),
    "streams lose a piece": Fault("stream", stream=_without_a_piece),
    "usage counts one more": Fault("usage", answer=counted("completion_tokens", 1)),
    "stop ignored": Fault("stop", without("stop")),
    "penalties ignored": Fault("penalties", without("presence_penalty", "frequency_penalty")),
    "bias ignored": Fault("bias", without("logit_bias")),
    "schema ignored": Fault("json-schema", without("response_format")),
    "greedy at temperature 0.3": _NOT_GREEDY,
}
"""Found by its own check, while no other check fails."""

MATRIX = {
    # parameter, way: what one check in that way has to find
    "top_p + 0.15": Fault("top-p", changed("top_p", lambda p: min(1, p + 0.15))),
    **ways("top_p ignored", FAULTS["top_p ignored"], STREAMS, SEVERAL, LATER),
    "top_k + 1": Fault("top-k", changed("top_k", lambda k: k + 1 if k > 0 else k)),
    **ways("top_k ignored", FAULTS["top_k ignored"], STREAMS, LATER),
    "min_p / 3": Fault("min-p", changed("min_p", lambda p: p / 3)),
    **ways("min_p ignored", FAULTS["min_p ignored"], STREAMS, LATER),
    **ways("seed ignored", FAULTS["seed ignored"], SEVERAL, LATER),
    **ways("seed ignored", Fault("seed", _other_seed), STREAMS),
    "seed other under load": Fault("batch", _other_seed, at_once=3),
    "seed other in 1 of 7 requests": Fault("seed", _other_seed, where=each(7)),
    **ways("seed other", Fault("stream", changed("seed", lambda seed: seed + 1)), STREAMS),
    **ways("later choices equal", FAULTS["choices equal"], STREAMS),
    "second stop string leaks": Fault("stop", _second_stop),
    **ways("stop string leaks", Fault("stop", answer=leaking), ALL, STREAMS, SEVERAL),
    **ways("stop ignored", FAULTS["stop ignored"], LATER),
    **ways("stop_token_ids ignored", Fault("stop", without("stop_token_ids")), ALL, STREAMS),
    "stop says length": Fault("stop", answer=_reason("stop", "length")),
    **ways("prompt_tokens one too many", Fault("usage", answer=counted("prompt_tokens", 1)), ALL, STREAMS),
    **ways("completion_tokens one too few", Fault("usage", answer=counted("completion_tokens", -1)), STREAMS),
    **ways("completion_tokens one too many", FAULTS["usage counts one more"], SEVERAL),
    "log-probabilities of later choices are the first's": Fault("logprob-zero", answer=_same_logprobs),
    "alternatives of later choices are the first's": Fault("logprob-zero", answer=_same_alternatives),
    **ways("19 alternatives", Fault("logprob-zero", answer=_NINETEEN), ALL, STREAMS),
    **ways("log-probabilities rounded", Fault("stream", answer=_ROUNDED), STREAMS),
    **ways("repetition_penalty ignored", Fault("penalties", without("repetition_penalty")), ALL, STREAMS),
    "frequency_penalty once only": Fault("penalties", _frequency_once),
    "penalties x 0.6": Fault("penalties", scaled(0.6)),
    "penalties x 0.5": Fault("penalties", scaled(0.5)),
    **ways("presence_penalty ignored", Fault("penalties", without("presence_penalty")), SEVERAL),
    **ways("frequency_penalty ignored", Fault("penalties", without("frequency_penalty")), STREAMS),
    "small logit_bias ignored": Fault("bias", _small_bias),
    "logit_bias halved": Fault("bias", changed("logit_bias", lambda all: {k: v / 2 for k, v in all.items()})),
    **ways("logit_bias ignored", FAULTS["bias ignored"], STREAMS, LATER),
    **ways("length says stop", Fault("max-tokens", answer=_reason("length", "stop")), ALL, STREAMS),
    **ways("max_tokens one more", FAULTS["one token too many"], SEVERAL, STREAMS),
    "max_tokens one less": Fault("max-tokens", changed("max_tokens", lambda m: max(1, m - 1))),
    **ways("min_tokens one less", Fault("min-tokens", changed("min_tokens", lambda m: m - 1)), ALL, STREAMS),
    **ways("min_tokens ignored", FAULTS["min_tokens ignored"], LATER),
    **ways("greedy at temperature 0.3", _NOT_GREEDY, STREAMS, LATER),
    **ways("schema ignored", FAULTS["schema ignored"], STREAMS, LATER),
    "schema's maximum ignored": Fault("json-schema", _looser_schema),
    "every sixth JSON cut": Fault("json-schema", answer=_truncated_json),
    "end of the prompt before the text in streams": Fault("stream", answer=_echoed, where=streamed),
    "temperature 5 % too low": _at_temperature(0.95),
    "temperature 0.9 of long prompts": _at_temperature(0.9, where=lambda body: len(body["prompt"]) > 40),
    "temperature 0.8 in streams": _at_temperature(0.8, where=streamed),
    "temperature 0.7 for later choices": _at_temperature(0.7, later=True),
    "temperature 0.8 under load": _at_temperature(0.8, at_once=3),
    "temperature 0.8 of repeated prompts": _at_temperature(0.8, where=repeated()),
    "temperature 0.8 after 64 tokens": _at_temperature(0.8, after=64),
    "first token greedy": _at_temperature(0.0, first=1),
    "log-probabilities of temperature 0.9": Fault("law", answer=each_list(_normalised(1 / 0.9))),
    "log-probabilities among those listed": Fault("law", answer=each_list(_normalised(1.0))),
}
"""Found by its own check; others may fail as well."""


@dataclass
class Proxy:
    url: str
    faults: Sequence[Fault]
    _at_once: int = 0

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_api_route("/v1/models", self._models, methods=["GET"], response_model=None)
        app.add_api_route("/v1/completions", self._complete, methods=["POST"], response_model=None)
        return app

    async def _models(self) -> Response:
        answer = await self._http.get("/v1/models")
        return Response(answer.content, answer.status_code, media_type="application/json")

    async def _complete(self, request: Request) -> Response:
        self._at_once += 1
        try:
            return await self._answer(await request.json())
        finally:
            self._at_once -= 1

    async def _answer(self, body: Body) -> Response:
        await asyncio.sleep(0.01)  # requests that were sent at once are here before one is answered
        faults = [fault for fault in self.faults if self._at_once >= fault.at_once and fault.where(body)]
        is_streamed = body.pop("stream", False)
        plain = {name: value for name, value in body.items() if name != "stream_options"}
        asked = copy.deepcopy(plain)
        for fault in faults:
            fault.request(asked)
        if parts := self._parts(plain, asked, faults):
            answer = await self._joined(parts)
        else:
            answered = await self._http.post("/v1/completions", json=asked)
            if answered.status_code != 200:
                return Response(answered.content, answered.status_code, media_type="application/json")
            answer = answered.json()
        if any(fault.later for fault in faults):
            honest = (await self._http.post("/v1/completions", json=plain)).json()
            answer["choices"][0] = honest["choices"][0]
            answer["usage"] = honest["usage"]
        # Not this project's extension, so that the audit has no other way to ask.
        for fault in faults:
            fault.answer(body, answer)
        if not is_streamed:
            return Response(json.dumps(answer), media_type="application/json")
        return Response(self._events(answer, faults), media_type="text/event-stream")

    def _parts(self, plain: Body, asked: Body, faults: Sequence[Fault]) -> list[Body]:
        """Return two requests, each for its part of an answer, if a fault is of some tokens alone."""
        for fault in faults:
            if 0 < (count := fault.first or fault.after) < plain["max_tokens"] and not several(plain):
                one, two = (asked, plain) if fault.first else (plain, asked)
                return [{**one, "max_tokens": count}, {**two, "max_tokens": plain["max_tokens"] - count}]
        return []

    async def _joined(self, parts: Sequence[Body]) -> Body:
        """Complete a prompt part by part."""
        one, two = parts
        answer: Body = (await self._http.post("/v1/completions", json=one)).json()
        choice = answer["choices"][0]
        if choice["finish_reason"] != "length":
            return answer
        two["prompt"] += choice["text"]
        more: Body = (await self._http.post("/v1/completions", json=two)).json()
        rest = more["choices"][0]
        choice["text"] += rest["text"]
        choice["finish_reason"] = rest["finish_reason"]
        for name, column in (choice["logprobs"] or {}).items():
            column += rest["logprobs"][name]
        for name in ("completion_tokens", "total_tokens"):
            answer["usage"][name] += more["usage"]["completion_tokens"]
        return answer

    def _events(self, answer: Body, faults: Sequence[Fault]) -> bytes:
        events: list[Body] = []
        for choice in answer["choices"]:
            text, index = choice["text"], choice["index"]
            pieces = [text[i : i + 5] for i in range(0, len(text), 5)] or [""]
            for fault in faults:
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


async def audited(url: str, model: str, names: Collection[str], max_tokens: int, seed: int = 1) -> Subject:
    """Run checks on a server; return the subject with what they found."""
    server = Endpoint(url, model, "", "NO_KEY", 9, Spent(max_tokens), 300.0)
    subject = Subject(server, None, default_prompts(), 0.005, seed)
    try:
        async for finding in run_audit(subject, names):
            print(finding)
    finally:
        await subject.close()
    return subject
