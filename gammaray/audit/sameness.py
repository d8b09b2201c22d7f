"""Checks that two requests have the same tokens: seeds, batches, streams, and greedy decoding."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from typing import Any

from gammaray.audit.answers import Answer, Choice, Token
from gammaray.audit.findings import ALPHA, CheckResult, Status, failed, inconclusive, not_possible, passed
from gammaray.audit.law import EXACT, rounding
from gammaray.audit.subject import MODES, WHOLE, Mode, Subject

MAX_ROUNDING = 0.5
"""Largest margin of two tokens that rounding may explain: two steps of bfloat16 at logits of 32 to 64."""

MIN_ROUNDING = 1e-3
"""Margin that rounding always explains: float32 logits differ by about 1e-4 between shapes of batches."""

MAX_EQUAL = 0.01
"""Difference of log-probabilities of the same model in the same arithmetic, well above float32's. Where both
sides differ by more, greedy texts prove nothing: a quantised model differs as much."""

EXPECTED_FLIPS = 0.01
"""Rounding does not explain a sampled difference if it changes fewer tokens than this on average."""

LIKELY = -4.6
"""Log-probability of one per cent: those of less likely tokens differ more."""

_TOKENS = 48
_MIN_KNOWN = 0.95
_MIN_VALUES = 20
OTHERS = 8

Check = Callable[[Subject], Awaitable[CheckResult]]


@dataclass(frozen=True)
class Difference:
    """The first difference of two completions of the same request."""

    index: int  # of the first different token; of the first different character if tokens are unknown
    left: str
    right: str
    margin: float | None  # log-probability of the first one's token minus the second's there; None if unknown


def first_difference(left: Choice, right: Choice) -> Difference | None:
    """Return the first difference of two completions; None if their texts are equal."""
    if left.text == right.text:
        return None
    if not left.tokens or not right.tokens:
        pairs = zip(left.text, right.text, strict=False)
        shortest = min(len(left.text), len(right.text))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), shortest)
        return Difference(at, left.text[at : at + 20], right.text[at : at + 20], None)
    at = shared(left.tokens, right.tokens)
    if at >= min(len(left.tokens), len(right.tokens)):
        ends = [choice.tokens[at].text if at < len(choice.tokens) else "(end)" for choice in (left, right)]
        return Difference(at, ends[0], ends[1], None)
    own, other = left.tokens[at], right.tokens[at]
    theirs = own.cells.get(other.key)
    return Difference(at, own.text, other.text, None if own.lp is None or theirs is None else own.lp - theirs)


def shared(left: Sequence[Token], right: Sequence[Token]) -> int:
    """Return how many tokens at the beginning are the same."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a.key != b.key), min(len(left), len(right)))


def roundings(left: Choice, right: Choice) -> Iterator[float]:
    """Yield by how much the log-probabilities of the same likely tokens differ in the same contexts."""
    for a, b in zip(left.tokens[: shared(left.tokens, right.tokens)], right.tokens, strict=False):
        for key, logprob in a.cells.items():
            if logprob > LIKELY and key in b.cells:
                yield abs(logprob - b.cells[key])


@dataclass
class Comparison:
    """Pairs of completions that should be equal."""

    # At 0 margins tell whether rounding explains a difference, above 0 the number of tokens that it changes.
    temperature: float

    def __post_init__(self) -> None:
        self.pairs: list[tuple[Choice, Choice, str]] = []
        self._roundings: list[float] = []

    def add(self, left: Answer, right: Answer) -> None:
        """Add two answers whose choices should be equal."""
        for one, other in zip(left.choices, right.choices, strict=True):
            self.pairs.append((one, other, right.curl))
            self._roundings += roundings(one, other)

    @property
    def rounding(self) -> float:
        """Largest difference of log-probabilities in the same contexts."""
        return max(self._roundings, default=0.0)

    def is_rounding(self, difference: Difference) -> bool:
        """Whether rounding explains a difference."""
        if self.temperature > 0:
            tokens = sum(shared(left.tokens, right.tokens) for left, right, _ in self.pairs)
            mean = sum(self._roundings) / max(1, len(self._roundings))
            return 0 < self.rounding <= MAX_ROUNDING and tokens * mean >= EXPECTED_FLIPS
        limit = min(max(2 * self.rounding, MIN_ROUNDING), MAX_ROUNDING)
        return difference.margin is not None and abs(difference.margin) <= limit

    def result(self, what: str) -> CheckResult:
        """Return the result over all pairs; `what` names the second completions."""
        found = [(d, curl) for left, right, curl in self.pairs if (d := first_difference(left, right))]
        unexplained = [(d, curl) for d, curl in found if not self.is_rounding(d)]
        evidence = {
            "compared": len(self.pairs),
            "equal": len(self.pairs) - len(found),
            "explained_by_rounding": len(found) - len(unexplained),
            "largest_difference_of_logprobs": round(self.rounding, 6),
            "differences": [asdict(d) for d, _ in (unexplained or found)[:5]],
        }
        of = f"of {len(self.pairs)} {what}"
        if unexplained:
            first, curl = unexplained[0]
            margin = "unknown" if first.margin is None else f"{first.margin:.4f}"
            summary = f"{len(unexplained)} {of} differ; first at {first.index}: {first.left!r} and "
            summary += f"{first.right!r}, margin {margin}, rounding {self.rounding:.4f}"
            if len(found) < len(self.pairs) and not any(left.tokens for left, _, _ in self.pairs):
                summary += ": without log-probabilities it may be rounding"
                return CheckResult(Status.INCONCLUSIVE, summary, evidence)
            return failed(summary, curl, **evidence)
        if found:
            summary = f"{len(found)} {of} differ within rounding ({self.rounding:.4f})"
            is_equal = self.temperature == 0 and self.rounding <= MAX_EQUAL
            return CheckResult(Status.PASSED if is_equal else Status.INCONCLUSIVE, summary, evidence)
        return passed(f"{len(self.pairs)} {of} are equal", **evidence)


async def check_seed(subject: Subject) -> CheckResult:
    """The same seed gives the same text, another seed another text."""
    server, same = subject.server, Comparison(1.0)
    if reason := server.refused.get("seed"):
        raise not_possible(f"the server refuses it: {reason}")
    surprise, others, greedy = 0.0, 0, 0
    for i, prompt in enumerate(subject.prompts[: subject.few(4)]):
        asked = {"temperature": 1, "max_tokens": _TOKENS, "seed": subject.seed + i}
        first = await subject.ask(prompt, **asked)
        same.add(first, await subject.ask(prompt, **asked))
        other = await subject.ask(prompt, **{**asked, "seed": subject.seed + 1000 + i})
        if all(a.text != b.text for a, b in zip(first.choices, other.choices, strict=True)):
            others += 1
            continue
        equal = [a for a, b in zip(first.choices, other.choices, strict=True) if a.text == b.text]
        surprise -= max(sum(token.lp or 0.0 for token in choice.tokens) for choice in equal)
        plain = await server.ask(prompt, temperature=0, max_tokens=_TOKENS)
        greedy += plain.choice.text == first.choice.text
    result = same.result("repetitions with the same seed")
    if result.status is not Status.PASSED or others:
        return result
    if surprise > -math.log(subject.alpha * ALPHA["seed"] / (4 * len(MODES))):
        summary = f"all texts of other seeds are equal; by chance with probability e^-{surprise:.0f}"
        return failed(summary, other.curl, **result.evidence)
    also = f", and {greedy} of {len(same.pairs)} are those of temperature 0: does the server sample?"
    raise inconclusive(f"all texts of other seeds are equal, which may be chance{also if greedy else ''}")


async def check_batch(subject: Subject) -> CheckResult:
    """A request has the same text alone and among others, greedily and with a seed."""
    server, results = subject.server, []
    if server.concurrency < 2:
        raise inconclusive("needs --concurrency of 2 or more")
    for temperature in (0.0, 1.0) if subject.has_seeds else (0.0,):
        pairs = Comparison(temperature)
        for i in range(3):
            asked = {"temperature": temperature, "max_tokens": _TOKENS, "seed": subject.seed + i}
            alone = await server.ask(subject.prompt(i), **asked)
            crowd = [
                server.ask(subject.prompt(i + j), **{**asked, "seed": subject.seed + 100 * j + i})
                for j in range(min(OTHERS, server.concurrency - 1) + 1)
            ]
            pairs.add(alone, (await asyncio.gather(*crowd))[0])
        results.append(pairs.result(f"requests among others at temperature {temperature:g}"))
    return worst(results)


async def check_stream(subject: Subject) -> CheckResult:
    """A streamed completion is the same as a whole one, each of its choices and log-probabilities."""
    ways = [(0.0, 1), *([(1.0, 1), (1.0, 2)] if subject.has_seeds else [])]
    results = []
    for temperature, n in ways if Mode(n=3) not in subject.absent else ways[:2]:
        pairs = Comparison(temperature)
        for i, prompt in enumerate(subject.prompts[: 4 if n == 1 else 2]):
            asked: dict[str, Any] = {
                "temperature": temperature,
                "max_tokens": _TOKENS,
                "seed": subject.seed + i,
            }
            asked |= {"n": n} if n > 1 else {}
            whole = await subject.server.ask(prompt, **asked)
            streamed = await subject.server.stream(prompt, **asked)
            if len(whole.choices) != len(streamed.choices):
                counts = len(whole.choices), len(streamed.choices)
                return failed(f"{counts[0]} choices whole and {counts[1]} streamed", streamed.curl)
            pairs.add(whole, streamed)
            for left, right in zip(whole.choices, streamed.choices, strict=True):
                reasons = left.finish_reason, right.finish_reason
                if left.text == right.text and reasons[0] != reasons[1]:
                    summary = f"finish_reason is {reasons[0]!r} whole and {reasons[1]!r} streamed"
                    return failed(summary, streamed.curl)
                if is_rounded(right) and left.tokens and not is_rounded(left):
                    return failed("log-probabilities are rounded in streams only", streamed.curl)
        of = f" with n {n}" if n > 1 else ""
        results.append(pairs.result(f"streams at temperature {temperature:g}{of}"))
    return worst(results)


def is_rounded(choice: Choice) -> bool:
    """Whether all log-probabilities of a choice have at most four decimals, or the mantissa of a half."""
    values = [lp for token in choice.tokens for _, lp in token.listed if lp > -100]
    return len(values) >= _MIN_VALUES and rounding(values) != EXACT


async def check_greedy(subject: Subject) -> CheckResult:
    """At temperature 0 each token is the most likely one, and the text equals the reference's."""
    server, reference = subject.server, subject.reference
    if reference is None and not server.num_top:
        raise not_possible(f"needs log-probabilities or --reference: {subject.no_logprobs}")
    pairs, total, count, asked = Comparison(0.0), 0, 0, {"temperature": 0, "max_tokens": 64}
    less_likely: list[tuple[float, Difference, str]] = []
    for prompt in subject.prompts[: subject.few(8)]:
        ours = await subject.ask(prompt, **asked)
        total += sum(len(choice.tokens) for choice in ours.choices)
        for i, token in ((i, token) for choice in ours.choices for i, token in enumerate(choice.tokens)):
            if token.lp is None or not token.cells:
                continue
            count += 1
            best = max(token.cells, key=token.cells.__getitem__)
            gap = token.cells[best] - token.lp
            if best != token.key and gap > MIN_ROUNDING:
                less_likely.append((gap, Difference(i, token.text, best, gap), ours.curl))
        if reference is not None and subject.mode == WHOLE:
            theirs = await reference.ask(prompt, **asked)
            pairs.add(ours, replace(theirs, curl=ours.curl))
    if less_likely:
        gap, found, curl = max(less_likely, key=itemgetter(0))
        summary = f"token {found.index} is {found.left!r}, while {found.right!r} is more likely by {gap:.4f}"
        return failed(summary, curl, **asdict(found))
    if reference is None or subject.mode != WHOLE:
        if count < _MIN_KNOWN * total:
            raise inconclusive(f"only {count} of {total} tokens have alternatives")
        return passed(f"{count} of {total} tokens are the most likely", tokens=count)
    return pairs.result("texts (plain mode)" if subject.is_own_reference else "texts (reference)")


def worst(results: Sequence[CheckResult]) -> CheckResult:
    """Return the worst of several results, with the summaries of all that are as bad."""
    order = [Status.FAILED, Status.INCONCLUSIVE, Status.NOT_POSSIBLE, Status.PASSED]
    status = min((v.status for v in results), key=order.index)
    those = [v for v in results if v.status is status]
    return CheckResult(status, "; ".join(v.summary for v in those), those[0].evidence, those[0].curl)
