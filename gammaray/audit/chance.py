"""Checks of randomness: the law of the tokens, and whether choices are independent."""

from __future__ import annotations

import asyncio
import math
import re
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

from gammaray.audit.answers import Answer, Choice, Token
from gammaray.audit.findings import ALPHA, CheckResult, Status, failed, inconclusive, not_possible, passed
from gammaray.audit.law import IndependenceTest, LawTest, Position
from gammaray.audit.subject import MODES, STREAMED, WHOLE, Subject
from gammaray.errors import InvalidArgumentError

DETECTABLE = {"temperature below 1": (1, 0.95), "temperature above 1": (1, 1.05), "top-1 share": (0, 0.02)}
"""By family of faults: an honest server's size, and one that the law has to be able to show to pass."""

MIN_TOKENS = 20_000
"""Tokens before which the law does not pass: few flat positions can dominate what it says it would find."""

MIN_PAIRS = 400
"""Pairs of tokens after which the independence of choices passes."""

_TOKENS = 128
_SPECIAL = re.compile(r"(\d+:)?(<[^<>\s]{1,40}>)?")
_MAX_UNREADABLE = 0.02
_EDGES = (0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0)


class _Law:
    def __init__(self, subject: Subject) -> None:
        self._num_top = subject.server.num_top
        self.test = LawTest(subject.alpha * ALPHA["law"], self._num_top, SPECIAL)
        self._threshold = -math.log(self.test.alpha)
        # Expected and observed tokens by the probability that the server reports for them.
        self._expected, self._observed = [0.0] * len(_EDGES), [0] * len(_EDGES)
        self._path = [(0, 0.0)]
        self._drawn = self._missing = 0

    def observe(self, choice: Choice, drafted: Sequence[str | None]) -> None:
        """Count the tokens of a completion, and what the reference drafter proposes in place of each.

        Raises:
            InvalidArgumentError: The alternatives of a token are no distribution.
            Undecided: Too many tokens have no alternatives, or incomplete ones.
        """
        for token, proposed in zip(choice.tokens, drafted, strict=True):
            position = self.test.observe(token.key, token.listed, token.lp, proposed)
            if position is not None:
                self._compare(token, position)
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

    def _compare(self, token: Token, position: Position) -> None:
        """Count a token by its cell; the last cell stands for all tokens that are not listed."""
        for prob in position.probs[:-1]:
            self._expected[bisect_left(_EDGES, min(prob, 1.0))] += prob
        cell = position.cell_of(token.key, token.lp)
        if cell < len(position.probs) - 1:
            self._observed[bisect_left(_EDGES, min(position.probs[cell], 1.0))] += 1

    def result(self, curl: str) -> CheckResult:
        """Return the result on the tokens so far; a command shows the last ones."""
        test, found = self.test, self.test.smallest_detectable()
        evidence = {
            "tokens": test.num_tokens,
            "largest_log_e_value": round(test.largest_log_e_value, 3),
            "threshold": round(self._threshold, 3),
            "strongest": test.strongest(),
            "smallest_detectable": {k: round(v, 5) if math.isfinite(v) else None for k, v in found.items()},
            "path": self._path[:: max(1, len(self._path) // 100)],
            "by_probability": [
                {"to": edge, "expected": round(expected, 1), "observed": observed}
                for edge, expected, observed in zip(_EDGES, self._expected, self._observed, strict=True)
            ],
        }
        summary = f"{test.num_tokens} tokens, e-value up to e^{test.largest_log_e_value:.1f}"
        if test.rejected:
            summary += f", alarm at e^{self._threshold:.1f}; strongest alternative: {test.strongest()}"
            return failed(summary, curl, **evidence)
        cold, hot, share = (found[name] for name in DETECTABLE)
        summary += (
            f"; would have found a temperature of {cold:.2f} or {hot:.2f} and {share:.1%} replaced tokens"
        )
        is_enough = test.num_tokens >= MIN_TOKENS and all(
            abs(found[name] - honest) <= abs(least - honest) for name, (honest, least) in DETECTABLE.items()
        )
        return CheckResult(Status.PASSED if is_enough else Status.INCONCLUSIVE, summary, evidence)


async def check_law(subject: Subject) -> CheckResult:
    """At temperature 1 each token is a draw from the probabilities that the server reports for it."""
    subject.need_logprobs(4)
    law = _Law(subject)
    async with aclosing(_completions(subject)) as answers:
        async for answer in answers:
            try:
                for choice in answer.choices:
                    law.observe(choice, await _drafted(subject, choice))
            except InvalidArgumentError as error:
                return failed(f"alternatives are no distribution: {error}", answer.curl)
            subject.so_far = law.result(answer.curl)
            subject.tell(f"law: {subject.so_far.summary}")
            if subject.so_far.status is not Status.INCONCLUSIVE:
                return subject.so_far
    if subject.so_far is None:
        raise inconclusive("the budget allows no completion (--max-tokens-total)")
    return subject.so_far


async def _drafted(subject: Subject, choice: Choice) -> list[str | None]:
    """Return what the reference drafter proposes in place of each token, after the tokens before it.

    It is asked by token ids: a text may have other tokens than those that were generated, and whether it has
    follows from the tokens after a position, too, which would make the bets unfair.
    """
    if subject.drafter is None:
        return [None] * len(choice.tokens)
    if [f"token_id:{i}" for i in choice.token_ids] != [token.key for token in choice.tokens]:
        raise not_possible(
            "--reference-draft needs a server with return_token_ids and return_tokens_as_token_ids"
        )
    fields = {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 1, "logprobs": None}
    answer = await subject.drafter.ask([*choice.prompt_ids, *choice.token_ids], **fields)
    favourites = answer.choice.favourites[len(choice.prompt_ids) :]
    if len(favourites) != len(choice.tokens):
        raise not_possible("--reference-draft needs a drafter's server with prompt_logprobs")
    return [f"token_id:{i}" for i in favourites]


async def _completions(subject: Subject) -> AsyncGenerator[Answer, None]:
    """Yield completions in the order of their requests, so that no result decides which comes next."""
    server, number = subject.server, 0
    modes = [mode for mode in MODES if mode not in subject.absent] if subject.drafter is None else [WHOLE]
    views = [replace(subject, mode=mode) for mode in modes or [WHOLE]]
    most = _TOKENS * max(view.mode.n for view in views)
    running: deque[asyncio.Task[Answer]] = deque()
    try:
        while True:
            # What runs may not have been counted yet.
            while len(running) < server.concurrency and server.spent.left >= most * (1 + len(running)):
                asked: dict[str, Any] = {"temperature": 1, "max_tokens": _TOKENS}
                asked["seed"] = subject.seed + 10_000 + number
                if subject.drafter is not None:
                    asked["return_token_ids"] = True
                view = views[number % len(views)]
                running.append(asyncio.ensure_future(view.ask(subject.prompt(number), **asked)))
                number += 1
            if not running:
                return
            answer = await running[0]
            running.popleft()
            yield answer
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class _Special:
    """Tokens that look special by their texts, such as `</s>` and `<|im_end|>`; no draw decides which."""

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and _SPECIAL.fullmatch(key) is not None


SPECIAL = _Special()


async def check_choices(subject: Subject) -> CheckResult:
    """The choices of one request differ from each other."""
    n, compared = 4, 0
    bound = math.log(36 / (subject.alpha * ALPHA["choices"]))  # six pairs in each of six requests
    for i, prompt in enumerate(subject.prompts[:6]):
        seed = None if i % 2 or not subject.has_seeds else subject.seed + i
        is_streamed = i % 4 > 1 and STREAMED not in subject.absent
        ask = subject.server.stream if is_streamed else subject.server.ask
        answer = await ask(prompt, temperature=1, max_tokens=48, n=n, seed=seed)
        if (count := len(answer.choices)) != n:
            return failed(f"{count} choices instead of {n}", answer.curl)
        for left, right in combinations(answer.choices, 2):
            surprise = -sum(token.lp or 0.0 for token in left.tokens)
            compared += left.text != right.text or surprise > bound
            if left.text == right.text and surprise > bound:
                summary = f"two choices are equal; by chance with probability e^-{surprise:.0f}"
                return failed(summary, answer.curl, text=left.text)
    if not compared:
        raise inconclusive("all choices are equal, and their probabilities are unknown or high")
    return passed(f"{compared} pairs of choices differ", pairs=compared)


async def check_independence(subject: Subject) -> CheckResult:
    """The choices of one request, or completions with other seeds, do not share random numbers."""
    subject.need_logprobs(4)
    server = subject.server
    test = IndependenceTest(subject.alpha * ALPHA["independence"], server.num_top, SPECIAL)
    of_choices = "choices" in subject.findings and (
        subject.findings["choices"].result.status in (Status.PASSED, Status.INCONCLUSIVE)
    )
    for i in range(40):
        asked: dict[str, Any] = {"temperature": 1, "max_tokens": 48, "seed": subject.seed + 5000 + 4 * i}
        if of_choices:
            answers = [await server.ask(subject.prompt(i), **asked, n=4)]
        else:
            each = (server.ask(subject.prompt(i), **{**asked, "seed": asked["seed"] + k}) for k in range(4))
            answers = await asyncio.gather(*each)
        for left, right in pairwise(choice for answer in answers for choice in answer.choices):
            for a, b in zip(left.tokens, right.tokens, strict=False):
                test.observe(a.key, a.listed, b.key, b.listed, a.lp, b.lp)
        pairs, found = test.num_tokens - test.num_unreadable, test.largest_log_e_value
        evidence = {"pairs": pairs, "largest_log_e_value": found}
        if test.rejected:
            summary = f"after {pairs} pairs of tokens: e-value e^{found:.1f}; {test.strongest()}"
            return failed(summary, answers[0].curl, **evidence)
    if pairs < MIN_PAIRS:
        raise inconclusive(f"only {pairs} pairs of tokens have alternatives")
    of = "choices" if of_choices else "completions with other seeds"
    return passed(f"{pairs} pairs of tokens of {of}, e-value e^{found:.1f}", **evidence)
