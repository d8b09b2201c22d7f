"""Chat tasks by category, from the JSON Lines files of this folder; README.md describes their format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

CATEGORIES = ("chat", "code", "summary", "translation", "maths", "question", "edit")
"""Tasks that are asked once, in the order of reports."""

AGENT = "agent"
"""The turns of an agent that edits one file, in their order."""

_FOLDER = Path(__file__).parent

Message = dict[str, str]
"""A chat message: `role` and `content`."""


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        id: Unique over all categories.
        category: One of `CATEGORIES`, or `AGENT`.
        messages: Chat messages; the last one is the user's.
        prediction: Text that most of the answer should equal; None for tasks without one.
    """

    id: str
    category: str
    messages: tuple[Message, ...] = field(hash=False)
    prediction: str | None = None

    @property
    def text(self) -> str:
        """The messages' contents as plain text, for models without a chat template."""
        return "\n\n".join(message["content"] for message in self.messages)


def load_tasks(categories: Sequence[str] = CATEGORIES, count: int | None = None) -> list[Task]:
    """Return the tasks of `categories`, one category after the other.

    Args:
        categories: Some of `CATEGORIES`, or `AGENT`.
        count: Return only the first `count` tasks of each category; None: all of them.

    Raises:
        ValueError: An unknown category, or more tasks than a category has.
    """
    found: list[Task] = []
    for category in categories:
        if category not in (*CATEGORIES, AGENT):
            raise ValueError(f"category: got {category!r}, allowed: {', '.join((*CATEGORIES, AGENT))}")
        tasks = _read(category)
        if count is not None and not 1 <= count <= len(tasks):
            raise ValueError(f"prompts of {category}: got {count}, allowed: 1 to {len(tasks)}")
        found += tasks[:count]
    return found


def _read(category: str) -> list[Task]:
    lines = (_FOLDER / f"{category}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [Task(row["id"], category, tuple(row["messages"]), row.get("prediction")) for row in rows]
