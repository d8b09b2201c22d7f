"""Drafts in int8 and int4: time of a forward, memory of the weights, agreement with the target.

    python -m benchmarks.draft_weights
    python -m benchmarks.draft_weights --target build/models/smollm2 --draft build/models/smollm2

All drafts are in one process with one thread and take turns, so that what else runs on the machine touches
all; the ratios of the medians are what counts. A turn is several forwards of one draft after each other, and
"chain" a chain of four tokens in one call, per token.

Agreement is the chance that a token drafted after a text of the target is accepted: the target completes
prompts by plain decoding, each draft reads the texts, and the draws of both with the same noise are compared
at every token, at temperature 1 with several seeds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.provenance import write_result
from gammaray.bench.tables import plain_table
from gammaray.bench.workloads import fingerprint, prompts
from gammaray.demo_pair import resolve_model
from services.engine.engine import Engine, SequenceInput
from services.engine.loader import load_engine
from services.engine.native.runner import NativeRunner
from services.engine.sampling.noise import Noise

WEIGHTS = ("auto", "int8", "int4")
ROWS = (1, 2, 4, 6, 8, 12)
TEMPERATURES = (0.0, 1.0)

_CHAIN = 4
_FORWARDS = 4  # of a turn
_SESSION = "s"


def weight_bytes(engine: Engine) -> int:
    """Return the bytes of a model's weights in the layout of the compiled kernel."""
    assert isinstance(engine.runner, NativeRunner)
    return sum(kept.nbytes for kept in engine.runner.model.kept if isinstance(kept, Tensor))


def times(drafts: Mapping[str, Engine], context: int, turns: int) -> dict[str, dict[str, list[float]]]:
    """Return by draft and shape the milliseconds of a forward in each turn; of a chain, per token."""
    tokens = [1 + index % 1000 for index in range(context)]
    for engine in drafts.values():
        engine.step([SequenceInput(_SESSION, 0, tokens, 1)])
    shapes: dict[str, tuple[Callable[[Engine], object], int]] = {
        f"{rows} row{'s' * (rows > 1)}": (_step(context, tokens[:rows]), 1) for rows in ROWS
    }
    shapes["chain"] = (_chain(context), _CHAIN)
    taken: dict[str, dict[str, list[float]]] = {name: {shape: [] for shape in shapes} for name in drafts}
    for _ in range(turns):
        for shape, (forward, count) in shapes.items():
            for name, engine in drafts.items():
                began = time.perf_counter()
                for _ in range(_FORWARDS):
                    forward(engine)
                seconds = time.perf_counter() - began
                taken[name][shape].append(1e3 * seconds / (_FORWARDS * count))
    return taken


def _step(context: int, tokens: list[int]) -> Callable[[Engine], object]:
    return lambda engine: engine.step([SequenceInput(_SESSION, context, tokens, len(tokens))])


def _chain(context: int) -> Callable[[Engine], object]:
    def forward(engine: Engine) -> None:
        engine.truncate(_SESSION, context)
        engine.chain(SequenceInput(_SESSION, context, [1] * _CHAIN, _CHAIN))

    return forward


def agreement(
    target: Engine,
    drafts: Mapping[str, Engine],
    asked: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    num_seeds: int,
) -> dict[str, dict[float, float]]:
    """Return by draft and temperature the share of equal draws of target and draft.

    Args:
        target: Its texts are completed by plain decoding.
        drafts: Read the texts.
        asked: Token ids of the prompts.
        num_tokens: Tokens per completion.
        num_seeds: Draws per token and draft above temperature 0.
    """
    equal = {name: dict.fromkeys(TEMPERATURES, 0) for name in drafts}
    drawn = dict.fromkeys(TEMPERATURES, 0)
    for prompt in asked:
        for temperature in TEMPERATURES:
            text, wanted = _completion(target, prompt, temperature, num_tokens)
            read = {
                name: engine.step([SequenceInput(_SESSION, 0, text, num_tokens)])[0]
                for name, engine in drafts.items()
            }
            for seed in range(num_seeds if temperature else 1):
                gumbel = Noise(seed, 1, target.vocab_size).gumbel(len(prompt), num_tokens) * temperature
                goal = (wanted + gumbel).argmax(1)
                drawn[temperature] += num_tokens
                for name, logits in read.items():
                    equal[name][temperature] += int(((logits + gumbel).argmax(1) == goal).sum())
    for engine in drafts.values():
        engine.release(_SESSION)
    return {name: {t: count / drawn[t] for t, count in counts.items()} for name, counts in equal.items()}


def _completion(
    target: Engine, prompt: Sequence[int], temperature: float, num_tokens: int
) -> tuple[list[int], Tensor]:
    """Return a prompt and its completion without the last token, and the logits of all drawn tokens."""
    text, logits = list(prompt), []
    noise = Noise(0, 0, target.vocab_size).gumbel(len(prompt), num_tokens) * temperature
    fed = 0
    for index in range(num_tokens):
        (row,) = target.step([SequenceInput(_SESSION, fed, text[fed:], 1)])
        fed = len(text)
        logits.append(row)
        text.append(int((row[0] + noise[index]).argmax()))
    target.release(_SESSION)
    return text[:-1], torch.cat(logits)


def main() -> None:
    """Measure, print tables and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="demo", help="directory, hub name or GGUF file")
    parser.add_argument("--draft", default="demo", help="the same, of the target's vocabulary")
    parser.add_argument("--workload", default="code")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96, help="of each completion")
    parser.add_argument("--seeds", type=int, default=8, help="draws per token at temperature 1")
    parser.add_argument("--context", type=int, default=200, help="tokens before the rows")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--json", type=Path, help="result file; omitted: a new one in benchmarks/results")
    given = parser.parse_args()
    console = Console()
    target_path, draft_path = resolve_model(given.target, "target"), resolve_model(given.draft, "draft")
    drafts = {weights: load_engine(draft_path, threads=1, weights=weights) for weights in WEIGHTS}
    taken = times(drafts, given.context, given.turns)
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    texts = prompts(given.workload, given.prompts)
    agree = agreement(
        load_engine(target_path, threads=1),
        drafts,
        [tokenizer(text)["input_ids"] for text in texts],
        num_tokens=given.tokens,
        num_seeds=given.seeds,
    )
    rows = [_row(name, engine, taken, agree[name]) for name, engine in drafts.items()]
    _print(console, rows)
    result = {
        "target": given.target,
        "draft": given.draft,
        "prompts": {"workload": given.workload, "count": given.prompts, "sha256": fingerprint(texts)},
        **{name: getattr(given, name) for name in ("tokens", "seeds", "context", "turns")},
        "rows": rows,
    }
    console.print(f"written: {write_result('draft_weights', result, given.json)}")


def _row(
    name: str,
    engine: Engine,
    taken: Mapping[str, Mapping[str, Sequence[float]]],
    agree: Mapping[float, float],
) -> dict[str, Any]:
    median = {shape: statistics.median(own) for shape, own in taken[name].items()}
    return {
        "weights": name,
        "kernel": engine.kernel,
        "weight_mb": weight_bytes(engine) / 1e6,
        "median_ms": median,
        "least_ms": {shape: min(own) for shape, own in taken[name].items()},
        "over_auto": {shape: own / statistics.median(taken["auto"][shape]) for shape, own in median.items()},
        "agreement": {f"{temperature:g}": share for temperature, share in agree.items()},
    }


def _print(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    table = plain_table(
        "Weights of a draft; times are medians in ms", ("", *(row["weights"] for row in rows))
    )
    table.add_row("weights (MB)", *(f"{row['weight_mb']:.1f}" for row in rows))
    for shape in rows[0]["median_ms"]:
        cells = (f"{row['median_ms'][shape]:.3f} ({row['over_auto'][shape]:.2f})" for row in rows)
        table.add_row(shape, *cells)
    for temperature in rows[0]["agreement"]:
        shares = (f"{row['agreement'][temperature]:.3f}" for row in rows)
        table.add_row(f"agreement, T {temperature}", *shares)
    console.print(table)


if __name__ == "__main__":
    main()
