"""An honest completions server with a tiny random language model, quick enough for many audits."""

import random
from collections import Counter
from functools import lru_cache
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from numpy.typing import NDArray

Body = dict[str, Any]
Logits = NDArray[np.float64]

_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
WORDS = ["", *(f" {one}" for one in _SYLLABLES), *(a + b for a in _SYLLABLES for b in _SYLLABLES[:5])][:420]
"""Texts of the tokens; the first is the end of a text."""

_END, _OFF_END = 0, -1e9


@lru_cache(maxsize=2**14)
def logits(context: tuple[int, ...]) -> Logits:
    """Return the logits of all tokens after the last tokens of a text."""
    found = np.random.default_rng(context).normal(0, 1.7, len(WORDS))
    found[256:288] += 3.0
    found[_END] = -4.0
    return found


def log_softmax(values: Logits) -> Logits:
    most = values.max()
    return values - most - np.log(np.exp(values - most).sum())


def _edited(values: Logits, prompt: list[int], ids: list[int], body: Body) -> Logits:
    found, counts = values.copy(), Counter(ids)
    for i in {*prompt, *ids} if (r := body.get("repetition_penalty") or 1.0) != 1 else ():
        found[i] = found[i] / r if found[i] > 0 else found[i] * r
    for i, count in counts.items():
        found[i] -= body.get("presence_penalty", 0) + count * body.get("frequency_penalty", 0)
    for token_id, bias in body.get("logit_bias", {}).items():
        found[int(token_id)] += bias
    if len(ids) < body.get("min_tokens", 0):
        found[[_END, *body.get("stop_token_ids", ())]] = _OFF_END
    return found


def _drawn(values: Logits, body: Body, draw: random.Random) -> int:
    temperature = body.get("temperature", 1)
    if temperature == 0:
        return int(values.argmax())
    probs = np.exp(log_softmax(values / temperature))
    order = np.argsort(-probs)
    if (top_k := body.get("top_k", -1)) > 0:
        order = order[:top_k]
    sorted_probs = probs[order]
    before = np.cumsum(sorted_probs) - sorted_probs
    kept = before < body.get("top_p", 1) * sorted_probs.sum()
    kept &= sorted_probs >= body.get("min_p", 0) * sorted_probs[0]
    masses = np.cumsum(sorted_probs * kept)
    return int(order[np.searchsorted(masses, draw.random() * masses[-1], side="right")])


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
        kind, tame = draw.choice(["cat", "dog", "bird"]), draw.choice(["true", "false"])
        age = draw.randint(0, form["json_schema"]["schema"]["properties"]["age"].get("maximum", 99))
        text = f'{{"kind": "{kind}", "age": {age}, "tame": {tame}}}'
        return {"index": index, "text": text, "logprobs": None, "finish_reason": "stop", "count": len(text)}
    while len(ids) < body["max_tokens"]:
        raw = logits(tuple([*prompt, *ids][-3:]))
        token = _drawn(_edited(raw, prompt, ids, body), body, draw)
        if token == _END or token in body.get("stop_token_ids", ()):
            reason = "stop"
            break
        ids.append(token)
        logprobs = log_softmax(raw)
        listed = np.argsort(-raw)[:num_top]
        columns["tokens"].append(WORDS[token])
        columns["token_logprobs"].append(float(logprobs[token]))
        columns["top_logprobs"].append({WORDS[i]: float(logprobs[i]) for i in (*listed, token)})
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
