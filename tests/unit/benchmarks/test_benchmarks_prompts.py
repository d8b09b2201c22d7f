"""The loader of the chat tasks."""

from __future__ import annotations

import pytest

from benchmarks.prompts import load_tasks


def test_load_tasks_takes_the_first_ones_of_the_categories_in_their_order() -> None:
    assert [task.id for task in load_tasks(["maths", "chat"], 2)] == [
        "maths-01",
        "maths-02",
        "chat-01",
        "chat-02",
    ]


@pytest.mark.parametrize(("categories", "count", "message"), [
    (["poetry"], 1, "category: got 'poetry', allowed: chat, code, summary"),
    (["chat"], 0, "prompts of chat: got 0, allowed: 1 to 10"),
    (["edit"], 11, "prompts of edit: got 11, allowed: 1 to 10"),
])  # fmt: skip
def test_load_tasks_bad_argument_raises_naming_what_is_allowed(
    categories: list[str], count: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_tasks(categories, count)
