"""The chat tasks: files that agree with their README, and the loader."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import benchmarks.prompts
from benchmarks.prompts import CATEGORIES, load_tasks

FOLDER = Path(benchmarks.prompts.__file__).parent


def pieces(text: str) -> int:
    """Number of words and punctuation marks: about the number of tokens."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def test_tasks_are_ten_per_category_with_ids_of_their_own() -> None:
    tasks = load_tasks()
    assert [task.id for task in tasks] == [f"{name}-{n:02}" for name in CATEGORIES for n in range(1, 11)]
    assert len({task.text for task in tasks}) == len(tasks)


def test_every_file_of_the_folder_is_a_category() -> None:
    assert {path.stem for path in FOLDER.glob("*.jsonl")} == set(CATEGORIES)


def test_messages_alternate_and_end_with_the_users() -> None:
    for task in load_tasks():
        roles = [message["role"] for message in task.messages]
        assert roles == ["user", "assistant", "user"][: len(roles)], task.id
        assert all(message.keys() == {"role", "content"} for message in task.messages), task.id
        assert all(message["content"].strip() for message in task.messages), task.id


def test_given_texts_have_realistic_lengths() -> None:
    for task in load_tasks(["summary", "question"]):
        longest = max(task.text.split("\n\n"), key=len)
        assert 250 <= len(task.text.split()) <= 600, task.id
        assert len(longest.split()) < 250, task.id  # a text with paragraphs


def test_prediction_is_the_given_text_unchanged() -> None:
    for task in load_tasks(["edit"]):
        assert task.prediction is not None, task.id
        instruction, separator, given = task.messages[-1]["content"].partition("\n\n")
        assert given == task.prediction, task.id
        assert instruction, task.id
        assert separator, task.id
        assert 80 <= pieces(task.prediction) <= 250, task.id


def test_only_edits_have_a_prediction() -> None:
    assert {task.category for task in load_tasks() if task.prediction is not None} == {"edit"}


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


def test_readme_has_a_row_for_each_category_with_the_number_of_its_tasks() -> None:
    rows = re.findall(r"^\| `(\w+)\.jsonl` \| (\d+) \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert {name: int(count) for name, count in rows} == {
        name: len(load_tasks([name])) for name in CATEGORIES
    }
