"""A picture of a real trace: a cluster of the demo pair exports it to our own OTLP receiver.

python -m benchmarks.trace_picture               # writes docs/trace.json, trace.png and into observability.md
python -m benchmarks.trace_picture --draw-only   # draws docs/trace.json again
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from benchmarks.cluster import connected, run_or_exit
from benchmarks.otlp_receiver import ReceivedSpan, receiving
from gammaray.cli.commands.trace import timeline
from gammaray.telemetry import names as telemetry
from gammaray.wire.cycles import CycleRecord

DOCS = Path(__file__).parents[1] / "docs"
PROMPT = "def read_lines(path):\n"
NUM_TOKENS = 48
GAMMA = 4
WARM_UPS = 5
NUM_CYCLES_DRAWN = 8

LANES = (
    ("generate", telemetry.SPAN_GENERATE, ("server",), "#9a9a9a"),
    ("open", telemetry.SPAN_OPEN, ("internal",), "#c9c9c9"),
    ("cycle", telemetry.SPAN_CYCLE, ("internal",), "#5b8c5a"),
    ("propose: orchestrator waits", telemetry.SPAN_PROPOSE, ("client", "producer"), "#86c5da"),
    ("propose: draft worker", telemetry.SPAN_PROPOSE, ("server", "consumer"), "#1f77b4"),
    ("verify: orchestrator waits", telemetry.SPAN_VERIFY, ("client",), "#dba6d0"),
    ("verify: target worker", telemetry.SPAN_VERIFY, ("server",), "#9c3587"),
    ("commit to Redis", telemetry.SPAN_COMMIT, ("internal",), "#e0a458"),
)
"""Label, span name, kinds and colour of each lane."""


async def record(timeout_s: float = 30.0) -> tuple[list[ReceivedSpan], list[CycleRecord]]:
    """Run one generation on a cluster of its own; return its spans, earliest first, and its own records."""
    with receiving() as (endpoint, receiver):
        os.environ.update(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
        async with connected() as client:
            for seed in range(WARM_UPS):
                await client.complete(PROMPT, max_tokens=NUM_TOKENS, seed=seed, gamma=GAMMA)
            completion = await client.complete(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, gamma=GAMMA)
            session_id = completion.session_id
            await asyncio.to_thread(
                receiver.wait, lambda spans: any(_is_root(span, session_id) for span in spans), timeout_s
            )
            cycles = await client.session_trace(session_id)
        spans = list(receiver.spans)  # stopping the cluster has flushed the rest
    root = next(span for span in spans if _is_root(span, session_id))
    mine = sorted((s for s in spans if s.trace_id == root.trace_id), key=lambda span: span.start_ns)
    return [replace(s, resource={"service.name": s.resource["service.name"]}) for s in mine], cycles


def write_timeline(cycles: Sequence[CycleRecord]) -> None:
    """Put what `gammaray trace` shows of the session into the page."""
    output = io.StringIO()
    Console(file=output, width=104).print(timeline(cycles, bar_width=36))
    lines = [line.rstrip() for line in output.getvalue().splitlines()]
    page = DOCS / "observability.md"
    before, command, rest = page.read_text().partition("$ gammaray trace SESSION\n")
    after = rest[rest.index("\n```") :]
    page.write_text(before + command + "\n".join(lines) + after)


def draw(spans: Sequence[ReceivedSpan], path: Path) -> None:
    """Draw the whole generation above and its first cycles below, a lane per kind of span."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    root = next(span for span in spans if span.name == telemetry.SPAN_GENERATE)
    cycles = [span for span in spans if span.name == telemetry.SPAN_CYCLE]
    figure, axes = pyplot.subplots(2, 1, figsize=(12, 7.2), height_ratios=(1, 1))
    windows = (root.start_ns, root.end_ns), (root.start_ns, cycles[:NUM_CYCLES_DRAWN][-1].end_ns)
    for axis, (start_ns, end_ns) in zip(axes, windows, strict=True):
        for row, (_, name, kinds, colour) in enumerate(LANES):
            bars = [
                ((span.start_ns - root.start_ns) / 1e6, max(span.duration_s * 1e3, 0.01))
                for span in spans
                if span.name == name and span.kind in kinds
            ]
            axis.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.4)
        axis.set_yticks(range(len(LANES)), [label for label, *_ in LANES])
        axis.set_ylim(len(LANES) - 0.5, -0.5)
        axis.set_xlim(0, (end_ns - start_ns) / 1e6)
        axis.spines[["top", "right"]].set_visible(False)
    for cycle in cycles[:NUM_CYCLES_DRAWN]:
        facts = cycle.attributes
        text = f"γ {facts[telemetry.GAMMA]}\n{facts[telemetry.ACCEPTED]}/{facts[telemetry.DRAFTED]}"
        middle_ms = ((cycle.start_ns + cycle.end_ns) / 2 - root.start_ns) / 1e6
        axes[1].text(middle_ms, 2, text, ha="center", va="center", fontsize=7, color="white")
    num_tokens = root.attributes[telemetry.OUTPUT_TOKENS]
    axes[0].set_title(f"One trace: {len(cycles)} cycles, {num_tokens} tokens, {len(spans)} spans")
    axes[1].set_title(f"The first {NUM_CYCLES_DRAWN} cycles: gamma, accepted of drafted tokens")
    axes[1].set_xlabel("milliseconds since the request arrived")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    """Record and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw-only", action="store_true", help="Draw the trace that was recorded before.")
    options = parser.parse_args()
    path = DOCS / "trace.json"
    if not options.draw_only:
        recorded, cycles = run_or_exit(record())
        path.write_text(json.dumps([asdict(span) for span in recorded], separators=(",", ":")) + "\n")
        write_timeline(cycles)
    spans = [ReceivedSpan(**span) for span in json.loads(path.read_text())]
    draw(spans, DOCS / "trace.png")


def _is_root(span: ReceivedSpan, session_id: str) -> bool:
    return span.name == telemetry.SPAN_GENERATE and span.attributes.get(telemetry.SESSION_ID) == session_id


if __name__ == "__main__":
    main()
