"""Checks of limits and forms: lengths, stop strings, JSON, and what the server says of its tokens."""

from __future__ import annotations

import json
import math
from typing import Any

from gammaray.audit.answers import Answer, AnswerError, Token
from gammaray.audit.endpoint import RefusedError
from gammaray.audit.findings import CheckResult, failed, inconclusive, not_possible, passed
from gammaray.audit.subject import Subject

_MAX_TOKENS = (1, 2, 3, 4, 5, 7, 9, 13, 17, 33)
_MORE = 12
"""Tokens that `min_tokens` asks for beyond the text's own end."""

_SHORT = ("Question: What is 2 + 2? Answer with a number only.\nAnswer:", "Say yes.")

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


async def check_max_tokens(subject: Subject) -> CheckResult:
    """No completion has more tokens than `max_tokens`."""
    for i, bound in enumerate(_MAX_TOKENS):
        for temperature in (0, 1):
            asked = {"temperature": temperature, "max_tokens": bound, "seed": subject.seed + i}
            answer = await subject.server.ask(subject.prompt(i), **asked)
            if (count := num_tokens(answer)) > bound:
                summary, text = f"{count} tokens with max_tokens {bound}", answer.choice.text
                return failed(summary, answer.curl, max_tokens=bound, tokens=count, text=text)
    return passed(f"{2 * len(_MAX_TOKENS)} completions of at most {_MAX_TOKENS[-1]} tokens")


def num_tokens(answer: Answer) -> int:
    """Return the first choice's tokens: those listed, else what `usage` says; Undecided if it has neither."""
    if tokens := answer.choice.tokens:
        return len(tokens)
    if answer.usage is None or len(answer.choices) > 1:
        raise not_possible("the server reports neither log-probabilities nor usage")
    return answer.usage[1]


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
        if answer.choice.finish_reason == "stop" and count <= 48 - _MORE:
            least = count + _MORE
            answer = await server.ask(prompt, **{**asked, "min_tokens": least, "max_tokens": least + _MORE})
            evidence = {"without": count, "min_tokens": least, "tokens": (longer := num_tokens(answer))}
            if longer < least:
                return failed(f"{longer} tokens with min_tokens {least}", answer.curl, **evidence)
            return passed(f"{longer} tokens instead of {count}", **evidence)
    raise inconclusive("no completion ends by itself within 36 tokens")


async def check_stop(subject: Subject) -> CheckResult:
    """A stop string ends the completion before it, wherever tokens and blocks end."""
    server, checked = subject.server, 0
    for prompt in subject.prompts[:6]:
        plain: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
        whole = (await server.ask(prompt, **plain)).choice.text
        for at in (len(whole) // 3, len(whole) // 2):
            # Three characters, which often begin within a token.
            stop = whole[at : at + 3]
            if len(stop) < 3 or not stop.strip():
                continue
            asked = {**plain, "stop": [stop]}
            answer = await server.ask(prompt, **asked)
            text, expected, wrong = answer.choice.text, whole[: whole.index(stop)], ""
            if stop in text:
                wrong = f"the text contains the stop string {stop!r}"
            elif text == expected and answer.choice.finish_reason != "stop":
                wrong = f"finish_reason is {answer.choice.finish_reason!r} at the stop string {stop!r}"
            elif text != expected and expected.startswith(text):
                again = [(await server.ask(prompt, **fields)).choice.text for fields in (plain, asked)]
                if again == [whole, text]:  # else the texts differ for another reason
                    wrong = f"the text ends before the stop string {stop!r}"
            if wrong:
                return failed(wrong, answer.curl, stop=stop, text=text, expected=expected)
            checked += text == expected
    if not checked:
        raise inconclusive("greedy texts are not repeatable, or too short")
    return passed(f"{checked} texts end before their stop strings", texts=checked)


async def check_logprob_zero(subject: Subject) -> CheckResult:
    """Log-probabilities are those of the tokens, and no placeholders."""
    subject.need_logprobs(2)
    count = 0
    for i, prompt in enumerate(subject.prompts[:12]):
        asked = {"temperature": i % 2, "max_tokens": 48, "seed": subject.seed + i}
        answer = await subject.server.ask(prompt, **asked)
        for at, token in enumerate(answer.choice.tokens):
            count += 1
            if wrong := _placeholder(token):
                summary, among = f"token {at}, {token.text!r}, {wrong}", token.cells.get(token.key)
                evidence = {"index": at, "token": token.text, "logprob": token.logprob, "among": among}
                return failed(summary, answer.curl, **evidence)
    return passed(f"{count} log-probabilities agree with the alternatives", tokens=count)


def _placeholder(token: Token) -> str:
    """Return what is wrong with a token's log-probability; empty if nothing is."""
    among = token.cells.get(token.key)
    others = math.fsum(math.exp(lp) for key, lp in token.cells.items() if key != token.key)
    if token.logprob is None or not token.listed:
        return f"has no alternatives, and {token.logprob} as its log-probability"
    if among is not None and abs(among - token.logprob) > CONTRADICTION:
        return f"has log-probability {token.logprob:.4f}, and {among:.4f} among the alternatives"
    if math.exp(token.logprob) + others > 1 + 0.02:
        return f"has log-probability {token.logprob:.4f}, while others have {others:.3f} together"
    return ""


async def check_usage(subject: Subject) -> CheckResult:
    """`usage` counts the tokens that are listed, and a prompt's the same whole and streamed."""
    server, asked, compared = subject.server, {"temperature": 0, "max_tokens": 24}, 0
    for prompt in subject.prompts[:4]:
        answer = await server.ask(prompt, **asked)
        if answer.usage is None:
            raise not_possible("the server reports no usage")
        if wrong := _miscounted(answer):
            return failed(wrong, answer.curl, usage=answer.usage)
        compared += bool(answer.choice.tokens)
        try:
            streamed = await server.stream(prompt, **asked, stream_options={"include_usage": True})
        except (AnswerError, RefusedError):
            continue  # `stream` says what is wrong
        if streamed.usage is None:
            continue
        # Without alternatives a server may not list drafted tokens at all, which `logprob-zero` says.
        wrong = "" if subject.failed("logprob-zero") else _miscounted(streamed)
        if streamed.usage[0] != answer.usage[0]:
            wrong = f"prompt_tokens is {streamed.usage[0]}, and {answer.usage[0]} whole"
        if wrong:
            return failed(f"streamed: {wrong}", streamed.curl, usage=streamed.usage)
    if not compared:
        raise inconclusive("without log-probabilities the tokens cannot be counted")
    return passed(f"usage counts the tokens of {compared} completions")


def _miscounted(answer: Answer) -> str:
    assert answer.usage is not None
    (prompt, completion, total), choice = answer.usage, answer.choice
    if prompt + completion != total:
        return f"{prompt} + {completion} tokens are {total} in all"
    # The end of a sequence is a token that not every server lists.
    unlisted = 1 if choice.finish_reason == "stop" else 0
    if choice.tokens and not 0 <= completion - len(choice.tokens) <= unlisted:
        return f"completion_tokens is {completion}, and {len(choice.tokens)} tokens are listed"
    return ""


async def check_json_schema(subject: Subject) -> CheckResult:
    """Texts of a JSON schema follow it at temperature 1."""
    complete = 0
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    for i in range(8):
        asked = {"temperature": 1, "max_tokens": 192, "seed": subject.seed + i, "response_format": form}
        answer = await subject.server.ask("Describe an animal as JSON.\n", **asked)
        text = answer.choice.text
        if answer.choice.finish_reason != "length":
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
