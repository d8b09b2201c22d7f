"""Calls of the OpenAI-compatible API over a scripted orchestrator."""

import httpx
from surface_helpers import SUMMARY

from orchestrator.http_api import create_app

GAMMARAY = {
    "session_id": "s0",
    "seed": 0,
    "cycles": SUMMARY.cycles,
    "tokens_per_cycle": SUMMARY.tokens_per_cycle,
    "alpha": SUMMARY.alpha,
    "acceptance_rate": SUMMARY.acceptance_rate,
    "accepted_lengths": [1, 1],
    "gamma_mean": SUMMARY.gamma_mean,
    "origins": ["accepted"] * 3,
    "token_ids": [1, 2, 3],
    "time_ms": {"draft": 1.0, "verify": 2.0, "other": 0.5, "total": 3.5},
    "speedup_estimate": None,
    "cycles_by_drafter": {"model": 1, "ngram": 1, "none": 0},
    "fallback_cycles": 1,
    "draft_workers": 1,
}
CHAT = [{"role": "user", "content": "hi"}]


async def call(backend, method="POST", path="/v1/completions", **options):
    transport = httpx.ASGITransport(create_app(backend))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path, **options)


async def complete(backend, path="/v1/completions", **body):
    return await call(backend, path=path, json=body)


async def events(backend, path="/v1/completions", **body):
    answer = await complete(backend, path, stream=True, **body)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, end = answer.text.split("\n\n")
    assert end == ""
    assert all(part.startswith("data: ") for part in parts)
    return [part.removeprefix("data: ") for part in parts]
