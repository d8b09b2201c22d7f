"""Prompt sets: held-out sources, the same every time."""

from __future__ import annotations

import pytest

from benchmarks.workloads import WORKLOADS, documents, prompts


@pytest.fixture(scope="module")
def held_out_text() -> str:
    return "\n".join(document.text for document in documents() if document.is_held_out)


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_of_every_workload_end_inside_a_line(name: str) -> None:
    for prompt in prompts(name, 20):
        assert prompt
        assert prompt == prompt.rstrip()


def test_prompts_mixed_gives_fifty_different_ones() -> None:
    assert len(set(prompts("mixed", 50))) == 50


def test_prompts_of_a_larger_set_begin_with_the_smaller_set() -> None:
    assert prompts("code", 20)[:5] == prompts("code", 5)


def test_prompts_code_and_repetitive_stand_in_held_out_documents(held_out_text: str) -> None:
    for prompt in prompts("code", 20) + prompts("repetitive", 20):
        assert prompt in held_out_text


def test_prompts_code_ends_with_the_head_of_a_function() -> None:
    for prompt in prompts("code", 20):
        head = prompt.splitlines()[-1].strip()
        assert head.startswith(("def ", "async def "))
        assert head.endswith(":")


def test_prompts_mixed_takes_the_sets_in_turn() -> None:
    wanted = [prompts(name, 2)[i] for i in range(2) for name in ("code", "prose", "repetitive")]
    assert prompts("mixed", 6) == wanted


@pytest.mark.parametrize(("name", "count", "message"), [
    ("poetry", 1, "workload: got 'poetry', allowed: code, prose, repetitive, mixed"),
    ("code", 0, "prompts of code: got 0, allowed: 1 to"),
    ("code", 10**6, "prompts of code: got 1000000, allowed: 1 to"),
])  # fmt: skip
def test_prompts_bad_argument_raises_naming_what_is_allowed(name: str, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prompts(name, count)
