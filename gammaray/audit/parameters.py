"""Checks that sampling parameters hold while tokens are drafted: truncation, bias, penalties."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gammaray.audit.answers import Choice, Token, text_of
from gammaray.audit.findings import CheckResult, failed, inconclusive, not_possible, passed
from gammaray.audit.subject import WHOLE, Subject

ROUNDING = 0.02
"""What rounding may move: the probability before a token for top_p, log-probabilities for the others."""

IGNORED = 1e-4
"""Probability, under a server that ignores the parameter, of evidence as good as what passes."""

MIN_CHANGED = 5
"""Positions at which penalties must have changed the most likely token."""

_KNOWN_IDS = range(256, 288)
"""Tokens whose texts are learnt with a bias of +100: frequent ones, where a vocabulary is made by merges."""

_MARGIN, _MAX_GAP = 0.3, 6.0
"""By how much a small bias is above or below what is needed, and the largest one that is tried."""

_MOST, _MAX_REPEATED = 100, 2
"""A repetition penalty that leaves no token a chance twice, and how many repetitions are no failure: those
that a server's window of tokens does not have any more."""

_READ = 400
_TOKENS = 48
_MIN_REQUESTS, _MAX_REQUESTS = 4, 24

Kept = Callable[[list[float], float], bool]
"""Whether a token of a log-probability may be drawn, given those of the position, the most likely first."""

PENALTIES = (
    {"presence_penalty": 1.0, "frequency_penalty": 1.0},
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.75},
)


async def check_truncation(name: str, value: float, kept: Kept, subject: Subject) -> CheckResult:
    """No token is generated outside of what a parameter keeps.

    Passes when a server that ignores the parameter would have generated none with probability `IGNORED`.
    """
    subject.need_logprobs(4)
    log_ignored, count, changed = [0.0] * subject.mode.n, 0, False
    for i in range(_MAX_REQUESTS):
        asked = {"temperature": 1, "max_tokens": _TOKENS, "seed": subject.seed + i, name: value}
        answer = await subject.ask(subject.prompt(i), **asked)
        for index, choice in enumerate(answer.choices):
            for at, token in enumerate(choice.tokens):
                cells = sorted(token.cells.values(), reverse=True)
                if token.lp is None or not cells:
                    continue
                count += 1
                inside = math.fsum(math.exp(lp) for lp in cells if kept(cells, lp))
                changed = changed or math.fsum(map(math.exp, cells)) < 0.99 or inside < 0.97
                log_ignored[index] += math.log(min(1.0, max(inside, 1e-9)))
                if not kept(cells, token.lp):
                    rank, tops = sum(lp > token.lp for lp in cells) + 1, [round(x, 4) for x in cells[:5]]
                    summary = f"{name} {value}: token {at} of choice {index} is {token.text!r}, "
                    summary += f"of probability {math.exp(token.lp):.4f} and rank {rank}"
                    return failed(summary, answer.curl, index=at, token=token.text, rank=rank, tops=tops)
        if max(log_ignored) < math.log(IGNORED) and i + 1 >= subject.few(_MIN_REQUESTS):
            chance = max(log_ignored)
            summary = f"{name} {value}: {count} tokens kept it; without it by chance with e^{chance:.0f}"
            return passed(summary, tokens=count, log_chance=chance)
    if not count and subject.mode != WHOLE:
        raise not_possible("no log-probabilities")
    if count and not changed:
        raise not_possible("log-probabilities are reported after truncation, which hides what was cut")
    raise inconclusive(f"{count} tokens, of which a server without {name} might have generated all")


check_top_p = partial(check_truncation, "top_p", 0.5, lambda cells, lp: _before(cells, lp) < 0.5 + ROUNDING)
check_top_k = partial(check_truncation, "top_k", 2, lambda cells, lp: lp >= cells[:2][-1] - ROUNDING)
check_min_p = partial(
    check_truncation, "min_p", 0.3, lambda cells, lp: lp >= cells[0] + math.log(0.3) - ROUNDING
)


def _before(cells: list[float], logprob: float) -> float:
    return math.fsum(math.exp(lp) for lp in cells if lp > logprob + ROUNDING)


async def check_bias(subject: Subject) -> CheckResult:
    """A bias of +100 generates one token alone, and a small one makes a token the most likely one."""
    texts = []
    for token_id in (300, 301, 302):
        asked = {"temperature": 1, "max_tokens": 12, "seed": subject.seed, "logit_bias": {str(token_id): 100}}
        answer = await subject.ask(subject.prompts[0], **asked)
        for choice in answer.choices:
            text = choice.text
            if (kinds := len({token.key for token in choice.tokens} or _units(text[:_READ]))) > 1:
                summary = f"logit_bias of +100 for token {token_id} gives {kinds} different tokens"
                return failed(summary, answer.curl, token_id=token_id, text=text)
        texts.append(text)
    if len(set(texts)) < len(texts):
        summary = "logit_bias of +100 for different tokens gives the same text"
        return failed(summary, answer.curl, texts=texts)
    is_greedy = subject.server.num_top >= 2 and not subject.failed("greedy")
    small = await _small_bias(subject) if is_greedy else []
    if isinstance(small, CheckResult):
        return small
    shown = f", and biases of {', '.join(f'{bias:.2f}' for bias in small)} decide" if small else ""
    return passed(f"{len(texts)} biased tokens are generated alone{shown}", texts=texts, small=small)


def _units(text: str) -> set[str]:
    """Return the shortest text whose repetition is `text`, once, or the text's characters."""
    for size in range(1, len(text) // 4 + 1):
        if (text[:size] * (len(text) // size + 1))[: len(text)] == text:
            return {text[:size]}
    return set(text)


async def _small_bias(subject: Subject) -> CheckResult | list[float]:
    """Return the biases that make a token the most likely one, a little less not; or a failure."""
    if "bias" not in subject.shared:
        subject.shared["bias"] = asyncio.ensure_future(_near_tokens(subject))
    biases = []
    for gap, token_id, key, prompt in (await subject.shared["bias"])[:3]:
        for bias in (gap - _MARGIN, gap + _MARGIN):
            asked = {"temperature": 0, "max_tokens": 1, "logit_bias": {str(token_id): round(bias, 3)}}
            answer = await subject.ask(prompt, **asked)
            for choice in answer.choices:
                if choice.tokens and (choice.tokens[0].key == key) != (bias > gap):
                    summary = f"logit_bias of {bias:.2f}: the token is {choice.tokens[0].text!r}, while "
                    summary += f"{key!r} is {gap:.2f} less likely than the most likely one without it"
                    return failed(summary, answer.curl, token_id=token_id, gap=gap)
        biases.append(round(bias, 3))
    return biases


async def _near_tokens(subject: Subject) -> list[tuple[float, int, str, str]]:
    """Return nearly most likely tokens: by how much less likely each is, its id, its key, and the prompt."""
    server, asked = subject.server, {"temperature": 0, "max_tokens": 1}
    biased = (server.ask(subject.prompts[0], **asked, logit_bias={str(i): 100}) for i in _KNOWN_IDS)
    plain = (server.ask(prompt, **asked) for prompt in subject.prompts)
    ids: dict[str, int] = {}
    for token_id, answer in zip(_KNOWN_IDS, await asyncio.gather(*biased), strict=True):
        for token in answer.choice.tokens[:1]:
            ids[token.key] = token_id
    found = []
    for prompt, answer in zip(subject.prompts, await asyncio.gather(*plain), strict=True):
        for token in answer.choice.tokens[:1]:
            best = max(token.cells.values(), default=0.0)
            gaps = ((best - lp, key) for key, lp in token.cells.items() if key in ids)
            found += [(gap, ids[key], key, prompt) for gap, key in gaps if 2 * _MARGIN < gap < _MAX_GAP]
    return sorted(found)


async def check_penalties(subject: Subject) -> CheckResult:
    """At temperature 0 each token is the most likely one after the penalties of the tokens before it."""
    subject.need_logprobs(4)
    if subject.failed("greedy"):
        raise inconclusive("`greedy` failed: tokens are not the most likely ones without penalties either")
    changed = count = 0
    asked = {"temperature": 0, "max_tokens": _TOKENS}
    # Short prompts first: tokens of the prompt are not compared.
    prompts = sorted(subject.prompts, key=len)[:16]
    for penalties in PENALTIES:
        own_changed = 0
        for i, prompt in enumerate(prompts if penalties is PENALTIES[0] else prompts[: subject.few(6)]):
            answer = await subject.ask(prompt, **asked, **penalties)
            for choice in answer.choices:
                wrong, differing, raw = _penalised(choice, prompt, penalties)
                count += len(choice.tokens)
                if wrong is not None:
                    plain = await subject.server.ask(prompt, **asked)
                    if not raw and plain.choice.text != choice.text:
                        raise not_possible("log-probabilities are reported after penalties")
                    summary = "token {index} is {token!r}, while {expected!r} is better by {gap} with "
                    summary = summary.format_map(wrong) + ", ".join(
                        f"{k} {v:g}" for k, v in penalties.items()
                    )
                    return failed(summary, answer.curl, **wrong)
            own_changed += differing
            if own_changed >= MIN_CHANGED and i + 1 >= subject.few(4):
                break
        changed += own_changed
    if repeated := await _repeated(subject, prompts):
        return repeated
    if changed < MIN_CHANGED:
        raise inconclusive(f"penalties changed only {changed} of {count} tokens")
    return passed(f"{count} tokens obey them, {changed} of them other than without penalties", tokens=count)


async def _repeated(subject: Subject, prompts: Sequence[str]) -> CheckResult | None:
    """Return a failure if tokens repeat under a penalty that makes all tokens that occurred unlikely."""
    names = [name for name in ("repetition_penalty", "repeat_penalty") if name in subject.server.fields]
    asked = {"temperature": 0, "max_tokens": 24}
    for prompt in prompts[: subject.few(4)] if names else ():
        answer = await subject.ask(prompt, **asked, **dict.fromkeys(names, _MOST))
        for choice in answer.choices:
            repeated = len(choice.tokens) - len({token.key for token in choice.tokens})
            if repeated > _MAX_REPEATED:
                summary = f"{repeated} of {len(choice.tokens)} tokens repeat with {names[0]} {_MOST}"
                return failed(summary, answer.curl, text=choice.text)
    return None


def _penalised(
    choice: Choice, prompt: str, penalties: Mapping[str, float]
) -> tuple[dict[str, Any] | None, int, int]:
    """Compare a choice's tokens with the penalised most likely ones.

    Tokens whose text is in the prompt are compared with none, as some servers penalise the prompt's tokens.

    Returns:
        What is wrong first, if anything; positions where the penalties changed the most likely token; and
        positions where the generated token is not the most likely one as reported.
    """
    counts: Counter[str] = Counter()
    changed = raw = 0
    wrong = None
    once, each = (penalties.get(name, 0.0) for name in ("presence_penalty", "frequency_penalty"))

    def score(key: str, token: Token) -> float:
        return token.cells[key] - once * (key in counts) - each * counts[key]

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
