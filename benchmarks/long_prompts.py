"""Speed of speculation by the length of the prompt, and over the turns of an agent that edits a file.

    python -m benchmarks.long_prompts --lengths 64,1024     # two minutes: the demo pair
    python -m benchmarks.long_prompts --target build/models/qwen2.5-coder-1.5b \
        --draft build/models/qwen2.5-coder-0.5b            # after `make qwen`

A prompt is a request of exactly so many tokens, about source code of Python's standard library. First it is
completed at gamma 0, which reads all of it ("cold"). Then the draft worker reads it, and each gamma, 0
included, completes it: both workers have the prompt in their caches by then, so that these runs differ in
decoding alone. The agent resends its whole conversation at each turn, as clients of the OpenAI API do; its
first turn is cold at each gamma. No completion is stored: it would be proposed to the next ones. Speeds of
the demo pair are rough: many of its tokens arrive together.

A target worker that reads a prompt for longer than the orchestrator waits is asked again, and continues where
it was. The time to the first token includes that; `asked` counts it. Exits with 1 if a length failed, or if a
token depends on gamma.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from transformers import AutoConfig

from benchmarks.cluster import connected, run_or_exit
from benchmarks.overhead import KINDS
from benchmarks.provenance import make_parser, settings_of, write_result
from benchmarks.workloads import documents
from gammaray import AsyncClient
from gammaray.bench.systems import parse_gamma
from gammaray.bench.tables import plain_table
from gammaray.client.request import GenerateOptions
from gammaray.demo_pair import DEMO_PAIR, resolve_model
from gammaray.errors import DeadlineExceededError, GammarayError, UnavailableError
from gammaray.types import Chunk
from orchestrator.text.tokenizer import Tokenizer

REQUEST_S, DRAFT_S = 3 * 3600.0, 3600.0
"""Longest wait for a completion, and for the draft worker to read a prompt."""

MAX_ASKED = 20
SPARE_SLOTS = 512
"""Of a cache, in addition to a session's tokens."""

WARM_UP_TOKENS = 256

FILE_TOKENS, TURN_TOKENS = 4096, 64
"""Of the agent's file; and of a request for an edit with its template, at most."""

MARK = "@@text@@"
TASK = "\n\nWrite the next function."
EDITS = (
    "Add type hints to the first function.",
    "Now write a docstring for it.",
    "Now rename its first parameter.",
    "Now raise ValueError for empty input.",
    "Now write a unit test of it.",
)
"""Of the agent's turns, from the first one again if it has more."""

_SUMMARY = ("cycles", "model_cycles", "suffix_cycles", "tokens_per_cycle", "alpha", "acceptance_rate")
_COLUMNS = {
    "first s": ("first_token_s", ".2f"),
    "cached": ("cached_tokens", "d"),
    "tok/s": ("tokens_per_s", ".1f"),
    "x gamma 0": ("over_plain", ".2f"),
    "tok/ cycle": ("tokens_per_cycle", ".2f"),
    "alpha": ("alpha", ".2f"),
    "drafted": ("drafted", "d"),
    "asked": ("asked", "d"),
}
"""Heading -> name and format of a figure."""


class Run(NamedTuple):
    """A completion, and its figures as measured at the client."""

    token_ids: tuple[int, ...]
    text: str
    figures: dict[str, Any]


async def complete(
    client: AsyncClient, prompt: Sequence[int], gamma: str, salt: str, options: GenerateOptions
) -> Run:
    """Return a completion; a target worker that needs longer for the prompt is asked again.

    Raises:
        GammarayError: It failed for another reason, or too often.
    """
    asked: GenerateOptions = {**options, "gamma": parse_gamma(gamma), "cache_salt": salt, "store": False}
    began = time.perf_counter()
    for attempt in itertools.count(1):
        chunks, arrivals = list[Chunk](), list[float]()
        left_s = max(1.0, REQUEST_S - time.perf_counter() + began)
        try:
            async for chunk in client.generate(prompt, timeout_s=left_s, **asked):
                chunks.append(chunk)
                if chunk.tokens:
                    arrivals.append(time.perf_counter() - began)
            break
        except (DeadlineExceededError, UnavailableError):
            if attempt == MAX_ASKED or left_s == 1.0:
                raise
    summary, usage = chunks[-1].summary, chunks[-1].usage
    assert summary is not None
    assert usage is not None
    token_ids = tuple(token.token_id for chunk in chunks for token in chunk.tokens)
    num_first = next(len(chunk.tokens) for chunk in chunks if chunk.tokens)
    later_s = arrivals[-1] - arrivals[0]
    figures = {
        "first_token_s": arrivals[0],
        "tokens_per_s": (len(token_ids) - num_first) / later_s if later_s else None,
        "prompt": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "asked": attempt,
        "drafted": summary.drafted_tokens,
        "accepted": summary.accepted_tokens,
        **{name: getattr(summary, name) for name in _SUMMARY},
    }
    return Run(token_ids, "".join(chunk.text for chunk in chunks), figures)


def row_of(gamma: str, run: Run, plain: Run) -> dict[str, Any]:
    """Return the figures of a completion, and what it is to that of gamma 0."""
    speed, base = run.figures["tokens_per_s"], plain.figures["tokens_per_s"]
    compared = {"over_plain": speed / base if speed and base else None}
    return {"gamma": gamma, **run.figures, **compared, "is_equal": run.token_ids == plain.token_ids}


async def measure_length(
    client: AsyncClient, prompt: Sequence[int], gammas: Sequence[str], options: GenerateOptions
) -> dict[str, Any]:
    """Return the figures of a prompt: of its first request, and of each gamma once it is cached."""
    salt, runs = f"{len(prompt)} tokens", dict[str, Run]()
    worker_memory_mb()  # forgets the highest until now
    cold = await complete(client, prompt, "0", salt, options)
    draft_s = await let_draft_read(client, prompt, salt, options) if set(gammas) > {"0"} else None
    for gamma in gammas:
        runs[gamma] = await complete(client, prompt, gamma, salt, options)
    rows = [row_of("cold", cold, runs["0"]), *(row_of(name, one, runs["0"]) for name, one in runs.items())]
    return {"length": len(prompt), "draft_s": draft_s, "memory_mb": worker_memory_mb(), "rows": rows}


async def let_draft_read(
    client: AsyncClient, prompt: Sequence[int], salt: str, options: GenerateOptions
) -> float | None:
    """Complete a prompt until the draft model proposes; return the seconds, None if it never does.

    It reads a long prompt while the target decodes without proposals, and retains what it has read.
    """
    began = time.perf_counter()
    while time.perf_counter() < began + DRAFT_S:
        run = await complete(client, prompt, "4", salt, options)
        if run.figures["model_cycles"]:
            return time.perf_counter() - began
    return None


async def measure_agent(
    client: AsyncClient, tokenizer: Tokenizer, file: Sequence[int], turns: int, options: GenerateOptions
) -> list[dict[str, Any]]:
    """Return the figures of each turn of an agent, whose prompt contains all before, by gamma."""
    rows: list[dict[str, Any]] = []
    plain: list[Run] = []
    for gamma in ("0", "adaptive"):
        before, after = parts_of(tokenizer, f"{MARK}\n\n{EDITS[0]}")
        prompt = (*before, *file, *after)
        for turn in range(turns):
            run = await complete(client, prompt, gamma, f"agent {gamma}", {**options, "ignore_eos": False})
            plain += [run] if gamma == "0" else []
            rows.append({"turn": turn + 1, **row_of(gamma, run, plain[turn])})
            *_, between = parts_of(tokenizer, "", MARK, f"\n{EDITS[(turn + 1) % len(EDITS)]}\n")
            prompt = (*prompt, *tokenizer.encode(run.text, is_start=False), *between)
    return rows


def parts_of(tokenizer: Tokenizer, *contents: str) -> list[tuple[int, ...]]:
    """Return the token ids around the mark in a conversation, which a user's message begins."""
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    first, *others = tokenizer.render_chat(messages).split(MARK)
    return [tokenizer.encode(first), *(tokenizer.encode(text, is_start=False) for text in others)]


def source(tokenizer: Tokenizer, count: int) -> tuple[int, ...]:
    """Return the first `count` tokens of the standard library's files; ValueError if it has fewer."""
    found: list[int] = []
    for document in documents():
        if len(found) < count and not document.name.startswith("topics/"):
            found += tokenizer.encode(f"# {document.name}\n{document.text}\n", is_start=False)
    if not 0 < count <= len(found):
        raise ValueError(f"tokens of source code: got {count}, allowed: 1 to {len(found)}")
    return tuple(found[:count])


def long_prompt(tokenizer: Tokenizer, length: int) -> tuple[int, ...]:
    """Return a request about source code, of exactly `length` tokens."""
    before, after = parts_of(tokenizer, MARK + TASK)
    return (*before, *source(tokenizer, length - len(before) - len(after)), *after)


def worker_memory_mb() -> dict[str, dict[str, float]]:
    """Return the workers' resident memory, now and at its highest since the last call."""
    found: dict[str, dict[str, float]] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            command, files = " ".join(process.cmdline()), Path(f"/proc/{process.pid}")
            for kind in ("target", "draft"):
                if any(word in command for word in KINDS[kind]):
                    status = dict(re.findall(r"(\w+):\s+(\d+) kB", (files / "status").read_text()))
                    found[kind] = {"now": int(status["VmRSS"]) / 1024, "highest": int(status["VmHWM"]) / 1024}
                    (files / "clear_refs").write_text("5")  # sets the highest to the present one
    return found


def cache_mb(configs: Sequence[Any], num_tokens: int) -> int:
    """Return the MiB of a session of so many tokens in float32, of the model that needs most.

    By default a worker has a quarter of the free memory, at most 1 GiB. One session fits: a longer one takes
    the place of those that are retained.
    """
    sizes: list[int] = []
    for config in configs:
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        sizes.append(8 * config.num_hidden_layers * config.num_key_value_heads * head_size)
    return -(-max(sizes) * (num_tokens + SPARE_SLOTS) >> 20)


async def run(options: Any) -> dict[str, Any]:
    """Start a cluster and measure; return the result, JSON-ready."""
    target, draft = resolve_model(options.target, "target"), resolve_model(options.draft, "draft")
    configs = [AutoConfig.from_pretrained(model).get_text_config() for model in (target, draft)]
    tokenizer, console = Tokenizer(target), Console()
    context = min(config.max_position_embeddings for config in configs)
    lengths = sorted({min(length, context - options.tokens) for length in options.lengths})
    of_turns = options.turns * (options.tokens + TURN_TOKENS)
    file = source(tokenizer, min(FILE_TOKENS, context - of_turns))
    most = max(*lengths, len(file) + of_turns) + options.tokens
    budget = os.environ.setdefault("GAMMARAY_CACHE_BUDGET_MB", str(cache_mb(configs, most)))
    console.print(f"starting the cluster; at most {budget} MiB for the cache of a worker ...")
    asked: GenerateOptions = {"max_tokens": options.tokens, "temperature": options.temperature}
    asked |= {"seed": 1, "ignore_eos": True}
    gammas, points = tuple(dict.fromkeys(["0", *options.gammas])), list[dict[str, Any]]()
    how = {"weights": options.draft_weights, "dtype": options.dtype}
    async with connected(options.target, options.draft, **how) as client:
        await complete(
            client, long_prompt(tokenizer, min(WARM_UP_TOKENS, lengths[0])), "4", "warms up", asked
        )
        for length in lengths:
            try:
                point = await measure_length(client, long_prompt(tokenizer, length), gammas, asked)
            except GammarayError as error:  # what was measured until now took hours
                points.append({"length": length, "error": str(error)})
                console.print(f"{length:,} tokens: {error}")
                continue
            points.append(point)
            memory = ", ".join(f"{kind} {mb['highest']:,.0f}" for kind, mb in point["memory_mb"].items())
            draft = "never" if point["draft_s"] is None else f"after {point['draft_s']:.1f} s"
            show(console, f"{length:,} tokens; drafted {draft}; MiB: {memory}", point["rows"], "gamma")
        agent = await measure_agent(client, tokenizer, file, options.turns, asked)
        show(console, f"agent, file of {len(file):,} tokens", agent, "gamma", "turn", "prompt")
    settings = {**settings_of(options), "context": context, "cache_budget_mb": int(budget)}
    return {"settings": settings, "points": points, "agent": {"file_tokens": len(file), "rows": agent}}


def show(console: Console, title: str, rows: Sequence[dict[str, Any]], *names: str) -> None:
    """Print a table of figures, after the columns `names`."""
    table = plain_table(title, [*names, *_COLUMNS, "equal"])
    for row in rows:
        figures = ((row[name], form) for name, form in _COLUMNS.values())
        cells = ("" if value is None else f"{value:{form}}" for value, form in figures)
        table.add_row(*(str(row[name]) for name in names), *cells, "yes" if row["is_equal"] else "NO")
    console.print(table)


def is_good(result: dict[str, Any]) -> bool:
    """Return whether every length was measured, and every completion has the tokens of gamma 0."""
    points = [*result["points"], result["agent"]]
    return all("rows" in point and all(row["is_equal"] for row in point["rows"]) for point in points)


def main() -> None:
    """Command line of this module."""
    parser = make_parser(__doc__)
    parser.add_argument("--target", default=DEMO_PAIR, help="directory or hub name")
    parser.add_argument("--draft", default=DEMO_PAIR, help="directory or hub name")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft-weights", choices=("auto", "int8"), default="int8")
    parser.add_argument(
        "--lengths",
        type=lambda text: [int(one) for one in text.split(",")],
        default=[4096, 16384, 32768],
        help="tokens of the prompts, cut to the context less the completion (default: 4096,16384,32768)",
    )
    parser.add_argument("--tokens", type=int, default=64, help="tokens per completion (default: 64)")
    parser.add_argument("--gammas", type=lambda text: text.split(","), default=["0", "4", "adaptive"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--turns", type=int, default=5, help="of the agent (default: 5)")
    options = parser.parse_args()
    result = run_or_exit(run(options))
    print(f"written: {write_result('long-prompts', result, options.out)}")
    sys.exit(not is_good(result))


if __name__ == "__main__":
    main()
