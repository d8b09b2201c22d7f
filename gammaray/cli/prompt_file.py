"""Prompts from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

__all__ = ["read_prompts"]


def read_prompts(path: Path, option: str) -> list[str]:
    """Return the prompts of a file: one per line, or, in a `.json` file, a list of strings.

    Args:
        path: The file.
        option: What named it, for messages.

    Raises:
        click.BadParameter: It holds none.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".json":
        found: Any = [line for line in text.splitlines() if line.strip()]
    else:
        try:
            found = json.loads(text)
        except ValueError as error:
            raise click.BadParameter(f"{path.name}: {error}", param_hint=option) from None
    if not isinstance(found, list) or not found or not all(isinstance(p, str) and p for p in found):
        raise click.BadParameter(f"{path.name} holds no prompts", param_hint=option)
    return found
