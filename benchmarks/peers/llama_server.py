"""llama.cpp's server as a measured system: starts it, waits for the model, asks its /completion endpoint."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cluster import ClusterError, running_server
from gammaray.bench.systems import Arrival, Ask, Sample

LLAMA = "llama.cpp"
"""Name of its plain decoding."""

_DRAFT_TOKENS = (4, 8)
_START_TIMEOUT_S = 180.0
_ANSWER_TIMEOUT_S = 300.0
_VERSION_TIMEOUT_S = 60.0


def modes(draft: Path | None, threads: int) -> dict[str, list[str]]:
    """Return the server's options of each of its systems, by name; those with a draft only if there is one.

    `ngram-mod` and `ngram-cache` are left out: they remember earlier requests, so that repetitions of a
    prompt would find its answer.
    """
    found: dict[str, list[str]] = {LLAMA: []}
    for kind in ("ngram-simple", "ngram-map-k"):
        found[f"{LLAMA}-{kind}"] = ["--spec-type", kind]
    if draft is not None:
        for count in _DRAFT_TOKENS:
            options = ["-md", str(draft), "-td", str(threads), "--spec-draft-n-max", str(count)]
            found[f"{LLAMA}-draft-{count}"] = ["--spec-type", "draft-simple", *options]
    return found


def llama_version(binary: str) -> str:
    """Return what the program says of itself: version, compiler or processor features.

    Raises:
        ClusterError: It does not run, or does not answer within a minute.
    """
    try:
        command = [binary, "--version"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{binary}: {error}") from None
    return (done.stdout + done.stderr).strip()


def running_llama(
    binary: str, model: Path, options: Sequence[str], *, threads: int, slots: int, context: int
) -> AbstractAsyncContextManager[str]:
    """Run a server until the block ends, and yield its base URL.

    Args:
        binary: Path of llama-server.
        model: GGUF file.
        options: Further options of its command line.
        threads: Arithmetic threads.
        slots: Completions that it runs at once.
        context: Tokens of prompt and completion that each slot can hold.
    """
    common = ["-m", str(model), "-t", str(threads), "-tb", str(threads), "--no-webui"]
    common += ["-np", str(slots), "-c", str(slots * context)]
    return running_server([binary, *common, *options], _START_TIMEOUT_S)


class Llama:
    """Completions of one server."""

    def __init__(self, name: str, client: httpx.AsyncClient) -> None:
        self.name = name
        self._client = client

    async def sample(self, ask: Ask) -> Sample:
        """Return one completion; its time runs from the request to the last event of the stream.

        Raises:
            ClusterError: The server refused the request, or its stream ended early.
        """
        token_ids: list[int] = []
        arrivals: list[Arrival] = []
        last: Mapping[str, Any] = {}
        started = time.perf_counter()
        async with self._client.stream("POST", "/completion", json=_body(ask, stream=True)) as response:
            if response.status_code != httpx.codes.OK:
                raise ClusterError(f"{self.name}: {response.status_code} {(await response.aread()).decode()}")
            async for event in _events(response):
                if "error" in event:
                    raise ClusterError(f"{self.name}: {event['error']}")
                if new := event.get("tokens"):
                    arrivals.append((time.perf_counter() - started, len(new)))
                    token_ids += new
                last = event
        seconds = time.perf_counter() - started
        if not last.get("stop"):
            raise ClusterError(f"{self.name}: the stream ended before the completion")
        if len(token_ids) < last["tokens_predicted"]:
            # The stream leaves out tokens that end inside a UTF-8 character: ask for all of them, unmeasured.
            arrivals.append((seconds, last["tokens_predicted"] - len(token_ids)))
            token_ids = await self._token_ids(ask)
        return Sample(tuple(token_ids[: ask.max_tokens]), seconds, tuple(_within(arrivals, ask.max_tokens)))

    async def _token_ids(self, ask: Ask) -> list[int]:
        response = await self._client.post("/completion", json=_body(ask, stream=False))
        if response.status_code != httpx.codes.OK:
            raise ClusterError(f"{self.name}: {response.status_code} {response.text}")
        found: list[int] = response.json()["tokens"]
        return found


@asynccontextmanager
async def connected_llama(name: str, url: str) -> AsyncIterator[Llama]:
    """Yield the system of a running server.

    Each request opens a connection: the server closes idle ones, at times while the next request is sent.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=_ANSWER_TIMEOUT_S, limits=limits) as client:
        yield Llama(name, client)


def _body(ask: Ask, *, stream: bool) -> dict[str, Any]:
    """Return a request that samples from the model's distribution alone, or is greedy."""
    greedy = ask.temperature == 0
    prompt = ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt)
    return {
        "prompt": prompt,
        "n_predict": ask.max_tokens,
        "temperature": ask.temperature,
        "samplers": ["top_k"] if greedy else ["temperature"],
        "top_k": 1 if greedy else 0,
        "seed": ask.seed,
        "ignore_eos": ask.ignore_eos,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": stream,
    }


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        field, _, value = line.partition(":")
        if field in ("data", "error") and value.strip() != "[DONE]":
            event = json.loads(value)
            yield {"error": event} if field == "error" else event


def _within(arrivals: Sequence[Arrival], count: int) -> list[Arrival]:
    """Return the arrivals of the first `count` tokens; the server may send a few more."""
    kept: list[Arrival] = []
    for at, tokens in arrivals:
        if count <= 0:
            break
        kept.append((at, min(tokens, count)))
        count -= tokens
    return kept
