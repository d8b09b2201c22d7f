"""Where the benchmarks keep their results."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gammaray.bench import provenance

RESULTS = Path(__file__).parent / "results"


def write_result(name: str, result: dict[str, Any], out: Path | None = None) -> Path:
    """Write `result` with its provenance, and return the path.

    Args:
        name: Kind of the result.
        result: JSON-ready.
        out: The file; None: `results/<name>-<date>.json`, numbered from the second one of a day on.
    """
    return provenance.write_result(name, result, out or _unused(name))


def _unused(name: str) -> Path:
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    path, number = RESULTS / f"{name}-{today}.json", 1
    while path.exists():
        number += 1
        path = RESULTS / f"{name}-{today}-{number}.json"
    return path
