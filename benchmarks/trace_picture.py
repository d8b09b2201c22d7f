"""A timeline of one stream as SVG, from the spans that a cluster exports to this program's own OTLP receiver.

python -m benchmarks.trace_picture --target demo --draft demo --svg docs/trace.svg
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from benchmarks.cluster import connected, run_or_exit
from benchmarks.otlp_receiver import ReceivedSpan, receiving
from gammaray.telemetry import names as t

PROMPT = "def read_lines(path):\n"
RECEIVE_TIMEOUT_S = 30.0

KINDS = {
    "drafted after the verdict": "#3b8fd9",
    "drafted ahead, used": "#2fa37c",
    "drafted ahead, not used": "#2fa37c66",
    "verified": "#e08a1e",
    "verified, sent early": "#b765b5",
}
"""Kind of forwards -> colour, in the order of the legend; what is sent early goes before the last verdict."""
AFTER, AHEAD, IN_VAIN, VERIFIED, EARLY = KINDS

LANES = {"orchestrator": "accepted/drafted", "draft worker": "forwards", "target worker": "forwards"}

_STYLE = """text{font:12px system-ui,sans-serif;fill:#1f2328}
.t{font-size:14px;font-weight:600}.m{fill:#59636e}.e{text-anchor:middle}
.g{stroke:#8884}.l{fill:#8881}.c{fill:#8883;stroke:#888}.v{stroke:#888;stroke-dasharray:2 3}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.m{fill:#9198a1}}"""
_WIDTH, _LEFT, _RIGHT = 1000, 116, 14
_TOP, _LANE, _GAP = 64, 40, 8
_BOTTOM = _TOP + len(LANES) * (_LANE + _GAP)
_MAX_TICKS = 12
_LETTER = 6.2  # width of one, in pixels


@dataclass(frozen=True)
class Cycle:
    """A cycle with the spans below it."""

    span: ReceivedSpan
    proposes: Sequence[ReceivedSpan]  # of the draft worker
    aheads: Sequence[ReceivedSpan]
    verifies: Sequence[ReceivedSpan]  # of the target worker
    is_hit: bool  # whether its proposal was prepared before it began


@dataclass(frozen=True)
class Bar:
    """Forwards of one worker."""

    lane: int
    kind: str
    start_ns: float
    end_ns: float
    note: str


def cycles_of(spans: Sequence[ReceivedSpan]) -> list[Cycle]:
    """Return the cycles of one trace, in order."""
    below: dict[str, list[ReceivedSpan]] = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        below.setdefault(span.parent_id, []).append(span)

    def served(calls: Sequence[ReceivedSpan], name: str) -> list[ReceivedSpan]:
        return [span for call in calls for span in below.get(call.span_id, ()) if span.name == name]

    found = []
    for span in sorted(spans, key=lambda span: span.start_ns):
        if span.name == t.SPAN_CYCLE:
            calls = below.get(span.span_id, [])
            is_hit = any(call.attributes.get(t.DRAFT_AHEAD_HIT) for call in calls)
            proposes, aheads, verifies = (
                served(calls, name) for name in (t.SPAN_PROPOSE, t.SPAN_AHEAD, t.SPAN_VERIFY)
            )
            found.append(Cycle(span, proposes, aheads, verifies, is_hit))
    return found


def bars_of(cycles: Sequence[Cycle]) -> Iterator[Bar]:
    """Yield the forwards of the workers; drafting ahead was of use if the next cycle's proposal is a hit."""
    for cycle, following in zip(cycles, [*cycles[1:], None], strict=True):
        for span in cycle.proposes:
            yield from _block(1, AFTER, span)
        for span in cycle.aheads:
            kind = AHEAD if following is not None and following.is_hit else IN_VAIN
            forwards = span.attributes[t.STEPS]
            end = ", stopped" if span.attributes[t.AHEAD_STOPPED] else ""
            yield Bar(1, kind, span.start_ns, span.end_ns, f"{forwards} forwards{end}")
        for span in cycle.verifies:
            yield from _block(2, EARLY if span.attributes.get(t.EARLY) else VERIFIED, span)


def _block(lane: int, kind: str, span: ReceivedSpan) -> Iterator[Bar]:
    facts = span.attributes
    if facts[t.STEPS]:  # else nothing ran: the proposal was there, or tokens are missing
        start = span.start_ns + facts[t.QUEUE_MS] * 1e6
        end = min(start + facts[t.COMPUTE_MS] * 1e6, span.end_ns)
        yield Bar(lane, kind, start, end, f"{facts[t.DRAFTED]} draft tokens, forwards: {facts[t.STEPS]}")


def draw(spans: Sequence[ReceivedSpan], num_cycles: int, pair: str) -> str:
    """Return the timeline of a trace's first cycles; the one that reads the prompt is left out.

    Args:
        spans: Of one trace.
        num_cycles: How many are drawn.
        pair: Name of the models.
    """
    cycles = cycles_of(spans)
    shown = cycles[1 : num_cycles + 1] or cycles
    begin = shown[0].span.start_ns
    total_ms = (shown[-1].span.end_ns - begin) / 1e6
    scale = (_WIDTH - _LEFT - _RIGHT) / total_ms

    def x_of(time_ns: float) -> float:
        return _LEFT + min(max((time_ns - begin) / 1e6, 0.0), total_ms) * scale

    tokens = sum(cycle.span.attributes[t.EMITTED] for cycle in shown)
    counts = f"{len(shown)} of its {len(cycles)} cycles, {tokens} tokens in {total_ms:.0f} ms"
    title = f"{pair}: one stream, {counts}"
    bars = [bar for bar in bars_of(cycles) if x_of(bar.start_ns) < x_of(bar.end_ns)]
    used = {bar.kind for bar in bars}
    size = f'viewBox="0 0 {_WIDTH} {_BOTTOM + 30}" width="{_WIDTH}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            f'<text class="t" x="8" y="18">{escape(title)}</text>',
            *_legend([kind for kind in KINDS if kind in used]),
            *_lanes(),
            *_axis(total_ms, scale),
            *(part for cycle in shown for part in _cycle(cycle.span, x_of)),
            *(_rect(bar, x_of(bar.start_ns), x_of(bar.end_ns)) for bar in bars),
            "</svg>\n",
        ]
    )


def _legend(kinds: Sequence[str]) -> Iterator[str]:
    x = 8.0
    for kind in kinds:
        yield f'<rect x="{x:.0f}" y="32" width="12" height="12" fill="{KINDS[kind]}"/>'
        yield f'<text x="{x + 17:.0f}" y="42">{kind}</text>'
        x += 34 + _LETTER * len(kind)
    yield f'<text class="m" x="{x:.0f}" y="42">empty: waiting; dotted: a cycle ends</text>'


def _lanes() -> Iterator[str]:
    for lane, (name, shows) in enumerate(LANES.items()):
        y = _top(lane)
        yield f'<rect class="l" x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_LANE}"/>'
        yield f'<text x="8" y="{y + 17}">{name}</text><text class="m" x="8" y="{y + 31}">{shows}</text>'


def _axis(total_ms: float, scale: float) -> Iterator[str]:
    power = 10 ** (len(str(int(total_ms / _MAX_TICKS))) - 1)
    step = next(power * factor for factor in (1, 2, 5, 10) if total_ms / (power * factor) <= _MAX_TICKS)
    for tick in range(0, int(total_ms) + 1, step):
        x = _LEFT + tick * scale
        yield f'<path class="g" d="M{x:.1f} {_TOP}V{_BOTTOM}"/>'
        yield f'<text class="m e" x="{x:.1f}" y="{_BOTTOM + 15}">{tick}{" ms" if tick == 0 else ""}</text>'


def _cycle(span: ReceivedSpan, x_of: Callable[[float], float]) -> Iterator[str]:
    facts, start, end = span.attributes, x_of(span.start_ns), x_of(span.end_ns)
    shape = f'x="{start:.1f}" y="{_top(0) + 3}" width="{end - start:.1f}" height="{_LANE - 6}"'
    reason = escape(f"cycle {facts[t.CYCLE_INDEX]}: gamma {facts[t.GAMMA]}, {facts[t.GAMMA_REASON]}")
    yield f'<rect class="c" {shape} rx="3"><title>{reason}</title></rect>'
    yield f'<path class="v" d="M{end:.1f} {_top(0) + _LANE}V{_BOTTOM}"/>'
    for line, text in enumerate((f"γ {facts[t.GAMMA]}", f"{facts[t.ACCEPTED]}/{facts[t.DRAFTED]}")):
        if _LETTER * len(text) < end - start:
            x, y = (start + end) / 2, _top(0) + 17 + 14 * line
            yield f'<text class="e{" m" * line}" x="{x:.1f}" y="{y}">{text}</text>'


def _rect(bar: Bar, start: float, end: float) -> str:
    place = f'x="{start:.1f}" y="{_top(bar.lane) + 6}"'
    shape = f'{place} width="{max(end - start, 1):.1f}" height="{_LANE - 12}"'
    note = f"{bar.kind}: {bar.note}, {(bar.end_ns - bar.start_ns) / 1e6:.1f} ms"
    return f'<rect {shape} fill="{KINDS[bar.kind]}" rx="1.5"><title>{note}</title></rect>'


def _top(lane: int) -> int:
    return _TOP + lane * (_LANE + _GAP)


async def record(options: argparse.Namespace) -> list[ReceivedSpan]:
    """Return the spans of one completion on a cluster of its own, after another one that warms it up."""
    with receiving() as (endpoint, receiver):
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
        async with connected(options.target, options.draft, weights=options.draft_weights) as client:
            for _ in range(2):
                completion = await client.complete(
                    options.prompt, max_tokens=options.tokens, temperature=0.0, gamma=options.gamma
                )

            def roots(spans: Sequence[ReceivedSpan]) -> list[ReceivedSpan]:
                mine = (span for span in spans if span.name == t.SPAN_GENERATE)
                return [span for span in mine if span.attributes[t.SESSION_ID] == completion.session_id]

            await asyncio.to_thread(receiver.wait, lambda spans: bool(roots(spans)), RECEIVE_TIMEOUT_S)
        spans = list(receiver.spans)  # stopping the cluster has flushed the rest
    (root,) = roots(spans)
    return [span for span in spans if span.trace_id == root.trace_id]


def main() -> None:
    """Record and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--draft-weights", default="auto", choices=("auto", "int8"))
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--cycles", type=int, default=8, help="How many are drawn.")
    parser.add_argument("--svg", type=Path, required=True)
    options = parser.parse_args()
    target, draft = Path(options.target).name, Path(options.draft).name
    pair = f"{target} drafted by {draft}" if target != draft else f"{target} pair"
    options.svg.write_text(draw(run_or_exit(record(options)), options.cycles, pair))


if __name__ == "__main__":
    main()
