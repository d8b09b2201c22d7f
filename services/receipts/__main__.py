"""`python -m services.receipts`: `gammaray check`, with its options."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import click

from gammaray.cli.commands.check import PARAMS
from gammaray.errors import InvalidArgumentError
from gammaray.receipts.keys import ReceiptKey, parse_keys
from gammaray.receipts.receipt import SignedReceipt
from services.process.program import run_program
from services.receipts.check import ReceiptChecker, ReceiptVerdict

_URL_TIMEOUT_S = 10.0
_MAX_KEY_BYTES = 2**20


def check_file(
    path: Path, target: str, key: str | None = None, margin: float | None = None, *, as_json: bool = False
) -> int:
    """Check the receipts of a file, one per line, print what was found, and return the exit status.

    Args:
        key: File or URL with public keys; None: signatures are not checked.
        as_json: Whether to print a JSON object per receipt.
    """
    keys = None if key is None else _keys(key)
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    if not lines:
        raise InvalidArgumentError("receipts", f"{path} without receipts", "one receipt per line")
    checker, results = cache(partial(ReceiptChecker, target, margin)), set[str]()
    signature = "not checked" if keys is None else "valid"
    for number, line in enumerate(lines, start=1):
        click.echo(f"checking receipt {number} of {len(lines)}", err=True)
        verdict = _verdict(line, keys, checker)
        results.add(verdict.result)
        if as_json:
            click.echo(json.dumps({"receipt": number, "signature": signature, **asdict(verdict)}))
        else:
            click.echo(f"receipt {number}: {_sentence(verdict, signature)}")
    return 1 if "invalid" in results else 2 if "refused" in results else 0


def _keys(place: str) -> tuple[ReceiptKey, ...]:
    try:
        if place.startswith(("http://", "https://")):
            with urlopen(place, timeout=_URL_TIMEOUT_S) as answer:
                return parse_keys(answer.read(_MAX_KEY_BYTES), place)
        return parse_keys(Path(place).read_bytes(), place)
    except OSError as error:
        reason = error.reason if isinstance(error, URLError) else error.strerror
        raise InvalidArgumentError("key", f"{place} ({reason})", "a file or URL with keys") from None


def _verdict(
    line: str, keys: tuple[ReceiptKey, ...] | None, checker: Callable[[], ReceiptChecker]
) -> ReceiptVerdict:
    """Return the verdict; the target is loaded for the first receipt that is not refused unseen."""
    try:
        found = SignedReceipt.parse(line)
        if keys is not None:
            found.check(keys)
    except InvalidArgumentError as error:
        return ReceiptVerdict(result="refused", reason=str(error))
    return checker().verdict(found.receipt)


def _sentence(verdict: ReceiptVerdict, signature: str) -> str:
    if verdict.result == "refused":
        return f"refused: {verdict.reason}"
    parts = [f"{verdict.num_tokens} tokens follow", f"signature {signature}"]
    if verdict.num_ties:
        parts.append(
            f"{verdict.num_ties} of them within the margin of {verdict.margin:g}, with scores at most "
            f"{verdict.largest_gap:.2g} nats apart"
        )
    if verdict.gap is not None:
        parts.append(f"{verdict.gap:.3g} nats below it, margin {verdict.margin:g}")
    reason = f" ({verdict.reason})" if verdict.reason else ""
    return f"{verdict.result}{reason}: {', '.join(parts)}"


def _check() -> int:
    command = click.Command("gammaray check", params=list(PARAMS))
    return check_file(**command.make_context(command.name, sys.argv[1:]).params)


if __name__ == "__main__":
    sys.exit(run_program(_check))
