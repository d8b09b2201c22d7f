"""Checks of limits and forms: lengths, stop strings, JSON, and what the server says of its tokens."""

from __future__ import annotations

import json
import math
from typing import Any

from gammaray.audit.answers import Answer, AnswerError, Choice
from gammaray.audit.endpoint import RefusedError
from gammaray.audit.findings import CheckResult, Status, inconclusive, not_possible
from gammaray.audit.subject import Subject

_MAX_TOKENS = (1, 2, 3, 4, 5, 7, 9, 13, 17, 33)
_MORE = 12
"""Tokens that `min_tokens` asks for beyond the text's own end."""

CONTRADICTION = 1e-3
"""By how much a token's log-probability may differ from the same token's among the alternatives."""


async def check_max_tokens(subject: Subject) -> CheckResult:
    """No completion has more tokens than `max_tokens`."""
    server, counted = subject.server, 0
    for i, bound in enumerate(_MAX_TOKENS):
        for temperature in (0, 1):
            prompt = subject.prompts[i % len(subject.prompts)]
            asked = {"temperature": temperature, "max_tokens": bound, "seed": subject.seed + i}
            answer = await server.ask(prompt, **asked)
            if (count := num_tokens(answer)) is None:
                raise not_possible("the server reports neither log-probabilities nor usage")
            counted += 1
            if count > bound:
                evidence = {"max_tokens": bound, "tokens": count, "text": answer.choices[0].text}
                summary = f"{count} tokens with max_tokens {bound}"
                return CheckResult(Status.FAILED, summary, evidence, server.curl(prompt, **asked))
    return CheckResult(Status.PASSED, f"{counted} completions of at most {_MAX_TOKENS[-1]} tokens", {})


def num_tokens(answer: Answer) -> int | None:
    """Return the first choice's tokens: those listed, else what `usage` says; None if unknown."""
    tokens = answer.choices[0].tokens
    return len(tokens) if tokens else answer.usage[1] if answer.usage and len(answer.choices) == 1 else None


async def check_min_tokens(subject: Subject) -> CheckResult:
    """A completion that would end earlier has at least `min_tokens` tokens.

    The end is a text's own, or a stop token's with a bias, which `min_tokens` masks as well.
    """
    server = subject.server
    await server.ask(subject.prompts[0], temperature=0, max_tokens=2, min_tokens=1)
    biased = {"logit_bias": {"300": 100}, "stop_token_ids": [300]}
    for prompt, fields in ((_SHORT[0], {}), (_SHORT[1], {}), (subject.prompts[0], biased)):
        asked: dict[str, Any] = {"temperature": 0, "max_tokens": 48, **fields}
        try:
            answer = await server.ask(prompt, **asked)
        except RefusedError:
            continue
        count = num_tokens(answer)
        if count is None:
            raise not_possible("the server reports neither log-probabilities nor usage")
        if answer.choices[0].finish_reason == "stop" and count <= 48 - _MORE:
            asked |= {"min_tokens": count + _MORE, "max_tokens": count + 2 * _MORE}
            longer = num_tokens(await server.ask(prompt, **asked)) or 0
            evidence = {"without": count, "min_tokens": count + _MORE, "tokens": longer}
            if longer < count + _MORE:
                summary = f"{longer} tokens with min_tokens {count + _MORE}"
                return CheckResult(Status.FAILED, summary, evidence, server.curl(prompt, **asked))
            return CheckResult(Status.PASSED, f"{longer} tokens instead of {count}", evidence)
    raise inconclusive("no completion ends by itself within 36 tokens")


_SHORT = ("Question: What is 2 + 2? Answer with a number only.\nAnswer:", "Say yes.")


async def check_stop(subject: Subject) -> CheckResult:
    """A stop string ends the completion before it, wherever tokens and blocks end."""
    server, checked = subject.server, 0
    for prompt in subject.prompts[:6]:
        plain: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
        whole = (await server.ask(prompt, **plain)).choices[0].text
        for at in (len(whole) // 3, len(whole) // 2):
            # Three characters, which often begin within a token.
            stop = whole[at : at + 3]
            if len(stop) < 3 or not stop.strip():
                continue
            asked = {**plain, "stop": [stop]}
            choice = (await server.ask(prompt, **asked)).choices[0]
            expected = whole[: whole.index(stop)]
            evidence = {"stop": stop, "text": choice.text, "expected": expected}
            curl = server.curl(prompt, **asked)
            if stop in choice.text:
                return CheckResult(
                    Status.FAILED, f"the text contains the stop string {stop!r}", evidence, curl
                )
            if choice.text == expected and choice.finish_reason != "stop":
                summary = f"finish_reason is {choice.finish_reason!r} at the stop string {stop!r}"
                return CheckResult(Status.FAILED, summary, evidence, curl)
            if choice.text != expected and expected.startswith(choice.text):
                again = [(await server.ask(prompt, **fields)).choices[0].text for fields in (plain, asked)]
                if again == [whole, choice.text]:  # else the texts differ for another reason
                    summary = f"the text ends before the stop string {stop!r}"
                    return CheckResult(Status.FAILED, summary, evidence, curl)
            checked += choice.text == expected
    if not checked:
        raise inconclusive("greedy texts are not repeatable, or too short")
    return CheckResult(Status.PASSED, f"{checked} texts end before their stop strings", {"texts": checked})


async def check_logprob_zero(subject: Subject) -> CheckResult:
    """Log-probabilities are those of the tokens, and no placeholders."""
    subject.need_logprobs(2)
    server, count = subject.server, 0
    for i, prompt in enumerate(subject.prompts[:12]):
        asked = {"temperature": i % 2, "max_tokens": 48, "seed": subject.seed + i}
        choice = (await server.ask(prompt, **asked)).choices[0]
        for at, token in enumerate(choice.tokens):
            count += 1
            among = token.cells.get(token.key)
            others = math.fsum(math.exp(lp) for key, lp in token.cells.items() if key != token.key)
            reason = ""
            if token.logprob is None or not token.listed:
                reason = f"has no alternatives, and {token.logprob} as its log-probability"
            elif among is not None and abs(among - token.logprob) > CONTRADICTION:
                reason = f"has log-probability {token.logprob:.4f}, and {among:.4f} among the alternatives"
            elif math.exp(token.logprob) + others > 1 + 0.02:
                reason = f"has log-probability {token.logprob:.4f}, while others have {others:.3f} together"
            if reason:
                summary = f"token {at}, {token.text!r}, {reason}"
                evidence = {"index": at, "token": token.text, "logprob": token.logprob, "among": among}
                return CheckResult(Status.FAILED, summary, evidence, server.curl(prompt, **asked))
    return CheckResult(
        Status.PASSED, f"{count} log-probabilities agree with the alternatives", {"tokens": count}
    )


async def check_usage(subject: Subject) -> CheckResult:
    """`usage` counts the tokens that are listed, and a prompt's the same whole and streamed."""
    server, asked = subject.server, {"temperature": 0, "max_tokens": 24}
    compared = 0
    for prompt in subject.prompts[:4]:
        answer = await server.ask(prompt, **asked)
        curl = server.curl(prompt, **asked)
        if answer.usage is None:
            raise not_possible("the server reports no usage")
        if wrong := _miscounted(answer):
            return CheckResult(Status.FAILED, wrong, {"usage": answer.usage}, curl)
        compared += bool(answer.choices[0].tokens)
        options = {**asked, "stream_options": {"include_usage": True}}
        try:
            streamed = await server.stream(prompt, **options)
        except (AnswerError, RefusedError):
            continue  # `stream` says what is wrong
        if streamed.usage is None:
            continue
        # Without alternatives a server may not list drafted tokens at all, which `logprob-zero` says.
        wrong = "" if subject.failed("logprob-zero") else _miscounted(streamed)
        if streamed.usage[0] != answer.usage[0]:
            wrong = f"prompt_tokens is {streamed.usage[0]}, and {answer.usage[0]} whole"
        if wrong:
            curl = server.curl(prompt, **options, stream=True)
            return CheckResult(Status.FAILED, f"streamed: {wrong}", {"usage": streamed.usage}, curl)
    if not compared:
        raise inconclusive("without log-probabilities the tokens cannot be counted")
    return CheckResult(Status.PASSED, f"usage counts the tokens of {compared} completions", {})


def _miscounted(answer: Answer) -> str:
    assert answer.usage is not None
    prompt, completion, total = answer.usage
    if prompt + completion != total:
        return f"{prompt} + {completion} tokens are {total} in all"
    choice = answer.choices[0] if answer.choices else Choice("", (), None)
    # The end of a sequence is a token that not every server lists.
    unlisted = 1 if choice.finish_reason == "stop" else 0
    if choice.tokens and not 0 <= completion - len(choice.tokens) <= unlisted:
        return f"completion_tokens is {completion}, and {len(choice.tokens)} tokens are listed"
    return ""


SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "enum": ["cat", "dog", "bird"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "tame": {"type": "boolean"},
    },
    "required": ["kind", "age", "tame"],
    "additionalProperties": False,
}


async def check_json_schema(subject: Subject) -> CheckResult:
    """Texts of a JSON schema follow it at temperature 1."""
    server, complete = subject.server, 0
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    for i in range(8):
        prompt = "Describe an animal as JSON.\n"
        asked = {"temperature": 1, "max_tokens": 192, "seed": subject.seed + i, "response_format": form}
        choice = (await server.ask(prompt, **asked)).choices[0]
        is_cut = choice.finish_reason == "length"
        complete += not is_cut
        begins = choice.text.lstrip()[:1] in ("", "{")
        wrong = (
            ("" if begins else f"no JSON object: {choice.text[:80]!r}")
            if is_cut
            else _off_schema(choice.text)
        )
        if wrong:
            return CheckResult(
                Status.FAILED, wrong, {"text": choice.text[:500]}, server.curl(prompt, **asked)
            )
    if not complete:
        raise inconclusive("no text was complete within 192 tokens")
    return CheckResult(Status.PASSED, f"{complete} texts follow the schema", {"texts": complete})


def _off_schema(text: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return f"no JSON: {text[:80]!r}"
    age = value.get("age") if isinstance(value, dict) else None
    if (
        not isinstance(value, dict)
        or value.keys() != {"kind", "age", "tame"}
        or value["kind"] not in ("cat", "dog", "bird")
        or not isinstance(value["tame"], bool)
        or not (isinstance(age, int) and not isinstance(age, bool) and 0 <= age <= 30)
    ):
        return f"JSON of another form: {text[:80]!r}"
    return ""
