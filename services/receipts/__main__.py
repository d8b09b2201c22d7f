"""`python -m services.receipts`: `gammaray check`, with its options."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import click

from gammaray.errors import InvalidArgumentError, escaped
from gammaray.program.shared_options import CHECK_PARAMS
from gammaray.receipts.keys import KeySet, parse_keys
from gammaray.receipts.receipt import SignedReceipt
from services.process.program import run_program
from services.receipts.check import ReceiptChecker, ReceiptVerdict, refusal

LEAST_TIES = {"bfloat16": 0.0014}
"""Share of sampled tokens that follow within the margin only, by dtype: half of the smallest one that was
measured of honest targets (docs/receipts.md)."""

MAX_CHANCE = 1e-3
"""Probability at this share below which receipts without such a token are suspicious."""

_URL_TIMEOUT_S = 10.0
_MAX_KEY_BYTES = 2**20


def check_file(
    path: Path,
    target: str,
    key: str | None = None,
    margin: float | None = None,
    dtype: str | None = None,
    *,
    as_json: bool = False,
) -> int:
    """Check the receipts of a file, one per line, print what was found, and return the exit status.

    The `key` is a file or URL with public keys; without one signatures are not checked. Receipts of another
    `dtype` are refused; None: of another than the keys' publisher names, if any.
    """
    keys = None if key is None else _keys(key)
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    if not lines:
        raise InvalidArgumentError("receipts", f"{path} without receipts", "one receipt per line")
    dtypes = (dtype,) if dtype else keys.dtypes if keys else ()
    checker, verdicts = cache(partial(ReceiptChecker, target, margin)), list[ReceiptVerdict]()
    signature = "not checked" if keys is None else "valid"
    for number, line in enumerate(lines, start=1):
        click.echo(f"checking receipt {number} of {len(lines)}", err=True)
        verdict = _verdict(line, keys, dtypes, checker)
        verdicts.append(verdict)
        if as_json:
            click.echo(json.dumps({"receipt": number, "signature": signature, **asdict(verdict)}))
        else:
            click.echo(escaped(f"receipt {number}: {_sentence(verdict, signature)}"))
    for summary in summaries(verdicts):
        click.echo(escaped(summary), err=as_json)
    results = {verdict.result for verdict in verdicts}
    return 1 if "invalid" in results else 2 if "refused" in results else 0


def _keys(place: str) -> KeySet:
    try:
        if place.startswith(("http://", "https://")):
            with urlopen(place, timeout=_URL_TIMEOUT_S) as answer:
                return parse_keys(answer.read(_MAX_KEY_BYTES), place)
        return parse_keys(Path(place).read_bytes(), place)
    except OSError as error:
        reason = error.reason if isinstance(error, URLError) else error.strerror
        raise InvalidArgumentError("key", f"{place} ({reason})", "a file or URL with keys") from None


def _verdict(
    line: str, keys: KeySet | None, dtypes: Sequence[str], checker: Callable[[], ReceiptChecker]
) -> ReceiptVerdict:
    """Return the verdict; the target is loaded for the first receipt that is not refused unseen."""
    dtype = ""
    try:
        signed = SignedReceipt.parse(line)
        dtype = signed.receipt.dtype
        if keys is not None:
            signed.check(keys.keys)
        if dtypes and dtype not in dtypes:
            allowed = f"{' or '.join(dtypes)}, as --dtype or the key set demands"
            raise InvalidArgumentError("model_identity", dtype, allowed)
    except Exception as error:  # a line is of another program, and the others are to be checked
        return refusal(error, dtype)
    return checker().verdict(signed.receipt)


def _sentence(verdict: ReceiptVerdict, signature: str) -> str:
    dtype = verdict.dtype or "dtype unknown"
    if verdict.result == "refused":
        return f"refused ({dtype}): {verdict.reason}"
    count = f"{verdict.num_tokens} tokens follow" if verdict.num_tokens else "empty, no token was checked"
    parts = [count, f"{dtype}, margin {verdict.margin:g}"]
    if verdict.num_ties:
        gap = f"with scores at most {verdict.largest_gap:.2g} nats apart"
        parts.append(f"{verdict.num_ties} of them within the margin only, {gap}")
    if verdict.gap is not None:
        parts.append(f"{verdict.gap:.3g} nats below it")
    reason = f" ({verdict.reason})" if verdict.reason else ""
    return f"{verdict.result}{reason}: {', '.join([*parts, f'signature {signature}'])}"


def summaries(verdicts: Sequence[ReceiptVerdict]) -> Iterator[str]:
    """Yield a line per dtype and margin of the valid receipts, and whether they have too few ties."""
    valid = [verdict for verdict in verdicts if verdict.result == "valid"]
    for dtype, margin in sorted({(verdict.dtype, verdict.margin) for verdict in valid}):
        group = [verdict for verdict in valid if (verdict.dtype, verdict.margin) == (dtype, margin)]
        tokens, ties = sum(v.num_tokens for v in group), sum(v.num_ties for v in group)
        summary = f"valid in {dtype or 'an unknown dtype'}, margin {margin:g}: {len(group)} receipts, "
        yield f"{summary}{tokens} tokens, {ties} of them within the margin only"
        sampled = sum(verdict.num_tokens for verdict in group if verdict.temperature > 0)
        chance = (1 - LEAST_TIES.get(dtype, 0.0)) ** sampled
        if not ties and chance <= MAX_CHANCE:
            yield (
                f"suspicious: none of {sampled} sampled tokens is within the margin only, which has "
                f"probability {chance:.1g} where {LEAST_TIES[dtype]:.1%} of them are. Was this computed in "
                f"float32, so that the margin of {dtype} hides changes? (docs/receipts.md)"
            )


def _check() -> int:
    command = click.Command("gammaray check", params=list(CHECK_PARAMS))
    return check_file(**command.make_context(command.name, sys.argv[1:]).params)


if __name__ == "__main__":
    sys.exit(run_program(_check))
