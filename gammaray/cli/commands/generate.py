"""`gammaray generate`: stream one completion."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from gammaray.checks import FieldRule, Integer, Number
from gammaray.cli.options import Connection, connection_options, form_options
from gammaray.cli.render import print_summary, printable
from gammaray.client.async_client import AsyncClient
from gammaray.client.completion import Completion, speculation_object
from gammaray.errors import InvalidArgumentError
from gammaray.program.values import GIVEN_FILE, NEW_FILE
from gammaray.sampling import SAMPLING_RULES, SamplingParams
from gammaray.types import MAX_GAMMA, DrafterKind, GenerationRequest, VerificationMethod

_KINDS: dict[type[FieldRule], type] = {Number: float, Integer: int}
_SAMPLING = tuple(
    (name, _KINDS[type(rule)], rule.meaning) for name, rule in SAMPLING_RULES.items() if type(rule) in _KINDS
)


def _gamma(value: str) -> str | int:
    try:
        return value if value == "adaptive" else int(value)
    except ValueError:
        message = f'{value!r} is neither "adaptive" nor an integer in [0, {MAX_GAMMA}]'
        raise click.BadParameter(message) from None


# name of the option of `AsyncClient.generate`, its type, its help text
_OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("max_tokens", int, "Upper bound of emitted tokens."),
    *_SAMPLING,
    ("gamma", _gamma, "Draft tokens per cycle: a number (0 is plain decoding), or adaptive."),
    ("verification", click.Choice([m.value for m in VerificationMethod]), "Verification method."),
    ("drafter", click.Choice([d.value for d in DrafterKind]), "Drafter to use."),
    ("logprobs", int, "With --json: log-probabilities of the tokens and this many alternatives."),
    ("session_id", str, "Name of the session; by default the server chooses one."),
    ("model", str, "Name of the model; by default the served one."),
)


@click.command()
@click.argument("prompt")
@connection_options(timeout_s=600.0)
@click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; repeatable.")
@click.option(
    "--prediction",
    type=GIVEN_FILE,
    metavar="FILE",
    help="Propose the text of this file where the completion follows it; the tokens stay the same.",
)
@form_options
@click.option(
    *("--receipt", "receipt_file"),
    type=NEW_FILE,
    metavar="FILE",
    help="Append the completion's signed receipt to this file, for `gammaray check`.",
)
@click.option("--ignore-eos", is_flag=True, help="Continue after end-of-sequence tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def generate(
    prompt: str,
    connection: Connection,
    as_json: bool,
    prediction: Path | None,
    receipt_file: Path | None,
    form: dict[str, Any],
    **options: Any,
) -> None:
    """Stream a completion of PROMPT; - reads it from standard input.

    The text goes to standard output, the summary to standard error.
    """
    given = {name: value for name, value in options.items() if value is not None} | form
    text = _decoded("prompt", sys.stdin.buffer.read()) if prompt == "-" else prompt
    if prediction is not None:
        given["prediction"] = _decoded("prediction", prediction.read_bytes())
    if receipt_file is not None:
        given["receipt"] = True

    async def stream(client: AsyncClient) -> Completion:
        chunks = []
        async for chunk in client.generate(text, timeout_s=connection.timeout_s, **given):
            chunks.append(chunk)
            if not as_json:
                # Without `color`, echo strips the text's escape sequences when the output is not a terminal.
                click.echo(printable(chunk.text), nl=chunk.finish_reason is not None, color=True)
        return Completion.from_chunks(chunks)

    completion = connection.call(stream)
    if receipt_file is not None:
        with receipt_file.open("a") as file:
            file.write(f"{completion.receipt}\n")
    if as_json:
        click.echo(json.dumps(_json(completion, "logprobs" in given), ensure_ascii=False))
    else:
        print_summary(Console(stderr=True, highlight=False), completion)


def _decoded(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(name, f"an invalid byte at offset {error.start}", "UTF-8") from None


def _json(completion: Completion, with_logprobs: bool) -> dict[str, Any]:
    tokens = completion.tokens
    answer: dict[str, Any] = {
        "text": completion.text,
        "finish_reason": completion.finish_reason.value,
        "seed": completion.seed,
        "usage": asdict(completion.usage),
        "gammaray": {
            "session_id": completion.session_id,
            "origins": [token.origin.value for token in tokens],
            "token_ids": [token.token_id for token in tokens],
            **speculation_object(completion.summary),
        },
    }
    if with_logprobs:
        answer["logprobs"] = [
            {
                "token_id": token.token_id,
                "logprob": token.logprob,
                "top": [{"token_id": top.token_id, "logprob": top.logprob} for top in token.top_logprobs],
            }
            for token in tokens
        ]
    return answer


def _option(name: str, kind: Any, meaning: str) -> click.Option:
    default = "adaptive" if name == "gamma" else _default(name)
    shown = f"  [default: {default}]" if default else ""
    metavar = "N|adaptive" if name == "gamma" else None
    option = f"--{name.replace('_', '-')}"
    return click.Option([option, name], type=kind, default=None, metavar=metavar, help=meaning + shown)


def _default(name: str) -> str:
    for owner in (GenerationRequest, SamplingParams):
        value = getattr(owner, name, None)  # dataclasses store simple defaults as class attributes
        if value is not None:
            return str(getattr(value, "value", value))
    return ""


generate.params.extend(_option(*option) for option in _OPTIONS)
