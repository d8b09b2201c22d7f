"""Prompts of `gammaray bench` and `gammaray qualify` where none are given."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

NUM_PROMPTS = 24


def own_prompts(count: int) -> list[tuple[str, str]]:
    """Return the first `count` prompts, each after its category; the categories take turns."""
    rows = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
    return [(category, text) for category, text in rows[:count]]


def fingerprint(texts: list[str]) -> str:
    """Return a short hash over prompts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
