"""The result of a run as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["table"]

_COLUMNS = {
    "products": ("kind", "rows", "ours_gb_per_s", "library_gb_per_s"),
    "decode": ("batch", "tokens_per_s", "step_ms", "device_ms", "bound_ms", "share_of_bound"),
    "contexts": (
        "context",
        "prompt_tokens_per_s",
        "device_ms",
        "bound_ms",
        "share_of_bound",
        "verify_4_ratio",
    ),
    "verify": ("batch", "tokens", "device_ms", "ratio"),
    "draft": ("layers", "batch", "gamma_2_ms", "gamma_8_ms", "step_ms", "device_ms", "share_of_bound"),
    "speedup": (
        "layers",
        "batch",
        "alpha",
        "gamma",
        "speedup",
        "tokens_per_cycle",
        "tokens_per_s",
        "draft_ms",
        "target_ms",
        "host_ms",
        "same_tokens",
    ),
    "peers": ("peer", "batch", "tokens_per_s"),
    "vllm": ("peer", "batch", "tokens_per_s"),
}
_TITLES = {
    "products": "Products: weights read per second",
    "decode": "Plain decoding",
    "contexts": "One session by its cached tokens",
    "verify": "Cost of a target step by tokens per session",
    "draft": "Proposals, and one more token in them",
    "speedup": "Speculation against plain decoding, temperature 1",
    "peers": "transformers, one stream, temperature 1",
    "vllm": "vLLM on the same weights, temperature 1",
}


def table(phases: dict[str, Any]) -> str:
    """Return all phases that have rows, each as a table."""
    parts = [f"exactness: {phases.get('exactness')}", f"invariance: {phases.get('invariance')}"]
    if "build" in phases:
        parts.append(f"copy bandwidth: {phases['build']['copy_bytes_per_s'] / 1e9:.0f} GB/s")
    for name, columns in _COLUMNS.items():
        if phases.get(name):
            parts.append(f"## {_TITLES[name]}\n\n{_markdown(phases[name], columns)}")
    return "\n\n".join(parts) + "\n"


def _markdown(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    lines = [columns, ["---"] * len(columns), *([_cell(row[name]) for name in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3f}"
    return "" if value is None else str(value)
