"""Where the benchmarks keep their results."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gammaray.bench import provenance

__all__ = ["RESULTS", "write_result"]

RESULTS = Path(__file__).parent / "results"


def write_result(name: str, result: dict[str, Any], out: Path | None = None) -> Path:
    """Write `result` with its provenance as `results/<name>-<date>.json` (or as `out`); return the path."""
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return provenance.write_result(name, result, out or RESULTS / f"{name}-{today}.json")
