"""The reference: a second server or a model directory, and the comparison of log-probabilities with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gammaray.audit.answers import Token
from gammaray.audit.chance import SPECIAL
from gammaray.audit.findings import CheckResult, Status, failed, inconclusive, not_possible, passed
from gammaray.audit.sameness import LIKELY, MAX_EQUAL
from gammaray.audit.subject import Subject

MIN_FAILED = 0.1
"""Mean difference of log-probabilities that fails. From SmolLM2 in float32 its bfloat16 form differs by 0.03,
int8 weights by 0.05, int4 weights by 0.5 (docs/audit.md)."""

MIN_TOKENS = 200
"""Tokens that must have been compared."""

_MAX_PROMPTS = 24
_BY_TEXT: dict[str, Any] = {"return_tokens_as_token_ids": None}  # ids of two servers may differ
_ECHO = {"temperature": 0, "max_tokens": 1, "echo": True, "top_p": None, **_BY_TEXT}


async def check_probabilities(subject: Subject) -> CheckResult:
    """Reported log-probabilities are those of one pass over the whole text, by the reference or by `echo`."""
    subject.need_logprobs(2)
    server = subject.server
    other = server if subject.is_own_reference else subject.reference or server
    if other.is_chat or server.is_chat:
        raise not_possible("log-probabilities of a given text need /v1/completions with `echo`")
    compared: list[tuple[float, Token, float]] = []
    curl, unaligned = "", 0
    for i, prompt in enumerate(subject.prompts[:_MAX_PROMPTS]):
        if len(compared) >= MIN_TOKENS:
            break
        asked = {"temperature": 1, "max_tokens": 64, "seed": subject.seed + i, **_BY_TEXT}
        ours = await server.ask(prompt, **asked)
        tokens = [token for token in ours.choice.tokens if token.key not in SPECIAL]
        echoed = (await other.ask(prompt + ours.choice.text, **_ECHO)).choice
        if not echoed.text.startswith(prompt):
            raise not_possible("the server ignores `echo`")
        end = len(echoed.tokens) - 1  # the last token was generated
        given = echoed.tokens[max(0, end - len(tokens)) : end]
        if not tokens or [token.text for token in given] != [token.text for token in tokens]:
            unaligned += 1  # the text has other tokens than those that were generated
            continue
        curl = ours.curl
        for token, theirs in zip(tokens, given, strict=True):
            if token.lp is not None and theirs.lp is not None and theirs.lp >= LIKELY:
                compared.append((token.lp - theirs.lp, token, theirs.lp))
    if unaligned and not compared:
        raise not_possible("`echo` lists no tokens of the text, or other ones than were generated")
    if len(compared) < MIN_TOKENS:
        raise inconclusive(f"only {len(compared)} tokens could be compared")
    return judged(compared, "the server's own" if other.url == server.url else "the reference's", curl)


def judged(compared: Sequence[tuple[float, Token, float]], whose: str, curl: str) -> CheckResult:
    """Return the result for differences, each with its token and the reference's log-probability."""
    count = len(compared)
    mean = sum(abs(difference) for difference, _, _ in compared) / count
    difference, token, theirs = max(compared, key=lambda one: abs(one[0]))
    evidence: dict[str, Any] = {"tokens": count, "mean": mean, "largest": abs(difference)}
    evidence |= {"token": token.text, "server": token.lp, "reference": theirs}
    evidence["signed"] = sum(one for one, _, _ in compared) / count
    summary = f"{count} tokens: log-probabilities differ from {whose} by {mean:.2g} on average, "
    summary += f"{abs(difference):.2g} at most"
    if mean <= MAX_EQUAL:
        return passed(summary, **evidence)
    if mean < MIN_FAILED:
        summary += ": so do another precision, or weights of eight bits"
        return CheckResult(Status.INCONCLUSIVE, summary, evidence)
    return failed(summary, curl, **evidence)
