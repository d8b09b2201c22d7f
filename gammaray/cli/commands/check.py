"""`gammaray check`: whether the tokens of receipts follow from the target, the parameters and the seed.

Exit codes in addition to those of every command: 0 all receipts are valid; 1 at least one is not; 2 none is
invalid, but at least one cannot be checked.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import click

from gammaray.cli.values import FloatRange
from gammaray.errors import InvalidArgumentError, UnavailableError
from gammaray.qualify.process import answers
from gammaray.receipts.keys import ReceiptKey, parse_keys
from gammaray.receipts.receipt import SignedReceipt
from gammaray.receipts.verdicts import CheckTask, ReceiptVerdict

_COMMAND = (sys.executable, "-m", "services.receipts")
_URL_TIMEOUT_S = 10.0
_MAX_KEY_BYTES = 2**20


@click.command()
@click.argument("path", metavar="RECEIPTS", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--target", required=True, help="Directory, hub name or GGUF file; 'demo' is the demo pair's.")
@click.option(
    "--key",
    metavar="FILE|URL",
    help="Public keys that the server published at /v1/receipts/key; without them no signature is checked.",
)
@click.option(
    "--margin",
    type=FloatRange(0, 100),
    help="How far two logits may move towards each other to make a token the argmax, in nats.  [default: by "
    "the dtype of the server's target, see docs/receipts.md]",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per receipt.")
@click.pass_context
def check(
    context: click.Context, path: Path, target: str, key: str | None, margin: float | None, as_json: bool
) -> None:
    """Check the receipts in the file RECEIPTS, one per line, by one forward pass of the target for each.

    The target is loaded as its worker would, with the settings of the environment.
    """
    keys = None if key is None else _keys(key)
    read = [_read(line, keys) for line in path.read_text(errors="replace").splitlines() if line.strip()]
    if not read:
        raise InvalidArgumentError("receipts", f"{path} without receipts", "one receipt per line")
    receipts = [one.receipt for one in read if isinstance(one, SignedReceipt)]
    found = iter(
        _checked(CheckTask(target=target, receipts=tuple(receipts), margin=margin)) if receipts else ()
    )
    verdicts = [next(found) if isinstance(one, SignedReceipt) else one for one in read]
    signature = "not checked" if keys is None else "valid"
    for number, verdict in enumerate(verdicts, start=1):
        if as_json:
            click.echo(json.dumps({"receipt": number, "signature": signature, **verdict.model_dump()}))
        else:
            click.echo(f"receipt {number}: {_sentence(verdict, signature)}")
    results = {verdict.result for verdict in verdicts}
    context.exit(1 if "invalid" in results else 2 if "refused" in results else 0)


def _keys(place: str) -> tuple[ReceiptKey, ...]:
    """Return the keys of a file or URL."""
    try:
        if place.startswith(("http://", "https://")):
            with urlopen(place, timeout=_URL_TIMEOUT_S) as answer:
                return parse_keys(answer.read(_MAX_KEY_BYTES), place)
        return parse_keys(Path(place).read_bytes(), place)
    except URLError as error:
        raise UnavailableError(f"{place}: {error.reason}") from None
    except OSError as error:
        raise InvalidArgumentError("key", f"{place} ({error.strerror})", "a file or URL with keys") from None


def _read(line: str, keys: tuple[ReceiptKey, ...] | None) -> SignedReceipt | ReceiptVerdict:
    try:
        found = SignedReceipt.parse(line.strip())
        if keys is not None:
            found.check(keys)
    except InvalidArgumentError as error:
        return ReceiptVerdict(result="refused", reason=str(error))
    return found


def _checked(task: CheckTask) -> list[ReceiptVerdict]:
    verdicts = []
    for name, value in answers(task, _COMMAND, "checking"):
        if name == "doing":
            click.echo(value, err=True)
        elif name == "verdict":
            verdicts.append(ReceiptVerdict.model_validate(value))
    return verdicts


def _sentence(verdict: ReceiptVerdict, signature: str) -> str:
    if verdict.result == "refused":
        return f"refused: {verdict.reason}"
    parts: list[Any] = [f"{verdict.num_tokens} tokens follow", f"signature {signature}"]
    if verdict.num_ties:
        parts.append(
            f"{verdict.num_ties} of them within the margin of {verdict.margin:g}, by at most "
            f"{verdict.largest_gap:.2g} nats"
        )
    if verdict.gap is not None:
        parts.append(f"{verdict.gap:.3g} nats below it, margin {verdict.margin:g}")
    reason = f" ({verdict.reason})" if verdict.reason else ""
    return f"{verdict.result}{reason}: {', '.join(parts)}"
