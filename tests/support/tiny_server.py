"""An honest completions server with a tiny random language model in plain Python, quick enough for many audits."""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import lru_cache
from typing import Any

from fastapi import FastAPI, Request

Body = dict[str, Any]

_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
WORDS = ["", *(f" {one}" for one in _SYLLABLES), *(a + b for a in _SYLLABLES for b in _SYLLABLES[:5])][:420]
"""Texts of the tokens; the first is the end of a text."""

_FREQUENT = range(256, 288)
_END, _OFF_END = 0, -1e9


@lru_cache(maxsize=2**14)
def logits(context: tuple[int, ...]) -> list[float]:
    """Return the logits of all tokens after the last tokens of a text."""
    draw = random.Random(repr(context))
    found = [draw.gauss(0, 1.7) + 3.0 * (i in _FREQUENT) for i in range(len(WORDS))]
    found[_END] = -4.0
    return found


def log_softmax(values: list[float]) -> list[float]:
    most = max(values)
    total = most + math.log(math.fsum(math.exp(value - most) for value in values))
    return [value - total for value in values]


def _edited(values: list[float], prompt: list[int], ids: list[int], body: Body) -> list[float]:
    found, counts = [*values], Counter(ids)
    for i in {*prompt, *ids} if (r := body.get("repetition_penalty") or 1.0) != 1 else ():
        found[i] = found[i] / r if found[i] > 0 else found[i] * r
    for i, count in counts.items():
        found[i] -= body.get("presence_penalty", 0) + count * body.get("frequency_penalty", 0)
    for token_id, bias in body.get("logit_bias", {}).items():
        found[int(token_id)] += bias
    if len(ids) < body.get("min_tokens", 0):
        for i in (_END, *body.get("stop_token_ids", ())):
            found[i] = _OFF_END
    return found


def _drawn(values: list[float], body: Body, draw: random.Random) -> int:
    temperature = body.get("temperature", 1)
    if temperature == 0:
        return max(range(len(values)), key=values.__getitem__)
    probs = {i: math.exp(lp) for i, lp in enumerate(log_softmax([v / temperature for v in values]))}
    order = sorted(probs, key=lambda i: -probs[i])
    if (top_k := body.get("top_k", -1)) > 0:
        order = order[:top_k]
    top_p, least, mass, kept = body.get("top_p", 1), body.get("min_p", 0) * probs[order[0]], 0.0, []
    total = math.fsum(probs[i] for i in order)
    for i in order:
        if mass < top_p * total and probs[i] >= least:
            kept.append(i)
        mass += probs[i]
    return draw.choices(kept, [probs[i] for i in kept])[0]


def _animal(schema: Body, draw: random.Random) -> str:
    kind, tame = draw.choice(["cat", "dog", "bird"]), draw.choice(["true", "false"])
    age = draw.randint(0, schema["properties"]["age"].get("maximum", 99))
    return f'{{"kind": "{kind}", "age": {age}, "tame": {tame}}}'


def _choice(body: Body, index: int) -> Body:
    prompt = [ord(c) % len(WORDS) for c in body["prompt"]]
    draw = random.Random(f"{body['seed']}/{index}" if body.get("seed") is not None else None)
    ids: list[int] = []
    text, reason, num_top = "", "length", body.get("logprobs") or 0
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
    if body.get("echo"):
        text, columns["tokens"] = body["prompt"], [*body["prompt"]]
        columns["token_logprobs"] = [None] * len(prompt)
        columns["top_logprobs"] = [None] * len(prompt)
    if form := body.get("response_format"):
        text = _animal(form["json_schema"]["schema"], draw)
        return {"index": index, "text": text, "logprobs": None, "finish_reason": "stop", "count": len(text)}
    while len(ids) < body["max_tokens"]:
        raw = logits(tuple([*prompt, *ids][-3:]))
        token = _drawn(_edited(raw, prompt, ids, body), body, draw)
        if token == _END or token in body.get("stop_token_ids", ()):
            reason = "stop"
            break
        ids.append(token)
        logprobs = log_softmax(raw)
        listed = sorted(range(len(raw)), key=lambda i: -raw[i])[:num_top]
        columns["tokens"].append(WORDS[token])
        columns["token_logprobs"].append(logprobs[token])
        columns["top_logprobs"].append({WORDS[i]: logprobs[i] for i in (*listed, token)})
        text += WORDS[token]
        if ends := [text.index(stop) for stop in body.get("stop") or () if stop in text]:
            text, reason = text[: min(ends)], "stop"
            break
    held = columns if num_top else None
    return {"index": index, "text": text, "logprobs": held, "finish_reason": reason, "count": len(ids)}


def tiny_server() -> FastAPI:
    """Return the server: whole completions alone."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> Body:
        return {"data": [{"id": "tiny"}]}

    @app.post("/v1/completions")
    async def complete(request: Request) -> Body:
        body = await request.json()
        choices = [_choice(body, index) for index in range(body.get("n") or 1)]
        completion, prompt = sum(choice.pop("count") for choice in choices), len(body["prompt"])
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        return {"choices": choices, "usage": usage}

    return app
