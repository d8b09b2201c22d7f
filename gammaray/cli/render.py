"""Rendering of a completion on a terminal: its text, and a summary of its speculation."""

from __future__ import annotations

import sys

from rich.console import Console

from gammaray.client.completion import Completion
from gammaray.types import SpeculationSummary

_BAR_WIDTH = 30
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_VISIBLE |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def printable(text: str) -> str:
    """Return a model's text for printing; on a terminal control characters become symbols or U+FFFD."""
    return text.translate(_VISIBLE) if sys.stdout.isatty() else text


def print_summary(console: Console, completion: Completion) -> None:
    """Print speed, acceptance, time per phase and the histogram of accepted lengths."""
    summary, usage = completion.summary, completion.usage
    seconds = summary.total_ms / 1000
    rate = f"{usage.completion_tokens / seconds:.1f} tokens/s" if seconds > 0 else "no time measured"
    # Lines are not wrapped, so that scripts can parse them.
    console.print(
        f"{usage.completion_tokens} tokens in {seconds:.2f} s: {rate} (prompt: {usage.prompt_tokens} tokens, "
        f"finished by {completion.finish_reason.value}, seed {completion.seed})",
        soft_wrap=True,
    )
    console.print(
        f"alpha {_number(summary.alpha)}, {summary.tokens_per_cycle:.2f} tokens per cycle over "
        f"{summary.cycles} cycles, gamma {summary.gamma_mean:.2f} on average, "
        f"speedup over plain decoding {_number(summary.speedup_estimate, 'x')} (estimated)",
        soft_wrap=True,
    )
    console.print(f"cycles by drafter: {_drafters(summary)}", soft_wrap=True)
    console.print(f"time: {_time_split(summary)}")
    _print_histogram(console, summary.accepted_lengths)


def _drafters(summary: SpeculationSummary) -> str:
    parts = [
        f"{summary.model_cycles} model" + (f" ({n} workers)" if (n := summary.draft_workers) > 1 else ""),
        f"{summary.head_cycles} head",
        f"{summary.suffix_cycles} suffix decoding",
        f"{summary.prediction_cycles} prediction",
        f"{summary.grammar_cycles} grammar",
        f"{summary.plain_cycles} none",
    ]
    missing = (
        f"; {summary.fallback_cycles} with a later drafter than requested" if summary.fallback_cycles else ""
    )
    return ", ".join(parts) + missing


def _time_split(summary: SpeculationSummary) -> str:
    parts = {"draft": summary.draft_ms, "verify": summary.verify_ms, "other": summary.other_ms}
    total = max(summary.total_ms, 1e-9)
    return ", ".join(f"{name} {ms:.0f} ms ({ms / total:.0%})" for name, ms in parts.items())


def _print_histogram(console: Console, accepted_lengths: tuple[int, ...]) -> None:
    most = max(accepted_lengths, default=0)
    if most == 0:
        return
    console.print("accepted tokens per cycle:")
    width = len(str(most))
    for length, cycles in enumerate(accepted_lengths):
        bar = "█" * round(_BAR_WIDTH * cycles / most)
        console.print(f"  {length:>2}  {cycles:>{width}}  {bar}")


def _number(value: float | None, unit: str = "") -> str:
    return "unknown" if value is None else f"{value:.2f}{unit}"
