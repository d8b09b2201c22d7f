"""Receipts: margins of honest targets, what the check finds, and what it costs.

    python -m benchmarks.receipts                               # the demo pair
    python -m benchmarks.receipts --target build/models/smollm2
    python -m benchmarks.receipts --parts honest --receipts 1000
    python -m benchmarks.receipts --target build/models/smollm2 --head benchmarks/heads/smollm2 \\
        --parts honest --receipts 200

- margins: by how much logits differ from those of the check (float32, feeds of 256 tokens): with feeds of
  other sizes, with the layers of `transformers`, in bfloat16. For each row the spread, the largest minus the
  smallest difference, over the tokens of a probability of at least 1e-6: no score overtakes another by more.
  And tokens drawn from these logits at temperature 1 with the noise of 16 seeds: the share of which the check
  takes within a margin only, and by how much.
- found: what the check says of completions at temperature 1 after a token was replaced, the temperature was
  raised, another seed was used, and of those of an int8 target that calls itself float32 or bfloat16.
- cost: CPU time of a check over that of a forward that returns logits of every row, in turns.
- honest: receipts of two orchestrators and their workers, with gamma 0, 8 and adaptive, of whose sessions the
  other orchestrator takes over every fourth; target workers are killed in between. Every one must be valid.

Writes figures with their provenance; exits with 1 if an honest receipt is not valid.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.cluster import at_once, run_or_exit
from benchmarks.pair_loop import Ask, Pair
from benchmarks.provenance import make_parser, settings_of, write_result
from benchmarks.workloads import prompts
from gammaray.bench.tables import plain_table
from gammaray.client.request import GenerateOptions, build_request
from gammaray.config import OrchestratorSettings
from gammaray.demo_pair import DEMO_PAIR, resolve_model
from gammaray.receipts.keys import read_receipt_keys, rotate
from gammaray.receipts.receipt import Receipt, SignedReceipt
from gammaray.types import Chunk, FinishReason, GenerationRequest, VerificationMethod
from orchestrator.launcher.redis_server import RedisServer
from orchestrator.service import Orchestrator
from services.engine.core.batch import SequenceInput
from services.engine.core.model import eos_token_ids
from services.engine.engine import Engine
from services.engine.loader import load_engine
from services.engine.sampling.noise import Noise
from services.own.target_scheduler import TargetScheduler
from services.process.fingerprints import vocab_sha256, weights_sha256
from services.receipts.check import MARGINS, ReceiptChecker
from services.scheduling.planning import Limits

_PROMPT, _COST_TOKENS, _AT_ONCE = 64, 192, 8
PARTS = ("margins", "found", "cost", "honest")
_LEAST = 1e-6
_FEED, _SEEDS = 256, 16
_THREADS = int(os.environ.get("GAMMARAY_THREADS", "1"))
_ISSUERS: dict[str, tuple[dict[str, Any], int, float]] = {
    "kernel, float32, 1 token": ({}, 1, 1.0),
    "kernel, float32, 9 tokens": ({}, 9, 1.0),
    "transformers, float32, 256 tokens": ({"engine": "transformers"}, 256, 1.0),
    "transformers, float32, 9 tokens": ({"engine": "transformers"}, 9, 1.0),
    "transformers, bfloat16, 256 tokens": ({"engine": "transformers", "dtype": "bfloat16"}, 256, 1.0),
    "transformers, bfloat16, 9 tokens": ({"engine": "transformers", "dtype": "bfloat16"}, 9, 1.0),
    "the same at temperature 1 / 1.05": ({"engine": "transformers", "dtype": "bfloat16"}, 9, 1.05),
    "kernel, bfloat16, 256 tokens": ({"dtype": "bfloat16"}, 256, 1.0),
    "kernel, int8 weights, 256 tokens": ({"weights": "int8"}, 256, 1.0),
}
"""Options of an engine, tokens of a feed, and a factor of its logits."""

_WAYS: dict[str, GenerateOptions] = {
    "gamma 0": {"gamma": 0},
    "gamma 8": {"gamma": 8},
    "adaptive": {},
    "adaptive, filters and penalties": {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.3},
}
_names = map(str, count())


def logits_of(engine: Engine, tokens: Sequence[int], feed: int) -> Iterator[Tensor]:
    """Yield the logits of all tokens, fed in pieces."""
    name = next(_names)
    for start in range(0, len(tokens), feed):
        piece = tokens[start : start + feed]
        yield engine.step([SequenceInput(name, start, piece, len(piece))])[0]
    engine.release(name)


def margins(model: str, texts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Return by how much two logits of a row move, at most, and the gaps of drawn tokens, for each issuer."""
    own = load_engine(model, device="cpu", threads=_THREADS)
    reference = [torch.cat(list(logits_of(own, text, _FEED))) for text in texts]
    rows = []
    for name, (options, feed, factor) in _ISSUERS.items():
        engine = load_engine(model, device="cpu", threads=_THREADS, **options)
        spreads, gaps = list[float](), list[float]()
        for number, (text, expected) in enumerate(zip(texts, reference, strict=True)):
            issued = torch.cat(list(logits_of(engine, text, feed))) * factor
            change, is_likely = issued - expected, expected.softmax(-1) >= _LEAST
            high = change.masked_fill(~is_likely, -torch.inf).amax(-1)
            low = change.masked_fill(~is_likely, torch.inf).amin(-1)
            spreads += (high - low).tolist()
            gaps += _gaps(issued, expected, number)
        at, tied = sorted(spreads), sorted(gap for gap in gaps if gap > 0)
        rows.append(
            {
                "issuer": name,
                "rows": len(at),
                "median": statistics.median(at),
                "p99_9": _quantile(at, 0.999),
                "largest": at[-1],
                "draws": len(gaps),
                "tied": len(tied) / len(gaps),
                "tied_mean": sum(tied) / max(1, len(tied)),
                "tied_p99": _quantile(tied, 0.99),
                "tied_largest": _quantile(tied, 1),
            }
        )
    return rows


def _gaps(issued: Tensor, expected: Tensor, first_seed: int) -> list[float]:
    """Return by how much the check's best score exceeds that of the tokens drawn from `issued`."""
    gaps = list[float]()
    for seed in range(first_seed * _SEEDS, (first_seed + 1) * _SEEDS):
        noise = Noise(seed, 0, issued.shape[-1]).gumbel(0, len(issued))
        drawn = (issued + noise).argmax(-1, keepdim=True)
        scores = expected + noise
        gaps += (scores.amax(-1) - scores.gather(-1, drawn)[:, 0]).tolist()
    return gaps


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def completions(
    model: str, engine: Engine, asked: Sequence[Sequence[int]], num_tokens: int, **fields: Any
) -> list[Receipt]:
    """Return receipts of completions by an engine that calls itself float32, by default at temperature 1."""
    pair = Pair(TargetScheduler(engine, Limits(1024, _FEED)), None)
    weights, tokenizer, ends = weights_sha256(model), vocab_sha256(model), eos_token_ids(model)
    receipts = []
    for number, prompt in enumerate(asked):
        ask = Ask(tuple(prompt), num_tokens, 1.0, number, (), fields=fields)
        receipts.append(
            Receipt(
                issued_at=0,
                model="",
                model_identity=f"{weights}/float32",
                tokenizer=tokenizer,
                eos_token_ids=tuple(sorted(ends)),
                verification=VerificationMethod.COUPLED,
                prompt_token_ids=ask.prompt,
                sampling=ask.params,
                max_tokens=num_tokens,
                token_ids=pair.complete(ask, 0).token_ids,
                ignore_eos=True,
                finish_reason=FinishReason.LENGTH,
            )
        )
    return receipts


def with_changes(
    receipts: Sequence[Receipt], int8: Sequence[Receipt], half: Sequence[Receipt], vocab: int
) -> dict[str, list[Receipt]]:
    """Return what dishonest servers would sign, and honest ones that compute in float32 and in bfloat16."""
    draw = random.Random(1)

    def token(receipt: Receipt) -> Receipt:
        tokens, at = list(receipt.token_ids), len(receipt.token_ids) // 2
        tokens[at] = (tokens[at] + draw.randrange(1, vocab)) % vocab
        return receipt.model_copy(update={"token_ids": tuple(tokens)})

    def sampling(**fields: Any) -> list[Receipt]:
        return [one.model_copy(update={"sampling": replace(one.sampling, **fields)}) for one in receipts]

    def bfloat16(given: Sequence[Receipt]) -> list[Receipt]:
        identity = receipts[0].model_identity.replace("float32", "bfloat16")
        return [one.model_copy(update={"model_identity": identity}) for one in given]

    changed = {
        "the token in the middle": [token(one) for one in receipts],
        "temperature 1.05": sampling(temperature=1.05),
        "temperature 1.2": sampling(temperature=1.2),
        "top_p 0.95": sampling(top_p=0.95),
        "another seed": sampling(seed=10**6),
        "int8 target": list(int8),
    }
    return {
        "honest": list(receipts),
        "honest, bfloat16": bfloat16(half),
        **changed,
        **{f"{name}, called bfloat16": bfloat16(given) for name, given in changed.items()},
    }


def found(model: str, checker: ReceiptChecker, asked: Sequence[Sequence[int]], num_tokens: int) -> Any:
    """Return how many changed receipts the check finds, and after how many tokens."""
    receipts = completions(model, checker.engine, asked, num_tokens)
    others: Sequence[dict[str, Any]] = ({"weights": "int8"}, {"engine": "transformers", "dtype": "bfloat16"})
    int8, half = (
        completions(model, load_engine(model, device="cpu", threads=_THREADS, **options), asked, num_tokens)
        for options in others
    )
    rows = []
    changed = with_changes(receipts, int8, half, checker.engine.vocab_size)
    for name, given in changed.items():
        verdicts = [checker.verdict(one) for one in given]
        after = sorted(verdict.position + 1 for verdict in verdicts if verdict.position is not None)
        rows.append(
            {
                "change": name,
                "receipts": len(given),
                "found": sum(verdict.result == "invalid" for verdict in verdicts),
                "tokens_each": num_tokens,
                "median_tokens": statistics.median(after) if after else None,
                "most_tokens": after[-1] if after else None,
                "ties": sum(verdict.num_ties for verdict in verdicts),
                "largest_gap": max(verdict.largest_gap for verdict in verdicts),
            }
        )
    return rows


def cost(model: str, checker: ReceiptChecker, prompt: Sequence[int], turns: int) -> list[dict[str, Any]]:
    """Return the CPU time of a check over that of a forward with the logits of every row, in turns."""
    cases: dict[str, dict[str, Any]] = {
        "temperature 1": {},
        "temperature 0": {"temperature": 0.0},
        "top_p and a penalty": {"top_p": 0.9, "frequency_penalty": 0.3},
    }
    rows = []
    for name, fields in cases.items():
        (receipt,) = completions(model, checker.engine, [prompt], _COST_TOKENS, **fields)
        tokens = [*receipt.prompt_token_ids, *receipt.token_ids][:-1]
        ratios, times = list[float](), list[float]()
        for _ in range(turns + 1):  # the first one warms up
            began = time.process_time()
            for _logits in logits_of(checker.engine, tokens, _FEED):
                pass
            between = time.process_time()
            assert checker.verdict(receipt).result == "valid"
            times.append(time.process_time() - between)
            ratios.append(times[-1] / (between - began))
        rows.append(
            {
                "case": name,
                "prompt_tokens": len(receipt.prompt_token_ids),
                "tokens": len(receipt.token_ids),
                "turns": turns,
                "check_ms": statistics.median(times[1:]) * 1e3,
                "ratio": statistics.median(ratios[1:]),
                "ratios": sorted(ratios[1:]),
            }
        )
    return rows


@contextmanager
def running_workers(options: argparse.Namespace, redis_url: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run two target workers, with the head, or without one a draft worker; yield the target workers."""
    own = ["--model", options.target, "--redis-url", redis_url]
    more = ["--engine", options.engine, "--dtype", options.dtype, "--cache-budget-mb", "512"]
    processes = [_worker("target", *own, "--head", options.head, *more) for _ in range(2)]
    draft = [] if options.head else [_worker("draft", *own)]
    try:
        for process in (*processes, *draft):
            assert process.stdout is not None
            process.stdout.readline()  # written when it serves
        yield processes
    finally:
        for process in (*processes, *draft):
            process.kill()
            process.wait()


def _worker(role: str, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", f"services.{role}_worker", "--listen", "127.0.0.1:0", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


async def honest(checker: ReceiptChecker, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the verdicts on receipts of two orchestrators and their workers."""
    keys_file, counts = folder / "keys.json", Counter[str]()
    rotate(keys_file)
    texts = prompts("mixed", 64)
    with RedisServer.start(folder) as server, running_workers(options, server.url) as workers:
        settings = OrchestratorSettings(
            model=options.target, redis_url=server.url, receipt_keys_file=str(keys_file), metrics_listen=""
        )
        pair = [await Orchestrator.start(settings) for _ in range(2)]

        async def one(number: int) -> str:
            way, is_broken = list(_WAYS)[number % len(_WAYS)], number // len(_WAYS) % 4 == 3
            if number % options.kill_every == options.kill_every - 1:
                counts["target workers killed"] += 1
                workers[0].kill()  # the other one goes on with its sessions
                again = _worker("target", *workers[0].args[5:])  # type: ignore[index]
                workers[:] = [workers[1], again]
            request = build_request(
                texts[number % len(texts)],
                **{"max_tokens": options.tokens, "seed": number, "ignore_eos": True, **_WAYS[way]},
                session_id=f"receipt-{number}",
                receipt=True,
            )
            last = await _completed(pair, request, is_broken=is_broken)
            assert last.summary is not None
            counts[f"{way}, taken over" if is_broken else way] += 1
            counts["cycles"] += last.summary.cycles
            counts["cycles of a draft model or head"] += last.summary.model_cycles + last.summary.head_cycles
            return last.receipt

        try:
            signed = await at_once(options.receipts, _AT_ONCE, one)
        finally:
            for orchestrator in pair:
                await orchestrator.close()
    keys, verdicts = read_receipt_keys(keys_file), Counter[str]()
    bad, num_tokens, ties, largest = [], 0, 0, 0.0
    for text in signed:
        found = SignedReceipt.parse(text)
        found.check(keys)
        verdict = checker.verdict(found.receipt)
        verdicts[verdict.result] += 1
        num_tokens, ties = num_tokens + verdict.num_tokens, ties + verdict.num_ties
        largest = max(largest, verdict.largest_gap)
        if verdict.result != "valid":
            bad.append({"receipt": text, **asdict(verdict)})
    figures = {"tokens": num_tokens, "ties": ties, "largest_gap": largest}
    return {"counts": counts, "verdicts": verdicts, **figures, "bad": bad}


async def _completed(pair: Sequence[Orchestrator], request: GenerationRequest, *, is_broken: bool) -> Chunk:
    """Return the last piece of a completion; a broken one is resumed on the other orchestrator."""
    chunks = list[Chunk]()
    async with aclosing(pair[0].generate(request)) as stream:
        async for chunk in stream:
            chunks.append(chunk)
            if is_broken and chunk.offset + len(chunk.tokens) >= request.max_tokens // 3:
                break
    if chunks[-1].finish_reason is None:
        await pair[0].leases.settled()
        offset = chunks[-1].offset + len(chunks[-1].tokens)
        chunks += [chunk async for chunk in pair[1].generate(replace(request, resume_from=offset))]
    return chunks[-1]


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the parts that were asked for."""
    model = resolve_model(options.target, "target")
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    asked = [tokenizer(text)["input_ids"][-_PROMPT:] for text in prompts("mixed", options.prompts)]
    checker, result = ReceiptChecker(options.target), dict[str, Any]()
    if "margins" in options.parts:
        own = completions(model, checker.engine, asked, options.tokens)
        texts = [[*one.prompt_token_ids, *one.token_ids] for one in own]
        result["margins"] = margins(model, texts)
    if "found" in options.parts:
        result["found"] = found(model, checker, asked, options.tokens)
    if "cost" in options.parts:
        result["cost"] = cost(model, checker, asked[0], options.turns)
    if "honest" in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            result["honest"] = run_or_exit(honest(checker, options, Path(folder)))
    return result


def main() -> None:
    """Measure, print and write the result."""
    parser = make_parser(__doc__)
    parser.add_argument("--target", default=DEMO_PAIR)
    parser.add_argument("--head", default="", help="drafts in the target workers of the part honest")
    parser.add_argument("--engine", default="auto", help="of the target workers of the part honest")
    parser.add_argument("--dtype", default="auto", help="of the target workers of the part honest")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:3])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96, help="of each completion")
    parser.add_argument("--turns", type=int, default=9, help="of the part cost")
    parser.add_argument("--receipts", type=int, default=1000, help="of the part honest")
    parser.add_argument("--kill-every", type=int, default=250, help="receipts between two killed workers")
    options = parser.parse_args()
    result = measured(options)
    for name in ("margins", "found", "cost"):
        if rows := result.get(name):
            shown = [key for key in rows[0] if key != "ratios"]
            table = plain_table(name, tuple(shown))
            for row in rows:
                table.add_row(
                    *(f"{row[key]:.3g}" if isinstance(row[key], float) else str(row[key]) for key in shown)
                )
            Console(width=160).print(table)
    bad = result.get("honest", {}).get("bad", [])
    if "honest" in result:
        print({name: value for name, value in result["honest"].items() if name != "bad"}, f"bad: {len(bad)}")
    settings = {**settings_of(options), "threads": _THREADS, "margins": MARGINS}
    print(f"written to {write_result('receipts', {'settings': settings, **result}, options.out)}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
