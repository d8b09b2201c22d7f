"""Grows each field of a request to its limit, beside a stream that must not notice.

One request at a time is sent, with a field that is larger each time, up to the documented limit and one step
beyond it. Meanwhile another client's stream (gamma 0) is read, the canary, and the memory of every process is
watched. A field is wrong if each time of `NUM_TRIES` the canary waits longer for a token than `MAX_GAP_S`,
longer than it does alone, and longer than beside the same request with gamma 0, whose computation is the
target's own; or if a process needs more memory than the request explains. Alone it is read right after each
of these tries, for as long as the request took: other work of the machine is in both.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from gammaray import AsyncClient
from gammaray.aio import end_tasks
from gammaray.grammar.check_pool import MAX_MEMORY_BYTES
from tests.fuzz.campaign import Campaign
from tests.support.cluster.cluster_helpers import Cluster
from tests.support.schema_helpers import nested

MAX_GAP_S = 0.25
NUM_TRIES = 3
DEADLINE_MS = 15_000
ANSWER_TIMEOUT_S = 60.0
SAMPLE_S = 0.05
ALONE_S = (2.0, 15.0)
"""Bounds of how long the canary is read alone, for the gaps that the machine itself makes."""

MAX_GROWTH_MB = 160.0
"""Resident memory that one request may need in one process (docs/security.md): a body of 8 MiB takes up to
80 MiB to parse, the longest prompt that may fit into the demo pair's context, 74 KiB, up to 37 MiB to
tokenise, and allocators keep a part of what is freed."""

MAX_GRAMMAR_MB = MAX_MEMORY_BYTES / 2**20
"""The same with a grammar, which is compiled in the orchestrator and in the target."""

Make = Callable[[int], dict[str, Any]]
COMPLETION, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PATTERNS = ("a", "<[", "\\/", "(", '"', "{", "\\", " ", "\n", "é", "<tool_call>", "a?", "[^", "/x/ ")
"""What texts are filled with; each is the worst input of some scanner, or looks like it."""


@dataclass(frozen=True)
class Growing:
    name: str  # for reports
    path: str  # of the request
    make: Callable[..., dict[str, Any]]  # returns the part of the body that has the field, for a size
    limit: int  # documented limit of the size; twice as much is tried, too
    is_text: bool = False  # the size is a number of characters, filled with each of `PATTERNS`

    def bodies(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the bodies from small to large, each after its description."""
        found = []
        for size in dict.fromkeys([max(1, self.limit // 8), self.limit, 2 * self.limit]):
            patterns = PATTERNS[: 1 if size > self.limit else None] if self.is_text else ("",)
            for pattern in patterns:
                given = ((pattern * (size // len(pattern) + 1))[:size],) if pattern else (size,)
                label = f"{self.name} of {size}" + (f", {pattern!r}" if pattern else "")
                found.append((label, _body(self.path, self.make(*given))))
        return found


def _body(path: str, part: Mapping[str, Any]) -> dict[str, Any]:
    base: dict[str, dict[str, Any]] = {
        COMPLETION: {"prompt": "x = ", "max_tokens": 2},
        CHAT: {"messages": _messages("x"), "max_tokens": 2},
        RESPONSES: {"input": "x", "max_output_tokens": 2, "store": False},
    }
    return {**base[path], **part}


def _messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _tools(count: int, text: str = "") -> dict[str, Any]:
    function = {"parameters": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}}}}
    return {
        "tools": [
            {"type": "function", "function": {"name": f"f{i}", "description": text, **function}}
            for i in range(count)
        ]
    }


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def _properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "boolean"} for i in range(count)}}


def _rules(count: int) -> str:
    rules = "".join(f'r{i}: "x" | r{i + 1} r{i + 1}\n' for i in range(count))
    return f'start: r0\n{rules}r{count}: "y"'


def _grammar(grammar: str) -> dict[str, Any]:
    return {"structured_outputs": {"grammar": grammar}}


def _predicted(text: str) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": text}, "max_tokens": 32}


def _call(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f0", "arguments": arguments}}
    messages = [
        *_messages("x"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": arguments},
    ]
    return {"messages": messages, **_tools(1)}


def _rich(count: int) -> dict[str, Any]:
    return {"prompt": "x", "n": count, "max_tokens": 64, "logprobs": 20, "ignore_eos": True}


FIELDS = (
    Growing("prompt", COMPLETION, lambda text: {"prompt": text}, 2**20, is_text=True),
    Growing("prompt of token ids", COMPLETION, lambda n: {"prompt": [88] * n}, 2**20),
    Growing("list of prompts", COMPLETION, lambda n: {"prompt": ["x"] * n}, 128),
    Growing("model", COMPLETION, lambda text: {"model": text}, 2**16, is_text=True),
    Growing("unknown field", COMPLETION, lambda text: {text: 1}, 2**16, is_text=True),
    Growing("stop", COMPLETION, lambda text: {"stop": [text] * 16, "max_tokens": 32}, 256, is_text=True),
    Growing("stop_token_ids", COMPLETION, lambda n: {"stop_token_ids": list(range(n))}, 1024),
    Growing("allowed_token_ids", COMPLETION, lambda n: {"allowed_token_ids": list(range(n))}, 1024),
    Growing("logit_bias", COMPLETION, lambda n: {"logit_bias": {str(i): i % 100 for i in range(n)}}, 1024),
    Growing("prediction", COMPLETION, _predicted, 2**16, is_text=True),
    Growing("n, tokens and log-probabilities", COMPLETION, _rich, 128),
    Growing("log-probabilities of the prompt", COMPLETION,
            lambda n: {"prompt": [88] * n, "prompt_logprobs": 20, "max_tokens": 1}, 1900),
    Growing("regex", COMPLETION, lambda text: {"structured_outputs": {"regex": text}}, 2**16, is_text=True),
    Growing("grammar", COMPLETION, lambda text: _grammar(f"start: {text}"), 2**17, is_text=True),
    Growing("regex of a grammar", COMPLETION, lambda text: _grammar(f"start: /{text}/"), 2**17, is_text=True),
    Growing("rules of a grammar", COMPLETION, lambda n: _grammar(_rules(n)), 4096),
    Growing("enum", CHAT, lambda n: _schema({"enum": list(range(n))}), 2**14),
    Growing("properties", CHAT, lambda n: _schema(_properties(n)), 4096),
    Growing("depth of a schema", CHAT, lambda n: _schema(nested(n, maxItems=2)), 256),
    Growing("pattern", CHAT, lambda text: _schema({"type": "string", "pattern": text}), 2**16, is_text=True),
    Growing("lengths of a schema", CHAT,
            lambda n: _schema({"type": "string", "minLength": n, "maxLength": 2 * n}), 2**20),
    Growing("messages", CHAT, lambda n: {"messages": _messages("x") * n}, 2**14),
    Growing("content", CHAT, lambda text: {"messages": _messages(text)}, 2**22, is_text=True),
    Growing("tools", CHAT, _tools, 128),
    Growing("description of a tool", CHAT, lambda text: _tools(1, text), 2**20, is_text=True),
    Growing("arguments of a call", CHAT, _call, 2**20, is_text=True),
    Growing("instructions", RESPONSES, lambda text: {"instructions": text}, 2**20, is_text=True),
)  # fmt: skip


class Canary:
    """A stream that is always read."""

    def __init__(self) -> None:
        self.gaps: list[tuple[float, float]] = []
        self._seen = asyncio.Event()

    async def run(self, client: AsyncClient) -> None:
        while True:
            last: float | None = None
            with contextlib.suppress(Exception):  # the fuzzer itself notices a server that is gone
                options: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "gamma": 0, "store": False}
                async for _ in client.generate("def f(x):\n", max_tokens=1500, **options):
                    now = time.monotonic()
                    if last is not None:
                        self.gaps.append((now, now - last))
                    last = now
                    self._seen.set()
            await asyncio.sleep(0.01)

    async def settle(self) -> None:
        """Wait for the next tokens, so that no gap of the time before is open."""
        for _ in range(2):
            self._seen.clear()
            await asyncio.wait_for(self._seen.wait(), ANSWER_TIMEOUT_S)

    async def longest_since(self, start: float) -> float:
        """Return the longest gap that ended after `start`; waits for the next token, so that none is open."""
        await self.settle()
        return max((gap for at, gap in self.gaps if at >= start), default=0.0)


class Memory:
    """Resident memory of all processes of a cluster, in MiB."""

    def __init__(self, launcher: int) -> None:
        self._launcher = psutil.Process(launcher)
        self.peaks: dict[int, float] = {}

    def sample(self) -> dict[int, float]:
        """Return the memory by process id, and note peaks."""
        found = {}
        for process in self._launcher.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found[process.pid] = process.memory_info().rss / 2**20
        for pid, rss in found.items():
            self.peaks[pid] = max(rss, self.peaks.get(pid, 0.0))
        return found

    async def watch(self) -> None:
        while True:
            await asyncio.to_thread(self.sample)
            await asyncio.sleep(SAMPLE_S)

    def growth(self, before: Mapping[int, float], bound_mb: float) -> list[str]:
        """Return what grew by more than a bound, of processes that were there before."""
        grown = {pid: self.peaks.get(pid, 0.0) - rss for pid, rss in before.items()}
        return [f"{_name(pid)} needed {mb:.0f} MiB more" for pid, mb in grown.items() if mb > bound_mb]


def _name(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline()[:3])[:80]
    return f"process {pid}"


async def grow_fields(cluster: Cluster, campaign: Campaign) -> list[str]:
    """Grow fields in an order that the seed draws, until all are done or the campaign is over."""
    dice, done = campaign.dice("limits"), list[str]()
    canary, memory = Canary(), Memory(cluster.launcher.pid)
    limits = httpx.Limits(max_connections=4)
    async with (
        AsyncClient(cluster.grpc) as client,
        httpx.AsyncClient(base_url=cluster.http, timeout=ANSWER_TIMEOUT_S, limits=limits) as http,
        AsyncExitStack() as stack,
    ):
        for work in (canary.run(client), memory.watch()):
            stack.push_async_callback(end_tasks, asyncio.create_task(work))
        grower = Grower(http, canary, memory, campaign)
        for growing in dice.sample(FIELDS, len(FIELDS)):
            for label, body in growing.bodies():
                if campaign.is_over:
                    return done
                await grower.check(growing.path, label, body)
            done.append(growing.name)
    return done


class Grower:
    """Sends requests and judges what they do to the canary and the memory, which other tasks read."""

    def __init__(self, http: httpx.AsyncClient, canary: Canary, memory: Memory, campaign: Campaign) -> None:
        self._http, self._canary, self._memory, self._campaign = http, canary, memory, campaign

    async def _alone_s(self, seconds: float) -> float:
        """Read the canary alone, about as long as beside a request; return its longest gap."""
        started = time.monotonic()
        await asyncio.sleep(min(max(seconds, ALONE_S[0]), ALONE_S[1]))
        return await self._canary.longest_since(started)

    async def check(self, path: str, label: str, body: dict[str, Any]) -> None:
        """Send a request until it does no harm, at most `NUM_TRIES` times; blame it if it always did."""
        has_grammar = not body.keys().isdisjoint(("structured_outputs", "response_format", "tools"))
        bound_mb = MAX_GRAMMAR_MB if has_grammar else MAX_GROWTH_MB
        gaps: list[float] = []
        alone: list[float] = []
        grown: list[str] = []
        answer: httpx.Response | None = None
        for _ in range(NUM_TRIES):
            before = self._memory.sample()
            self._memory.peaks = dict(before)
            started = time.monotonic()
            try:
                gap_s, answer = await self._send(path, body)
            except httpx.HTTPError as error:
                self._campaign.count("limits", "broken", wrong=f"{label}: {error!r}")
                return
            is_typed = answer.status_code in (200, 400, 404, 413, 429, 503, 504)
            wrong = None if is_typed else f"{label}: status {answer.status_code} {answer.text[:300]!r}"
            self._campaign.count("limits", str(answer.status_code), wrong)
            gaps.append(gap_s)
            grown = self._memory.growth(before, bound_mb)
            if gap_s <= MAX_GAP_S and not grown:
                return
            if gap_s > MAX_GAP_S:
                alone.append(await self._alone_s(time.monotonic() - started))
                if gap_s <= alone[-1] and not grown:
                    return
        if min(gaps) > max(MAX_GAP_S, *alone):
            has_run = answer is not None and answer.status_code in (200, 504)
            plain = await self._plain_gaps(path, body) if has_run else []
            if min(gaps) > max(plain, default=0.0):
                beside = f", {_seconds(plain)} s with gamma 0" if plain else ""
                waited = f"another stream waited {_seconds(gaps)} s ({_seconds(alone)} s alone{beside})"
                self._campaign.blame(f"limits: {label}: {waited}")
        # Of the last try: a process that keeps memory of the first does not need it again.
        for complaint in grown:
            self._campaign.blame(f"limits: {label}: {complaint}")

    async def _plain_gaps(self, path: str, body: dict[str, Any]) -> list[float]:
        """Return the canary's longest gaps beside the same request with gamma 0."""
        plain = {**body, "gammaray": {**body.get("gammaray", {}), "gamma": 0}}
        gaps = []
        for _ in range(NUM_TRIES):
            with contextlib.suppress(httpx.HTTPError):
                gaps.append((await self._send(path, plain))[0])
        return gaps

    async def _send(self, path: str, body: dict[str, Any]) -> tuple[float, httpx.Response]:
        """Return the canary's longest gap during a request, and the answer."""
        content = json.dumps(body).encode()
        headers = {"content-type": "application/json", "gammaray-timeout-ms": str(DEADLINE_MS)}
        # The canary is not read while this process encodes a large body, or looks at the memory.
        await self._canary.settle()
        started = time.monotonic()
        answer = await self._http.post(path, content=content, headers=headers)
        return await self._canary.longest_since(started), answer


def _seconds(gaps: list[float]) -> str:
    return ", ".join(f"{gap:.2f}" for gap in gaps)
