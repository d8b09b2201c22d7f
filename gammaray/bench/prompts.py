"""Prompts of `gammaray bench` and `gammaray qualify` where none are given."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

NUM_PROMPTS = 24


def own_prompts(count: int) -> list[str]:
    """Return the first `count` of the `NUM_PROMPTS` prompts: code, prose and repetitive text in turn."""
    found: list[str] = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
    return found[:count]


def fingerprint(texts: Sequence[str]) -> str:
    """Return a short hash over prompts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
