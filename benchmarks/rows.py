"""What a row costs: forwards of the target with 1 to 12 new tokens, in milliseconds.

    python -m benchmarks.rows

Verification pays by the difference: a proposal of gamma tokens is one forward of gamma + 1 rows. The rows'
turns alternate, so that a change of the clock touches all; the least time and the median are reported.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.provenance import write_result
from gammaray.bench.tables import plain_table
from services.demo_pair import TARGET_DIR
from services.engine.core.batch import SequenceInput
from services.engine.loader import load_engine

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12)


def measure(model: Path, context: int, turns: int, threads: int) -> list[dict[str, Any]]:
    """Return the times of each number of rows after `context` tokens."""
    engine = load_engine(str(model), threads=threads)
    tokens = [1 + index % 1000 for index in range(context)]
    engine.step([SequenceInput("s", 0, tokens, 1)])
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(turns):
        for rows in ROWS:
            feed = SequenceInput("s", context, tokens[:rows], rows)
            started = time.perf_counter()
            engine.step([feed])
            times[rows].append((time.perf_counter() - started) * 1e3)
    return [
        {"rows": rows, "least_ms": min(taken), "median_ms": statistics.median(taken)}
        for rows, taken in times.items()
    ]


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=TARGET_DIR)
    parser.add_argument("--context", type=int, default=200, help="tokens before the rows")
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1, help="threads of the forward; default 1")
    options = parser.parse_args()
    points = measure(options.model, options.context, options.turns, options.threads)
    table = plain_table(
        f"Forwards after {options.context} tokens", ("rows", "least (ms)", "median (ms)", "over one row")
    )
    for point in points:
        table.add_row(
            str(point["rows"]),
            f"{point['least_ms']:.2f}",
            f"{point['median_ms']:.2f}",
            f"{point['median_ms'] / points[0]['median_ms']:.2f}",
        )
    Console().print(table)
    result = {
        "context": options.context,
        "turns": options.turns,
        "threads": options.threads,
        "points": points,
    }
    print(f"written to {write_result('rows', result)}")


if __name__ == "__main__":
    main()
