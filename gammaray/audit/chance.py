"""Checks of randomness: the law of the tokens, and whether choices are independent."""

from __future__ import annotations

import asyncio
import math
import re
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

from gammaray.audit.answers import Choice, Token
from gammaray.audit.findings import ALPHA, CheckResult, Status, inconclusive, not_possible
from gammaray.audit.law import IndependenceTest, LawTest, Position
from gammaray.audit.subject import Subject
from gammaray.errors import InvalidArgumentError

DETECTABLE = {"temperature below 1": 0.95, "temperature above 1": 1.05, "top-1 share": 0.02}
"""What the law must have been able to show before it passes."""

MIN_TOKENS = 20_000
"""Tokens before which the law does not pass: few flat positions can dominate what it says it would find."""

MIN_PAIRS = 400
"""Pairs of tokens after which the independence of choices passes."""

_TOKENS = 128
_SPECIAL = re.compile(r"(\d+:)?(<[^<>\s]{1,40}>)?")
_MAX_UNREADABLE = 0.02


class _Law:
    """The test of the law, and what is reported of it."""

    def __init__(self, subject: Subject) -> None:
        self._num_top = subject.server.num_top
        self.test = LawTest(subject.alpha * ALPHA["law"], self._num_top, SPECIAL)
        self._threshold = -math.log(self.test.alpha)
        self._bins, self._path = _Bins(), [(0, 0.0)]
        self._drawn = self._missing = 0

    def observe(self, choice: Choice) -> None:
        """Count the tokens of a completion.

        Raises:
            InvalidArgumentError: The alternatives of a token are no distribution.
            Undecided: Too many tokens have no alternatives, or incomplete ones.
        """
        for token in choice.tokens:
            self.test.observe(token.key, token.listed, token.lp)
            position = Position.read(token.listed, self._num_top, SPECIAL)
            if position is not None and token.key not in SPECIAL:
                self._bins.add(token, position)
            self._drawn += 1
            self._missing += not token.listed
        self._path.append((self.test.num_tokens, round(self.test.log_e_value, 2)))
        allowed = _MAX_UNREADABLE * max(500, self._drawn)
        if self._missing > allowed:
            raise not_possible(f"{self._missing} of {self._drawn} tokens have no alternatives")
        if (unreadable := self.test.num_unreadable) > allowed:
            raise not_possible(
                f"{unreadable} of {self._drawn} tokens list fewer than {self._num_top} alternatives, "
                "as those of the same text are listed once"
            )

    def result(self) -> CheckResult:
        """Return the result on the tokens so far, without a command."""
        test, found = self.test, self.test.smallest_detectable()
        evidence = {
            "tokens": test.num_tokens,
            "largest_log_e_value": round(test.largest_log_e_value, 3),
            "threshold": round(self._threshold, 3),
            "strongest": test.strongest(),
            "smallest_detectable": {k: round(v, 5) if math.isfinite(v) else None for k, v in found.items()},
            "path": self._path[:: max(1, len(self._path) // 100)],
            "by_probability": self._bins.table(),
        }
        summary = f"{test.num_tokens} tokens, e-value up to e^{test.largest_log_e_value:.1f}"
        if test.rejected:
            summary += f", alarm at e^{self._threshold:.1f}; strongest alternative: {test.strongest()}"
            return CheckResult(Status.FAILED, summary, evidence)
        summary += (
            f"; would have found a temperature of {found['temperature below 1']:.2f} or "
            f"{found['temperature above 1']:.2f} and {found['top-1 share']:.1%} replaced tokens"
        )
        gaps = {name: abs(found[name] - honest) for name, honest in _HONEST.items()}
        is_enough = test.num_tokens >= MIN_TOKENS and all(
            gap <= abs(DETECTABLE[name] - _HONEST[name]) for name, gap in gaps.items()
        )
        return CheckResult(Status.PASSED if is_enough else Status.INCONCLUSIVE, summary, evidence)


async def check_law(subject: Subject) -> CheckResult:
    """At temperature 1 each token is a draw from the probabilities that the server reports for it."""
    subject.need_logprobs(4)
    law = _Law(subject)
    async with aclosing(_completions(subject)) as completions:
        async for choice, prompt, asked in completions:
            curl = subject.server.curl(prompt, **asked)
            try:
                law.observe(choice)
            except InvalidArgumentError as error:
                return CheckResult(Status.FAILED, f"alternatives are no distribution: {error}", {}, curl)
            subject.so_far = law.result()
            subject.tell(f"law: {subject.so_far.summary}")
            if subject.so_far.status is Status.FAILED:
                return replace(subject.so_far, curl=curl)
            if subject.so_far.status is Status.PASSED:
                return subject.so_far
    if subject.so_far is None:
        raise inconclusive("the budget allows no completion (--max-tokens-total)")
    return subject.so_far


_HONEST = {"temperature below 1": 1.0, "temperature above 1": 1.0, "top-1 share": 0.0}


async def _completions(subject: Subject) -> AsyncGenerator[tuple[Choice, str, dict[str, Any]], None]:
    """Yield completions in the order of their requests, so that no result decides which comes next."""
    server, number = subject.server, 0
    running: deque[tuple[asyncio.Task[Any], str, dict[str, Any]]] = deque()
    try:
        while True:
            # What runs may not have been counted yet.
            while len(running) < server.concurrency and server.spent.left >= _TOKENS * (1 + len(running)):
                prompt = subject.prompts[number % len(subject.prompts)]
                asked = {"temperature": 1, "max_tokens": _TOKENS, "seed": subject.seed + 10_000 + number}
                running.append((asyncio.ensure_future(server.ask(prompt, **asked)), prompt, asked))
                number += 1
            if not running:
                return
            task, prompt, asked = running[0]
            answer = await task
            running.popleft()
            yield answer.choices[0], prompt, asked
    finally:
        for task, _, _ in running:
            task.cancel()
        await asyncio.gather(*(task for task, _, _ in running), return_exceptions=True)


class _Special:
    """Tokens that look special, such as `</s>` and `<|im_end|>`: a text's end is not always reported.

    They are known by their texts alone, so that leaving them out depends on no draw.
    """

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and _SPECIAL.fullmatch(key) is not None


SPECIAL = _Special()


class _Bins:
    """Expected and observed tokens by the probability that the server reports for them."""

    EDGES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0)

    def __init__(self) -> None:
        self._expected = [0.0] * (len(self.EDGES) - 1)
        self._observed = [0] * (len(self.EDGES) - 1)

    def add(self, token: Token, position: Position) -> None:
        """Count a token by its cell; the last cell stands for all tokens that are not listed."""
        for prob in position.probs[:-1]:
            self._expected[self._bin(prob)] += prob
        cell = position.cell_of(token.key, token.lp)
        if cell < len(position.probs) - 1:
            self._observed[self._bin(position.probs[cell])] += 1

    def table(self) -> list[dict[str, float]]:
        bounds = zip(self.EDGES, self.EDGES[1:], self._expected, self._observed, strict=False)
        return [{"above": a, "to": b, "expected": round(e, 1), "observed": o} for a, b, e, o in bounds]

    def _bin(self, p: float) -> int:
        return next((i for i, edge in enumerate(self.EDGES[1:]) if p <= edge), len(self.EDGES) - 2)


async def check_choices(subject: Subject) -> CheckResult:
    """The choices of one request differ from each other."""
    server, n, compared = subject.server, 4, 0
    bound = math.log(36 / (subject.alpha * ALPHA["choices"]))  # six pairs in each of six requests
    for i, prompt in enumerate(subject.prompts[:6]):
        seed = None if i % 2 or not subject.has_seeds else subject.seed + i
        asked = {"temperature": 1, "max_tokens": 48, "n": n, "seed": seed}
        choices = (await server.ask(prompt, **asked)).choices
        if len(choices) != n:
            summary = f"{len(choices)} choices instead of {n}"
            return CheckResult(Status.FAILED, summary, {}, server.curl(prompt, **asked))
        for left, right in combinations(choices, 2):
            surprise = -sum(token.lp or 0.0 for token in left.tokens)
            compared += left.text != right.text or surprise > bound
            if left.text == right.text and surprise > bound:
                summary = f"two choices are equal; by chance with probability e^-{surprise:.0f}"
                return CheckResult(Status.FAILED, summary, {"text": left.text}, server.curl(prompt, **asked))
    if not compared:
        raise inconclusive("all choices are equal, and their probabilities are unknown or high")
    return CheckResult(Status.PASSED, f"{compared} pairs of choices differ", {"pairs": compared})


async def check_independence(subject: Subject) -> CheckResult:
    """The choices of one request, or completions with other seeds, do not share random numbers."""
    subject.need_logprobs(4)
    server = subject.server
    test = IndependenceTest(subject.alpha * ALPHA["independence"], server.num_top, SPECIAL)
    of_choices = "choices" in subject.findings and (
        subject.findings["choices"].result.status in (Status.PASSED, Status.INCONCLUSIVE)
    )
    for i in range(40):
        prompt, seed = subject.prompts[i % len(subject.prompts)], subject.seed + 5000 + 4 * i
        asked: dict[str, Any] = {"temperature": 1, "max_tokens": 48}
        if of_choices:
            asked |= {"n": 4, "seed": seed}
            choices = (await server.ask(prompt, **asked)).choices
        else:
            answers = (server.ask(prompt, **asked, seed=seed + k) for k in range(4))
            choices = tuple(answer.choices[0] for answer in await asyncio.gather(*answers))
        for left, right in pairwise(choices):
            for a, b in zip(left.tokens, right.tokens, strict=False):
                test.observe(a.key, a.listed, b.key, b.listed, a.lp, b.lp)
        pairs = test.num_tokens - test.num_unreadable
        evidence = {"pairs": pairs, "largest_log_e_value": test.largest_log_e_value}
        if test.rejected:
            summary = f"after {pairs} pairs of tokens: e-value e^{test.largest_log_e_value:.1f}"
            curl = server.curl(prompt, **asked)
            return CheckResult(Status.FAILED, f"{summary}; {test.strongest()}", evidence, curl)
    if pairs < MIN_PAIRS:
        raise inconclusive(f"only {pairs} pairs of tokens have alternatives")
    of = "choices" if of_choices else "completions with other seeds"
    summary = f"{pairs} pairs of tokens of {of}, e-value e^{test.largest_log_e_value:.1f}"
    return CheckResult(Status.PASSED, summary, evidence)
