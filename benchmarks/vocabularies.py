"""A draft with another vocabulary than its target's: acceptance, tokens per cycle, speed, equal tokens.

    make smollm2
    python -m benchmarks.vocabularies

By default the demo draft (2,048 tokens, trained on Python) drafts for SmolLM2 (49,152 tokens) on beginnings
of functions. Draft and target take turns in one process, each with one thread; every prompt is completed by
plain decoding and by each gamma before the next one. The speed is tokens per second over those of
plain decoding, from the summed durations of the completions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoTokenizer

from benchmarks.provenance import write_result
from gammaray.bench.tables import plain_table
from gammaray.bench.workloads import fingerprint, prompts
from gammaray.config import DraftSettings, TargetSettings
from gammaray.demo_pair import resolve_model
from gammaray.types import VerificationMethod
from services.engine.loader import load_worker_engine
from services.qualify.loop import Ask, MeasuredCycle, Pair, draft_scheduler, target_scheduler
from services.vocabulary.translation import Translation, load_translation

WORKLOAD = "code"
CASES = (
    (VerificationMethod.COUPLED, 0.0),
    (VerificationMethod.COUPLED, 0.7),
    (VerificationMethod.COUPLED, 1.0),
    (VerificationMethod.REJECTION, 1.0),
    (VerificationMethod.NAIVE, 1.0),
)
"""Verification and temperature."""

_WARM_UP_TOKENS = 16


@dataclass
class Sums:
    """Completions of one verification, temperature and gamma.

    With rejection the text depends on gamma, so it is not compared with that of plain decoding.
    """

    method: VerificationMethod
    cycles: list[MeasuredCycle] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    plain_seconds: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_equal: int = 0

    def row(self) -> dict[str, Any]:
        """Return the figures, JSON-ready."""
        drafted = [cycle for cycle in self.cycles if cycle.num_drafted]
        tested = sum(cycle.num_tested for cycle in drafted)
        ratios = [plain / own for plain, own in zip(self.plain_seconds, self.seconds, strict=True)]
        return {
            "completions": len(self.seconds),
            "equal": None if self.method.uses_draft_distributions else self.num_equal,
            "alpha": sum(cycle.num_accepted for cycle in drafted) / max(1, tested),
            "tested": tested,
            "drafted_per_cycle": statistics.fmean(cycle.num_drafted for cycle in self.cycles),
            "tokens_per_cycle": statistics.fmean(cycle.num_emitted for cycle in self.cycles),
            "draft_ms": statistics.median(cycle.draft_ms for cycle in self.cycles),
            "verify_ms": statistics.median(cycle.verify_ms for cycle in self.cycles),
            "tokens_per_s": self.num_tokens / sum(self.seconds),
            "speed": sum(self.plain_seconds) / sum(self.seconds),
            "speed_range": [min(ratios), max(ratios)],
        }


def share_of_common(translation: Translation, texts: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens that both vocabularies have, among those of some texts."""
    common = set(translation.common.target_ids)
    tokens = [token_id for text in texts for token_id in text]
    return sum(token_id in common for token_id in tokens) / max(1, len(tokens))


def measure(
    pair: Pair,
    asked: Sequence[Sequence[int]],
    gammas: Sequence[int],
    num_tokens: int,
    console: Console,
) -> tuple[list[dict[str, Any]], list[Sequence[int]]]:
    """Complete every prompt in every way; return the rows, and the greedy texts of plain decoding."""
    sums: dict[tuple[VerificationMethod, float, int], Sums] = {}
    plain_texts = list[Sequence[int]]()
    for seed, prompt in enumerate(asked):
        for method, temperature in CASES:
            ask = Ask(tuple(prompt), num_tokens, temperature, seed, (), method)
            plain, plain_s = _timed(pair, ask, 0)
            if temperature == 0:
                plain_texts.append(plain.token_ids)
            for gamma in gammas:
                text, seconds = _timed(pair, ask, gamma)
                one = sums.setdefault((method, temperature, gamma), Sums(method))
                one.cycles += text.cycles
                one.seconds.append(seconds)
                one.plain_seconds.append(plain_s)
                one.num_tokens += len(text.token_ids)
                one.num_equal += text.token_ids == plain.token_ids
        console.print(f"{seed + 1} of {len(asked)} prompts", style="dim")
    rows = [
        {"verification": method.value, "temperature": temperature, "gamma": gamma} | one.row()
        for (method, temperature, gamma), one in sums.items()
    ]
    return rows, plain_texts


def _timed(pair: Pair, ask: Ask, gamma: int) -> tuple[Any, float]:
    began = time.perf_counter()
    text = pair.complete(ask, gamma)
    return text, time.perf_counter() - began


def main() -> None:
    """Measure, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="build/models/smollm2", help="directory, hub name or GGUF file")
    parser.add_argument("--draft", default="demo", help="the same; another vocabulary")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--gammas", default="2,4,8")
    parser.add_argument("--json", type=Path, help="result file; omitted: a new one in benchmarks/results")
    given = parser.parse_args()
    console = Console()
    target_path, draft_path = resolve_model(given.target, "target"), resolve_model(given.draft, "draft")
    target_settings, draft_settings = TargetSettings(model=given.target), DraftSettings(model=given.draft)
    target = load_worker_engine(target_path, target_settings)
    draft = load_worker_engine(draft_path, draft_settings)
    translation = load_translation(draft_path, draft.vocab_size, target_path)
    pair = Pair(
        target_scheduler(target, target_settings), draft_scheduler(draft, draft_settings, translation)
    )
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    texts = prompts(WORKLOAD, given.prompts)
    asked = [tokenizer(text)["input_ids"] for text in texts]
    gammas = [int(gamma) for gamma in given.gammas.split(",")]
    for gamma in (0, *gammas):  # the first forwards of each shape are slow
        pair.complete(Ask(tuple(asked[0]), _WARM_UP_TOKENS, 0.0, 0, ()), gamma)
    rows, plain_texts = measure(pair, asked, gammas, given.tokens, console)
    vocabularies = {
        "target": translation.target_size,
        "draft": draft.vocab_size,
        "shared": len(translation.common.target_ids),
        "share_of_prompts": share_of_common(translation, asked),
        "share_of_texts": share_of_common(translation, plain_texts),
    }
    console.print(f"shared tokens: {vocabularies}")
    table = plain_table(
        "A draft with another vocabulary",
        ("verification", "T", "gamma", "alpha", "tokens/cycle", "speed", "range", "equal"),
    )
    for row in rows:
        table.add_row(
            *(row["verification"], f"{row['temperature']:g}", str(row["gamma"])),
            *(f"{row['alpha']:.3f}", f"{row['tokens_per_cycle']:.2f}", f"{row['speed']:.2f}"),
            "{:.2f}-{:.2f}".format(*row["speed_range"]),
            "" if row["equal"] is None else f"{row['equal']} of {row['completions']}",
        )
    console.print(table)
    result = {
        "target": given.target,
        "draft": given.draft,
        "prompts": {"workload": WORKLOAD, "count": given.prompts, "sha256": fingerprint(texts)},
        "tokens": given.tokens,
        "vocabularies": vocabularies,
        "rows": rows,
    }
    console.print(f"written: {write_result('vocabularies', result, given.json)}")


if __name__ == "__main__":
    main()
