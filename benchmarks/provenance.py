"""The command lines of the benchmarks, and where they keep their results."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gammaray.bench import provenance

RESULTS = Path(__file__).parent / "results"


def make_parser(about: str | None) -> argparse.ArgumentParser:
    """Return a parser that prints `about` as it is, with the option `--out` of `write_result`."""
    spec = sys.modules["__main__"].__spec__
    program = None if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"
    parser = argparse.ArgumentParser(
        program, description=about, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="new result file (default: in benchmarks/results)")
    return parser


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a command line, without `--out`."""
    return {name: value for name, value in vars(options).items() if name != "out"}


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
    stems = [path.stem for path in RESULTS.glob(f"{name}-{today}*.json")]
    if not stems:
        return RESULTS / f"{name}-{today}.json"
    # After the highest, as the number of a result that was removed stays its own.
    last = max(int(stem.removeprefix(f"{name}-{today}").removeprefix("-") or 1) for stem in stems)
    return RESULTS / f"{name}-{today}-{last + 1}.json"
