"""Reads the values of the chart and their documentation comments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_KEY = re.compile(r"( *)([A-Za-z]\w*):(?: (.*))?")
_TEXT, _SCHEMA, _MORE = "# -- ", "# @schema ", "# "


@dataclass(frozen=True)
class Value:
    """One documented value.

    Args:
        path: Its keys from the top.
        default: Its default in values.yaml.
        text: Its comment; empty for a section, whose keys have their own comments.
        constraints: JSON schema in its comment.
    """

    path: tuple[str, ...]
    default: Any
    text: str
    constraints: dict[str, Any] = field(default_factory=dict)

    @property
    def is_section(self) -> bool:
        """Whether it only contains other values."""
        return not self.text


def read_values(path: Path) -> list[Value]:
    """Return every value in the order of the file, sections before their values.

    Raises:
        ValueError: A value without a comment, or a comment without a value.
    """
    text = path.read_text()
    return list(_walk(text.splitlines(), yaml.safe_load(text)))


def _walk(lines: list[str], values: dict[str, Any]) -> Iterator[Value]:
    parents: list[str] = []
    comment, constraints, documented_depth = "", {}, None
    for number, line in enumerate(lines, 1):
        stripped = line.strip()
        if stripped.startswith(_TEXT):
            comment, constraints = stripped[len(_TEXT) :], {}
        elif stripped.startswith(_SCHEMA):
            constraints = json.loads(stripped[len(_SCHEMA) :])
        elif stripped.startswith(_MORE) and comment:
            comment += " " + stripped[len(_MORE) :]
        match = _KEY.fullmatch(line)
        if match is None:
            continue
        depth = len(match[1]) // 2
        if documented_depth is not None and depth > documented_depth:
            continue  # inside a value that has one comment for all its keys
        parents[depth:] = [match[2]]
        default: Any = values
        for key in parents:
            default = default[key]
        is_section = not comment and match[3] is None and isinstance(default, dict)
        if not comment and not is_section:
            raise ValueError(f"line {number}: {'.'.join(parents)} has no comment `# --`")
        yield Value(tuple(parents), default, comment, constraints)
        documented_depth = None if is_section else depth
        comment, constraints = "", {}
    if comment:
        raise ValueError(f"a comment without a value: {comment}")
