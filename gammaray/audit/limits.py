"""Checks of limits and forms: lengths, stop strings, JSON, and what the server says of its tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from gammaray.audit.answers import Answer, Choice, Token
from gammaray.audit.endpoint import RefusedError
from gammaray.audit.findings import CheckResult, failed, inconclusive, not_possible, passed
from gammaray.audit.subject import WHOLE, Subject

_MAX_TOKENS = (1, 2, 3, 4, 5, 7, 9, 13, 17, 33)
_MORE = 12
"""Tokens that `min_tokens` asks for beyond the text's own end."""

_SHORT = ("Question: What is 2 + 2? Answer with a number only.\nAnswer:", "Say yes.")

_MIN_COPIED = 3
"""Tokens of the same alternatives, bit by bit, in other contexts: one or two may be rounded to few values."""

_MIN_LISTED = 8

CONTRADICTION = 1e-3
"""By how much a token's log-probability may differ from the same token's among the alternatives."""

_KINDS = ("cat", "dog", "bird")
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "enum": list(_KINDS)},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "tame": {"type": "boolean"},
    },
    "required": ["kind", "age", "tame"],
    "additionalProperties": False,
}

_ABSENT = "\u2603\u2604"
"""A stop string that no text has."""


async def check_max_tokens(subject: Subject) -> CheckResult:
    """A completion has `max_tokens` tokens where the text goes on, and `finish_reason` says so."""
    bounds = _MAX_TOKENS[:: 1 if subject.mode == WHOLE else 3]
    for i, bound in enumerate(bounds):
        asked = {"temperature": 0, "seed": subject.seed + i}
        longer = await subject.server.ask(subject.prompt(i), **asked, max_tokens=bound + 8)
        for temperature in (0, 1):
            asked |= {"temperature": temperature, "max_tokens": bound}
            answer = await subject.ask(subject.prompt(i), **asked)
            for index, choice in enumerate(answer.choices):
                count, wrong = num_tokens(answer, index), ""
                if count > bound:
                    wrong = f"{count} tokens with max_tokens {bound}"
                elif num_tokens(longer) > bound and longer.choice.text.startswith(choice.text or "\0"):
                    # The greedy text goes on, so that nothing else than the bound ended it.
                    wrong = _not_cut(choice, count, bound) if temperature == 0 else ""
                if wrong:
                    evidence = {"max_tokens": bound, "tokens": count, "text": choice.text}
                    return failed(wrong, answer.curl, choice=index, **evidence)
    return passed(f"{2 * len(bounds)} completions of at most {bounds[-1]} tokens")


def _not_cut(choice: Choice, count: int, bound: int) -> str:
    if choice.finish_reason != "length":
        return f"finish_reason is {choice.finish_reason!r} at max_tokens {bound}, where the text goes on"
    return f"{count} tokens with max_tokens {bound}, where the text goes on" if count < bound else ""


def num_tokens(answer: Answer, index: int = 0) -> int:
    """Return a choice's tokens: those listed, else what `usage` says; Undecided if it has neither."""
    choice = answer.choices[index]
    if choice.tokens or not choice.text:
        return len(choice.tokens)
    if answer.usage is None or len(answer.choices) > 1:
        raise not_possible("the server reports neither log-probabilities nor usage")
    return answer.usage[1]


async def check_min_tokens(subject: Subject) -> CheckResult:
    """A completion that would end earlier has at least `min_tokens` tokens before its end.

    The end is a stop token's with a bias, which `min_tokens` masks as well, so that it is the next token; or
    a text's own.
    """
    await subject.server.ask(subject.prompts[0], temperature=0, max_tokens=2, min_tokens=1)
    biased = {"logit_bias": {"300": 100}, "stop_token_ids": [300]}
    found = ""
    for prompt, fields in ((subject.prompts[0], biased), (_SHORT[0], {}), (_SHORT[1], {})):
        asked: dict[str, Any] = {"temperature": 0, "max_tokens": 48, **fields}
        try:
            answer = await subject.ask(prompt, **asked)
        except RefusedError:
            continue
        counts = [num_tokens(answer, i) for i in range(len(answer.choices))]
        # Some servers list the token that ends a text, which `min_tokens` does not count.
        ends = max(counts) if fields and max(counts) <= 1 else 0
        if answer.choice.finish_reason != "stop" or max(counts) > 48 - _MORE or (fields and max(counts) > 1):
            continue
        least = max(counts) - ends + _MORE
        answer = await subject.ask(prompt, **{**asked, "min_tokens": least, "max_tokens": least + _MORE})
        longer = min(num_tokens(answer, i) for i in range(len(answer.choices)))
        evidence = {"without": max(counts), "min_tokens": least, "tokens": longer}
        if longer < least + ends:
            return failed(f"{longer - ends} tokens with min_tokens {least}", answer.curl, **evidence)
        found = found or f"{longer} tokens instead of {max(counts)}"
    if not found:
        raise inconclusive("no completion ends by itself within 36 tokens")
    return passed(found)


async def check_stop(subject: Subject) -> CheckResult:
    """A stop string ends the completion before it, alone or among others, wherever tokens and blocks end."""
    plain, checked = {"temperature": 0, "max_tokens": 40}, 0
    for i, prompt in enumerate(subject.prompts[: subject.few(6)]):
        whole = (await subject.server.ask(prompt, **plain)).choice.text
        for k, at in enumerate((len(whole) // 3, len(whole) // 2)):
            # Three characters, which often begin within a token.
            stop, later = whole[at : at + 3], whole[at + 5 : at + 8]
            if len(stop) < 3 or not stop.strip():
                continue
            lists = [stop], [_ABSENT, stop], [stop, _ABSENT], [later or _ABSENT, _ABSENT, stop]
            stops = lists[(2 * i + k) % len(lists)]
            asked = {**plain, "stop": stops}
            answer = await subject.ask(prompt, **asked)
            expected = whole[: min(whole.index(one) for one in stops if one in whole)]
            for index, choice in enumerate(answer.choices):
                wrong = _wrong_stop(choice, stops, expected)
                if not wrong and choice.text != expected and expected.startswith(choice.text):
                    again = await subject.server.ask(prompt, **plain), await subject.ask(prompt, **asked)
                    texts = [again[0].choice.text, again[1].choices[index].text]
                    if texts == [whole, choice.text]:  # else the texts differ for another reason
                        wrong = f"the text ends before the stop string {stop!r}"
                if wrong:
                    evidence = {"stop": stops, "text": choice.text, "expected": expected}
                    return failed(wrong, answer.curl, choice=index, **evidence)
                checked += choice.text == expected
    if failure := await _wrong_stop_token(subject):
        return failure
    if not checked:
        raise inconclusive("greedy texts are not repeatable, or too short")
    return passed(f"{checked} texts end before their stop strings", texts=checked)


def _wrong_stop(choice: Choice, stops: Sequence[str], expected: str) -> str:
    if held := next((stop for stop in stops if stop in choice.text), ""):
        return f"the text contains the stop string {held!r}"
    if choice.text == expected and choice.finish_reason != "stop":
        return f"finish_reason is {choice.finish_reason!r} at a stop string of {stops}"
    return ""


async def _wrong_stop_token(subject: Subject) -> CheckResult | None:
    """Return what is wrong with `stop_token_ids`, if it is known: a bias makes the token the next one."""
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "logit_bias": {"300": 100}}
    try:
        plain = await subject.server.ask(subject.prompts[0], **asked)
        answer = await subject.ask(subject.prompts[0], **asked, stop_token_ids=[300])
    except RefusedError:
        return None
    keys = {token.key for token in plain.choice.tokens}
    for choice in answer.choices:
        if len(keys) == 1 and len(plain.choice.tokens) == 6 and len(choice.tokens) > 1:
            return failed(f"{len(choice.tokens)} tokens, of which each is one of stop_token_ids", answer.curl)
    return None


async def check_logprob_zero(subject: Subject) -> CheckResult:
    """Log-probabilities are those of the tokens, as many as asked for, and no placeholders."""
    subject.need_logprobs(2)
    count = 0
    for i, prompt in enumerate(subject.prompts[: subject.few(12)]):
        asked = {"temperature": (i + 1) % 2, "max_tokens": 48, "seed": subject.seed + i}
        answer = await subject.ask(prompt, **asked)
        for choice in answer.choices:
            for at, token in enumerate(choice.tokens):
                count += 1
                if wrong := _placeholder(token):
                    summary, among = f"token {at}, {token.text!r}, {wrong}", token.cells.get(token.key)
                    evidence = {"index": at, "token": token.text, "logprob": token.logprob, "among": among}
                    return failed(summary, answer.curl, **evidence)
            if wrong := _miscounted_top(choice, subject.server.num_top):
                return failed(wrong, answer.curl)
        for left, right in combinations(answer.choices, 2):
            if (same := _copied(left, right)) >= _MIN_COPIED:
                summary = f"{same} tokens of two different choices have the same alternatives"
                return failed(summary, answer.curl)
    if not count:
        raise not_possible("no log-probabilities")
    return passed(f"{count} log-probabilities agree with the alternatives", tokens=count)


def _placeholder(token: Token) -> str:
    among = token.cells.get(token.key)
    others = math.fsum(math.exp(lp) for key, lp in token.cells.items() if key != token.key)
    if token.logprob is None or not token.listed:
        return f"has no alternatives, and {token.logprob} as its log-probability"
    if among is not None and abs(among - token.logprob) > CONTRADICTION:
        return f"has log-probability {token.logprob:.4f}, and {among:.4f} among the alternatives"
    if math.exp(token.logprob) + others > 1 + 0.02:
        return f"has log-probability {token.logprob:.4f}, while others have {others:.3f} together"
    return ""


def _miscounted_top(choice: Choice, asked: int) -> str:
    """Return what is wrong with the number of alternatives, to which the drawn token may be added.

    A token may have fewer, as those of equal texts may be listed once, but not all of them.
    """
    counts = [len(token.listed) for token in choice.tokens]
    if len(counts) >= _MIN_LISTED and not asked <= max(counts) <= asked + 1:
        return f"tokens have up to {max(counts)} alternatives instead of {asked}"
    return ""


def _copied(left: Choice, right: Choice) -> int:
    """Return how many tokens have the same uncertain alternatives after other tokens before them."""
    keys = [([t.key for t in c.tokens], [t.listed for t in c.tokens]) for c in (left, right)]
    (own, listed), (other, others) = keys
    if left.text != right.text and own and own == other:
        return len(own)
    if 2 * len({*listed}) < len(listed):  # they follow from no context, or from one that repeats
        return 0
    at = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), len(own))
    pairs = zip(listed[at + 1 :], others[at + 1 :], strict=False)
    return sum(a == b and max((lp for _, lp in a), default=0) < -0.05 for a, b in pairs)


async def check_usage(subject: Subject) -> CheckResult:
    """`usage` counts the tokens that are listed, those of the prompt too, the same in every way."""
    asked, compared, known = {"temperature": 0, "max_tokens": 24}, 0, 0
    for prompt in subject.prompts[: subject.few(4)]:
        plain, answer = await subject.server.ask(prompt, **asked), await subject.ask(prompt, **asked)
        if answer.usage is None or plain.usage is None:
            raise not_possible("the server reports no usage")
        # Without alternatives a server may not list drafted tokens at all, which `logprob-zero` says.
        wrong = "" if subject.failed("logprob-zero") else _miscounted(answer)
        if answer.usage[0] != plain.usage[0]:
            wrong = f"prompt_tokens is {answer.usage[0]}, and {plain.usage[0]} whole"
        if not wrong and (number := await _prompt_tokens(subject, prompt)):
            known += 1
            if answer.usage[0] != number:
                wrong = f"prompt_tokens is {answer.usage[0]}, and `echo` lists {number}"
        if wrong:
            return failed(wrong, answer.curl, usage=answer.usage)
        compared += bool(answer.choice.tokens)
    if not compared:
        raise inconclusive("without log-probabilities the tokens cannot be counted")
    return passed(f"usage counts the tokens of {compared} completions, and of {known} prompts")


async def _prompt_tokens(subject: Subject, prompt: str) -> int:
    """Return how many tokens of a prompt the server lists with `echo`; 0 if it lists none."""
    if subject.server.is_chat or not subject.server.num_top or "echo" in subject.server.refused:
        return 0
    try:
        answer = await subject.server.ask(prompt, temperature=0, max_tokens=1, echo=True)
    except RefusedError as error:
        subject.server.refused["echo"] = str(error)
        return 0
    texts = [token.text for token in answer.choice.tokens]
    # The prompt's tokens are those whose texts make up the prompt, after one that begins every text.
    at = next((i for i in range(len(texts), 0, -1) if "".join(texts[:i]).endswith(prompt)), 0)
    return at if answer.choice.text.startswith(prompt) else 0


def _miscounted(answer: Answer) -> str:
    assert answer.usage is not None
    prompt, completion, total = answer.usage
    if prompt + completion != total:
        return f"{prompt} + {completion} tokens are {total} in all"
    listed = sum(len(choice.tokens) for choice in answer.choices)
    # The end of a sequence is a token that not every server lists.
    unlisted = sum(choice.finish_reason == "stop" for choice in answer.choices)
    if listed and not 0 <= completion - listed <= unlisted:
        return f"completion_tokens is {completion}, and {listed} tokens are listed"
    return ""


async def check_json_schema(subject: Subject) -> CheckResult:
    """Texts of a JSON schema follow it at temperature 1."""
    complete = 0
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    for i in range(subject.few(8)):
        asked = {"temperature": 1, "max_tokens": 192, "seed": subject.seed + i, "response_format": form}
        answer = await subject.ask("Describe an animal as JSON.\n", **asked)
        for choice in answer.choices:
            text = choice.text
            if choice.finish_reason != "length":
                complete, wrong = complete + 1, _off_schema(text)
            else:
                wrong = "" if text.lstrip()[:1] in ("", "{") else f"no JSON object: {text[:80]!r}"
            if wrong:
                return failed(wrong, answer.curl, text=text[:500])
    if not complete:
        raise inconclusive("no text was complete within 192 tokens")
    return passed(f"{complete} texts follow the schema", texts=complete)


def _off_schema(text: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return f"no JSON: {text[:80]!r}"
    if isinstance(value, dict) and value.keys() == {"kind", "age", "tame"}:
        kind, age, tame = value["kind"], value["age"], value["tame"]
        if kind in _KINDS and type(tame) is bool and type(age) is int and 0 <= age <= 30:
            return ""
    return f"JSON of another form: {text[:80]!r}"
