"""What the target is asked: prompts of a file, or user turns that the target writes itself.

A chat model that is given its template's beginning of a user turn writes a user turn (Magpie, arXiv
2406.08464). An opening word or two spreads these turns over tasks; some turns contain a passage of an earlier
answer, so that the answers also copy and refer, as those to summaries, translations and questions about a
text do.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gammaray.errors import FailedPreconditionError

_OPENINGS = (
    *[""] * 8,
    "What is", "How do I", "How does", "Why", "Explain", "Can you", "Give me", "I'm planning", "I have",
    "Tell me about", "What are the", "Write a short story about", "Write an email", "Write a letter",
    "Write a Python function", "Write a function", "Write a program that", "Write a SQL query",
    "Write a class in Java", "Fix the bug in this code:\n```python\n", "What does this code do?\n```",
    "Write unit tests for", "In JavaScript,", "Solve the following problem:", "Calculate", "If a",
    "A train", "How many", "Prove that", "Find the value of", "Translate the following sentence to French:",
    "Translate to Spanish:", "Translate this sentence into German:", "Translate into Italian:",
    "Summarize the following text:\n\n", "Rewrite the following", "List", "Compare",
)  # fmt: skip

_ABOUT_PASSAGE = (
    "Summarize the following text:\n\n{}", "Summarize the following text in two sentences.\n\n{}",
    "{}\n\nWhat is this text about?", "Explain the following text in simple words:\n\n{}",
    "Text: {}\n\nWhat are the key points?", "Translate the following text to French:\n\n{}",
    "Translate the following text into German:\n\n{}", "Translate the following text to Spanish:\n\n{}",
    "Correct the mistakes in the following text and return the whole text.\n\n{}",
)  # fmt: skip
_QUESTION = "Read the text and answer the question after it.\n\n{}\n\nQuestion:"
"""The target continues it with a question."""

_SYSTEMS = (
    *[None] * 12,
    "You are a helpful assistant.", "You are an AI assistant that helps with programming.",
    "You are an AI assistant that solves maths problems step by step.", "You are a translation assistant.",
)  # fmt: skip
_PASSAGE_CHARACTERS = (160, 900)
_PASSAGES = 256
_SHARE_WITH_PASSAGE = 0.3


@dataclass(frozen=True)
class Job:
    """One answer to generate."""

    number: int  # equal numbers mean the same prompt and temperature
    prompt: list[int]  # token ids before what the target writes
    turn_end: list[int] | None  # end of the user's turn, of which the target writes the rest; None: complete
    temperature: float  # of the answer; 0 is greedy


class Turns:
    """A tokenizer's chat template; FailedPreconditionError if it has none, or none that can be used."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise FailedPreconditionError(
                "the target has no chat template: give --prompts, a file of texts that it continues"
            )
        self._tokenizer = tokenizer

    def prompt(self, text: str) -> list[int]:
        """Return the token ids before the answer to a user's text."""
        return self.encode(self._render([{"role": "user", "content": text}]))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text that the template made."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def user(self, text: str, system: str | None) -> tuple[list[int], list[int]]:
        """Return the ids up to the end of `text` in a user's turn, and those from there to the answer."""
        mark = "\u2402mark\u2403"
        messages = [{"role": "user", "content": mark}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        before, _, after = self._render(messages).partition(mark)
        if not before.strip() or not after.strip():
            raise FailedPreconditionError(
                "the target's chat template does not mark the user's turns, so the target cannot write them: "
                "give --prompts"
            )
        return self.encode(before + text), self.encode(after)

    def _render(self, messages: list[dict[str, str]]) -> str:
        try:
            render = self._tokenizer.apply_chat_template
            text: str = render(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # jinja's errors, and whatever a template raises
            raise FailedPreconditionError(f"the target's chat template fails: {error}") from error
        return text


def own_jobs(turns: Turns, passages: Passages, temperatures: tuple[float, ...], seed: int) -> Iterator[Job]:
    """Yield jobs whose user turns the target writes, without end."""
    turns.user("", None)
    number = 0
    while True:
        chance = random.Random(seed * 1_000_003 + number)
        text, writes = chance.choice(_OPENINGS), True
        passage = passages.choose(chance) if chance.random() < _SHARE_WITH_PASSAGE else None
        if passage is not None:
            form = chance.choice((*_ABOUT_PASSAGE, _QUESTION, _QUESTION, _QUESTION))
            text, writes = form.format(passage), form == _QUESTION
        try:
            before, after = turns.user(text, chance.choice(_SYSTEMS))
        except FailedPreconditionError:  # a template without system messages
            before, after = turns.user(text, None)
        temperature = chance.choice(temperatures)
        yield Job(number, before if writes else before + after, after if writes else None, temperature)
        number += 1


def file_jobs(prompts: list[list[int]], temperatures: tuple[float, ...]) -> Iterator[Job]:
    """Yield each prompt once per temperature."""
    for round_ in range(len(temperatures)):
        for place, prompt in enumerate(prompts):
            # All temperatures occur from the beginning, in case not all jobs are done.
            temperature = temperatures[(round_ + place) % len(temperatures)]
            yield Job(round_ * len(prompts) + place, prompt, None, temperature)


class Passages:
    """Paragraphs of the latest answers."""

    def __init__(self) -> None:
        self._kept: deque[str] = deque(maxlen=_PASSAGES)

    def add(self, answer: str) -> None:
        """Keep an answer's beginning if it is prose of some length."""
        shortest, longest = _PASSAGE_CHARACTERS
        text = answer[:longest].rpartition(".")[0].strip()
        if len(text) >= shortest and "```" not in text:
            self._kept.append(f"{text}.")

    def choose(self, chance: random.Random) -> str | None:
        """Return one at random; None if there is none yet."""
        return chance.choice(self._kept) if self._kept else None
