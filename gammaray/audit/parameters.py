"""Checks that sampling parameters hold while tokens are drafted: truncation, bias, penalties."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from gammaray.audit.answers import Choice, Token, text_of
from gammaray.audit.findings import CheckResult, failed, inconclusive, not_possible, passed
from gammaray.audit.subject import Subject

ROUNDING = 0.02
"""What rounding may move: the probability before a token for top_p, log-probabilities for the others."""

IGNORED = 1e-4
"""Probability, under a server that ignores the parameter, of evidence as good as what passes."""

MIN_CHANGED = 5
"""Positions at which penalties must have changed the most likely token."""

_TOKENS = 48
_MIN_REQUESTS, _MAX_REQUESTS = 4, 24

Kept = Callable[[list[float], float], bool]
"""Whether a token of a log-probability may be drawn, given those of the position, the most likely first."""


async def check_truncation(name: str, value: float, kept: Kept, subject: Subject) -> CheckResult:
    """No token is generated outside of what a parameter keeps.

    Passes when a server that ignores the parameter would have generated none with probability `IGNORED`.
    """
    subject.need_logprobs(4)
    log_ignored, count, changed = 0.0, 0, False
    for i in range(_MAX_REQUESTS):
        asked = {"temperature": 1, "max_tokens": _TOKENS, "seed": subject.seed + i, name: value}
        answer = await subject.server.ask(subject.prompt(i), **asked)
        for at, token in enumerate(answer.choice.tokens):
            cells = sorted(token.cells.values(), reverse=True)
            if token.lp is None or not cells:
                continue
            count += 1
            inside = math.fsum(math.exp(lp) for lp in cells if kept(cells, lp))
            changed = changed or math.fsum(map(math.exp, cells)) < 0.99 or inside < 0.97
            log_ignored += math.log(min(1.0, max(inside, 1e-9)))
            if not kept(cells, token.lp):
                rank, tops = sum(lp > token.lp for lp in cells) + 1, [round(x, 4) for x in cells[:5]]
                summary = f"{name} {value}: token {at} is {token.text!r}, of probability "
                summary += f"{math.exp(token.lp):.4f} and rank {rank}"
                return failed(summary, answer.curl, index=at, token=token.text, rank=rank, tops=tops)
        if log_ignored < math.log(IGNORED) and i + 1 >= _MIN_REQUESTS:
            summary = f"{name} {value}: {count} tokens kept it; without it by chance with e^{log_ignored:.0f}"
            return passed(summary, tokens=count, log_chance=log_ignored)
    if count and not changed:
        raise not_possible("log-probabilities are reported after truncation, which hides what was cut")
    raise inconclusive(f"{count} tokens, of which a server without {name} might have generated all")


check_top_p = partial(check_truncation, "top_p", 0.5, lambda cells, lp: _before(cells, lp) < 0.5 + ROUNDING)
check_top_k = partial(check_truncation, "top_k", 2, lambda cells, lp: lp >= cells[:2][-1] - ROUNDING)
check_min_p = partial(
    check_truncation, "min_p", 0.3, lambda cells, lp: lp >= cells[0] + math.log(0.3) - ROUNDING
)


def _before(cells: list[float], logprob: float) -> float:
    """Return the probability of the tokens before one."""
    return math.fsum(math.exp(lp) for lp in cells if lp > logprob + ROUNDING)


async def check_bias(subject: Subject) -> CheckResult:
    """A bias of +100 generates one token alone."""
    texts = []
    for token_id in (300, 301, 302):
        asked = {"temperature": 1, "max_tokens": 12, "seed": subject.seed, "logit_bias": {str(token_id): 100}}
        answer = await subject.server.ask(subject.prompts[0], **asked)
        text = answer.choice.text
        if (kinds := len({token.key for token in answer.choice.tokens} or _units(text))) > 1:
            summary = f"logit_bias of +100 for token {token_id} gives {kinds} different tokens"
            return failed(summary, answer.curl, token_id=token_id, text=text)
        texts.append(text)
    if len(set(texts)) < len(texts):
        summary = "logit_bias of +100 for different tokens gives the same text"
        return failed(summary, answer.curl, texts=texts)
    return passed(f"{len(texts)} biased tokens are generated alone", texts=texts)


def _units(text: str) -> set[str]:
    """Return the shortest text whose repetition is `text`, once, or the text's characters."""
    for size in range(1, len(text) // 4 + 1):
        if (text[:size] * (len(text) // size + 1))[: len(text)] == text:
            return {text[:size]}
    return set(text)


PENALTIES = {"presence_penalty": 1.0, "frequency_penalty": 1.0}


async def check_penalties(subject: Subject) -> CheckResult:
    """At temperature 0 each token is the most likely one after the penalties of the tokens before it."""
    subject.need_logprobs(4)
    if subject.failed("greedy"):
        raise inconclusive("`greedy` failed: tokens are not the most likely ones without penalties either")
    server, changed, count = subject.server, 0, 0
    asked = {"temperature": 0, "max_tokens": _TOKENS}
    # Short prompts first: tokens of the prompt are not compared.
    for i, prompt in enumerate(sorted(subject.prompts, key=len)[:16]):
        answer = await server.ask(prompt, **asked, **PENALTIES)
        wrong, differing, raw = _penalised(answer.choice, prompt)
        count += len(answer.choice.tokens)
        if wrong is not None:
            plain = await server.ask(prompt, **asked)
            if not raw and plain.choice.text != answer.choice.text:
                raise not_possible("log-probabilities are reported after penalties")
            summary = "token {index} is {token!r}, while {expected!r} is better by {gap} with penalties"
            return failed(summary.format_map(wrong), answer.curl, **wrong)
        changed += differing
        if changed >= MIN_CHANGED and i >= 3:
            summary = f"{count} tokens obey them, {changed} of them other than without penalties"
            return passed(summary, tokens=count, changed=changed)
    raise inconclusive(f"penalties changed only {changed} of {count} tokens")


def _penalised(choice: Choice, prompt: str) -> tuple[dict[str, Any] | None, int, int]:
    """Compare a choice's tokens with the penalised most likely ones.

    Tokens whose text is in the prompt are compared with none, as some servers penalise the prompt's tokens.

    Returns:
        What is wrong first, if anything; positions where the penalties changed the most likely token; and
        positions where the generated token is not the most likely one as reported.
    """
    counts: Counter[str] = Counter()
    changed = raw = 0
    wrong = None

    def score(key: str, token: Token) -> float:
        return token.cells[key] - PENALTIES["presence_penalty"] * (key in counts) - counts[key]

    for at, token in enumerate(choice.tokens):
        known = [key for key in token.cells if key == token.key or text_of(key).strip() not in prompt]
        if token.key in token.cells and token.text.strip() not in prompt:
            best = max(known, key=lambda key: score(key, token))
            top = max(token.cells, key=token.cells.__getitem__)
            raw += top != token.key
            changed += top != best and top != token.key
            gap = score(best, token) - score(token.key, token)
            if gap > ROUNDING and wrong is None:
                wrong = {"index": at, "token": token.text, "expected": best, "gap": round(gap, 4)}
        counts[token.key] += 1
    return wrong, changed, raw
