"""Prompts from a file that a command names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


def read_prompts(path: Path, option: str) -> list[str]:
    """Return the prompts of a file: one per line, or, in a `.json` file, a list of strings."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise click.BadParameter(f"{path.name}: {error.strerror}", param_hint=option) from None
    if path.suffix != ".json":
        found: Any = [line for line in text.splitlines() if line.strip()]
    else:
        try:
            found = json.loads(text)
        except ValueError as error:
            raise click.BadParameter(f"{path.name}: {error}", param_hint=option) from None
    if not isinstance(found, list) or not found or not all(isinstance(p, str) and p for p in found):
        raise click.BadParameter(f"{path.name} contains no prompts", param_hint=option)
    return found
