"""The setting `lora`: names of LoRA adapters with their directories."""

from __future__ import annotations

import re

__all__ = ["MAX_ADAPTERS", "MAX_ADAPTER_NAME", "check_adapters", "parse_adapters"]

MAX_ADAPTERS = 32
"""Most adapters of a target: each has a place in the memory of its GPUs."""

MAX_ADAPTER_NAME = 128

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:/-]{{0,{MAX_ADAPTER_NAME - 1}}}")


def parse_adapters(text: str) -> dict[str, str]:
    """Return the directories by name of a text such as `sql=/models/sql,legal=/models/legal`.

    Raises:
        ValueError: It has another form, a name twice or too many of them; the message says what is allowed.
    """
    found: dict[str, str] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        name, separator, directory = (part.strip() for part in entry.partition("="))
        if not separator or not directory or _NAME.fullmatch(name) is None:
            raise ValueError(f"got {entry!r}, allowed: NAME=DIR, names of letters, digits and ._:/-")
        if name in found:
            raise ValueError(f"got {name!r} twice, allowed: each name once")
        found[name] = directory
    if len(found) > MAX_ADAPTERS:
        raise ValueError(f"got {len(found)} adapters, allowed: at most {MAX_ADAPTERS}")
    return found


def check_adapters(text: str) -> str:
    """Check a text as `parse_adapters` does, and return it."""
    parse_adapters(text)
    return text
