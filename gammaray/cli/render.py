"""Rendering of a completion: text coloured by origin and drafter, and a summary of its speculation."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from itertools import groupby
from typing import TypeAlias

from rich.console import Console
from rich.style import Style
from rich.text import Text

from gammaray.client.completion import Completion
from gammaray.types import Chunk, DrafterKind, EmittedToken, SpeculationSummary, TokenOrigin

Source: TypeAlias = DrafterKind | TokenOrigin
"""Where a token comes from: its drafter if it was accepted and the drafter is known, else its origin."""


def source_of(token: EmittedToken) -> Source:
    return token.origin if token.drafter is None else token.drafter


class OriginPainter:
    """Splits the text of one completion's chunks into runs of one source."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""
        self._sources: list[Source] = []
        self._last: Source = TokenOrigin.BONUS

    def runs(self, chunk: Chunk) -> Iterator[tuple[str, Source]]:
        """Yield the chunk's exact text in pieces, as (characters, source)."""
        for token in chunk.tokens:
            self._push(self._decoder.decode(token.token_bytes), source_of(token))
        if chunk.finish_reason is not None:
            self._push(self._decoder.decode(b"", final=True), self._last)
        tagged = zip(chunk.text, self._take(chunk.text), strict=True)
        for source, run in groupby(tagged, key=lambda pair: pair[1]):
            yield "".join(character for character, _ in run), source

    def _push(self, text: str, source: Source) -> None:
        self._text += text
        self._sources += [source] * len(text)
        self._last = source

    def _take(self, text: str) -> list[Source]:
        # Special tokens have bytes but no text: skip the bytes before the text. If the text does not occur in
        # the bytes (a tokenizer that changes what it joins), take the tags in order.
        start = max(0, self._text.find(text))
        end = start + len(text)
        taken = self._sources[start:end]
        self._text, self._sources = self._text[end:], self._sources[end:]
        return taken + [self._last] * (len(text) - len(taken))


def painted(chunk: Chunk, painter: OriginPainter | None) -> str:
    """Return the chunk's text, with the colours of its sources if there is a painter."""
    if painter is None:
        return chunk.text
    return "".join(paint(run, source) for run, source in painter.runs(chunk))


_LOOKS: dict[Source, tuple[str, str]] = {
    DrafterKind.MODEL: ("green", "proposed by the draft model, accepted"),
    DrafterKind.HEAD: ("bright_yellow", "proposed by the head in the target worker, accepted"),
    DrafterKind.SUFFIX: ("magenta", "proposed by suffix decoding, accepted"),
    DrafterKind.PREDICTION: ("cyan", "proposed from the request's prediction, accepted"),
    DrafterKind.GRAMMAR: ("bright_black", "forced by the grammar"),
    TokenOrigin.CORRECTION: ("red", "sampled by the target in place of a rejected token"),
    TokenOrigin.BONUS: ("yellow", "sampled by the target after a completely accepted draft"),
    TokenOrigin.ACCEPTED: ("bright_green", "proposed and accepted; the drafter is not known"),
}
_STYLES = {source: Style(color=color) for source, (color, _) in _LOOKS.items()}
_BAR_WIDTH = 30
# A model's text may contain control characters; on a terminal they are replaced by their Unicode symbols.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}


def is_colored(color: bool | None) -> bool:
    """Return whether to colour standard output; None, no option: on a terminal, unless NO_COLOR is set."""
    console = Console(force_terminal=color)
    return color is not False and console.color_system is not None and bool(color or not console.no_color)


def style_of(source: Source) -> Style:
    return _STYLES.get(source, _STYLES[TokenOrigin.ACCEPTED])


def paint(text: str, source: Source) -> str:
    """Return `text` with the terminal colour of its source."""
    return style_of(source).render(text.translate(_VISIBLE))


def print_legend(console: Console) -> None:
    for source, (color, meaning) in _LOOKS.items():
        console.print(Text.assemble((f"{source.value:<10}", color), f"  {meaning}"))
    console.print()


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
        console.print(f"  {length:>2}  {cycles:>{width}}  [green]{bar}[/]")


def _number(value: float | None, unit: str = "") -> str:
    return "unknown" if value is None else f"{value:.2f}{unit}"
