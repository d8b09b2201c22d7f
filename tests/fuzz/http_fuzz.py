"""Invalid requests to the HTTP API, and the allowed responses."""

import asyncio
import random
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.fuzz.campaign import Campaign
from tests.fuzz.values import TEXTS, encode_json, mutate_bytes, mutate_json

ANSWER_TIMEOUT_S = 60.0
PATIENCE_MS = 15_000
ALLOWED = {200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 429, 503, 504}
PROPERTIES = {"a": {"type": "string", "maxLength": 3}, "b": {"$ref": "#/$defs/B"}}
SCHEMA = {
    **{"type": "object", "properties": PROPERTIES, "required": ["a"]},
    "$defs": {"B": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
}
FORM = {"name": "answer", "schema": SCHEMA, "strict": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        **{"model": "", "prompt": ["def f(", [1, 2, 3]], "max_tokens": 4, "n": 2, "stream": False},
        "stream_options": dict.fromkeys(
            ("include_usage", "continuous_usage_stats", "include_obfuscation"), True
        ),
        **{"stop": ["\n\n", "x"], "stop_token_ids": [9], "min_tokens": 1, "ignore_eos": False},
        **{"seed": 1, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01},
        **{"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
        **{"logit_bias": {"5": 1.0, "6": -100}, "allowed_token_ids": []},
        "structured_outputs": {"json": {"type": "array", "items": {"enum": [1, "a"]}, "maxItems": 3}},
        **{"logprobs": 2, "echo": True, "prompt_logprobs": 1},
        "gammaray": {"verification": "coupled", "gamma": 3, "max_nodes": 8, "drafter": "model"},
    },
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        ],
        **{"max_completion_tokens": 4, "temperature": 0},
        **{"logprobs": True, "top_logprobs": 3, "prompt_logprobs": 0},
        "response_format": {"type": "json_schema", "json_schema": FORM},
        "gammaray": {"gamma": "adaptive", "session_id": "", "verification": "rejection"},
    },
}
PATHS = ["/", "/health", "/metrics", "/v1/../", "/%00"]
PATHS += ["/v1/models", "/v1/models/x", "/v1/sessions", "/v1/sessions/x"]


async def fuzz_http(base_url: str, campaign: Campaign, name: str) -> None:
    rng = campaign.dice(name)
    limits = httpx.Limits(max_connections=8)
    async with httpx.AsyncClient(base_url=base_url, timeout=ANSWER_TIMEOUT_S, limits=limits) as http:
        while not campaign.is_over:
            action = rng.randrange(20)
            if action == 0:
                await asyncio.to_thread(_rubbish, base_url, rng)
                campaign.count("http rubbish", "sent")
            elif action == 1:
                method = rng.choice(["GET", "POST", "PUT", "DELETE", "HEAD", "PATCH", "OPTIONS"])
                await _send(http, method, rng.choice(PATHS), b"", rng, campaign)
            else:
                path = rng.choice(list(BODIES))
                body = mutate_json(rng, BODIES[path])
                if isinstance(body, dict) and rng.random() < 0.3:
                    body["stream"] = True
                await _send(http, "POST", path, encode_json(rng, body), rng, campaign)


async def _send(
    http: httpx.AsyncClient, method: str, path: str, body: bytes, rng: random.Random, campaign: Campaign
) -> None:
    story = f"{method} {path} {body[:300]!r}"
    try:
        async with http.stream(method, path, content=body, headers=_headers(rng)) as answer:
            if rng.random() < 0.1:  # a client that goes away
                campaign.count("http", "left")
                return
            content = await answer.aread()
    except httpx.TimeoutException:
        campaign.count("http", "hang", wrong=f"no answer within {ANSWER_TIMEOUT_S:g} s: {story}")
        return
    except httpx.HTTPError as error:
        campaign.count("http", "broken", wrong=f"{error!r}: {story}")
        return
    wrong = _complaint(answer, content, method)
    campaign.count("http", str(answer.status_code), wrong=f"{wrong}: {story}" if wrong else None)


def _complaint(answer: httpx.Response, content: bytes, method: str) -> str | None:
    if answer.status_code not in ALLOWED:
        return f"status {answer.status_code} {content[:300]!r}"
    if answer.status_code >= 400 and method != "HEAD":
        try:
            error = answer.json()["error"]
            if not (error["message"] and error["type"] and error.keys() >= {"param", "code"}):
                return f"no OpenAI error object {content[:300]!r}"
        except (ValueError, KeyError, TypeError):
            return f"no OpenAI error object {content[:300]!r}"
    if answer.status_code in (429, 503) and "retry-after" not in answer.headers:
        return "no Retry-After"
    is_stream = "event-stream" in answer.headers.get("content-type", "")
    if is_stream and b"[DONE]" not in content and b'"error"' not in content:
        return f"a stream without an end {content[-200:]!r}"
    return None


def _headers(rng: random.Random) -> dict[str, str]:
    headers = {"content-type": "application/json" if rng.random() < 0.95 else rng.choice(["text/plain", "x"])}
    headers["gammaray-timeout-ms"] = str(PATIENCE_MS)  # some ask for as many tokens as there can be
    if rng.random() < 0.1:
        headers["gammaray-timeout-ms"] = rng.choice(["1", "50", "5000", "-1", "x", "9" * 30])
    if rng.random() < 0.1:
        headers["gammaray-priority"] = rng.choice(["3", "-10", "11", ""])
    if rng.random() < 0.05:
        headers["authorization"] = rng.choice(["Bearer x", "Basic eDp4", "Bearer"])
    if rng.random() < 0.05:
        headers["last-event-id"] = rng.choice(["1", "x", "a:5", "-1", "9" * 40])
    if rng.random() < 0.05:
        headers["traceparent"] = rng.choice(["00-x", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "zz"])
    return headers


def _rubbish(base_url: str, rng: random.Random) -> None:
    """Open a connection that sends malformed HTTP; responses are read and ignored."""
    where = urlsplit(base_url)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 30\r\n\r\n"
    try:
        with socket.create_connection((where.hostname or "", where.port or 0), timeout=5) as connection:
            connection.settimeout(1)
            connection.sendall(mutate_bytes(rng, head + TEXTS[6].encode()[:30]))
            connection.recv(1000)
    except OSError:
        return
