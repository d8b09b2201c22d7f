"""Checks of single values; each raises InvalidArgumentError with the field, the value and what is allowed."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Sequence

from gammaray.errors import InvalidArgumentError

__all__ = [
    "MAX_TOKEN_IDS",
    "check_api_key",
    "check_encodable",
    "check_int",
    "check_number",
    "check_session_id",
    "check_timeout",
    "check_token_ids",
    "is_address",
    "is_loopback",
]

MAX_TOKEN_IDS = 2**20
"""Longest list of token ids in a request."""


def check_number(name: str, got: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Check that `got` is a finite number in [low, high], or in (low, high] with `open_low`."""
    allowed = f"a number in {'(' if open_low else '['}{low}, {high}]"
    if isinstance(got, bool) or not isinstance(got, (int, float)) or not math.isfinite(got):
        raise InvalidArgumentError(name, got, allowed)
    if got < low or got > high or (open_low and got == low):
        raise InvalidArgumentError(name, got, allowed)


def check_timeout(name: str, got: float) -> float:
    """Check that `got` is a finite number of seconds above 0, and return it."""
    if isinstance(got, bool) or not isinstance(got, (int, float)) or not math.isfinite(got) or got <= 0:
        raise InvalidArgumentError(name, got, "a number of seconds above 0")
    return got


def check_api_key(got: str) -> None:
    """Check that a key can be sent in a header; the error does not contain the key."""
    if not got.isascii() or not got.isprintable() or not got:
        raise InvalidArgumentError("api_key", "a key (not shown)", "printable ASCII characters")


def check_int(name: str, got: int, low: int, high: int) -> None:
    """Check that `got` is an integer in [low, high]."""
    if isinstance(got, bool) or not isinstance(got, int) or not low <= got <= high:
        raise InvalidArgumentError(name, got, f"an integer in [{low}, {high}]")


def check_token_ids(
    name: str, token_ids: Sequence[int], vocab_size: int | None = None, max_ids: int = MAX_TOKEN_IDS
) -> None:
    """Check token ids and their number; without `vocab_size`, ids are bounded by the wire format (uint32)."""
    if len(token_ids) > max_ids:
        raise InvalidArgumentError(name, f"{len(token_ids)} token ids", f"at most {max_ids}")
    high = (vocab_size or 2**32) - 1
    if not token_ids:
        return
    if set(map(type, token_ids)) == {int} and 0 <= min(distinct := set(token_ids)) <= max(distinct) <= high:
        return
    for token_id in token_ids:
        check_int(name, token_id, 0, high)


def check_encodable(name: str, text: str) -> None:
    """Check that `text` can be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"an unpaired surrogate at character {error.start}"
        raise InvalidArgumentError(name, problem, "text that UTF-8 can encode") from None


def check_session_id(session_id: str) -> None:
    """Check a session id; an empty one is valid and lets the server choose."""
    legal = all(c.isascii() and (c.isalnum() or c in "_.-") for c in session_id)
    if not legal or len(session_id) > 128:
        raise InvalidArgumentError("session_id", session_id, "at most 128 of A-Z a-z 0-9 _ . -")


def is_address(host: str) -> bool:
    """Whether `host` is an IP address."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
