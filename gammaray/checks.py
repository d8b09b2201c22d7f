"""Checks of single values; they raise InvalidArgumentError with the field, the value and what is allowed.

A `FieldRule` is a check as the annotation of a field, as in `Annotated[float, Number(0, 1, "A share.")]`. It
also describes the field: JSON schemas and options of the command line are generated from it.
"""

from __future__ import annotations

import ipaddress
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gammaray.errors import InvalidArgumentError

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


class FieldRule(ABC):
    """The allowed values of a field, and its meaning."""

    meaning: str

    @property
    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the allowed values, without the meaning."""

    @abstractmethod
    def check(self, name: str, got: Any, vocab_size: int | None = None) -> None:
        """Check the value of field `name`, and token ids against `vocab_size` when it is given."""

    def __get_pydantic_json_schema__(self, core_schema: object, handler: object) -> dict[str, Any]:
        """Return the schema of a field of a pydantic model; pydantic calls this."""
        return {**self.schema, "description": self.meaning} if self.meaning else self.schema


@dataclass(frozen=True)
class Number(FieldRule):
    """A finite number in [low, high], or in (low, high] with `open_low`."""

    low: float
    high: float
    meaning: str = ""
    open_low: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        lower = "exclusiveMinimum" if self.open_low else "minimum"
        return {"type": "number", lower: self.low, "maximum": self.high}

    def check(self, name: str, got: Any, vocab_size: int | None = None) -> None:
        check_number(name, got, self.low, self.high, open_low=self.open_low)


@dataclass(frozen=True)
class Integer(FieldRule):
    """An integer in [low, high], or None if `is_optional`."""

    low: int
    high: int
    meaning: str = ""
    is_optional: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}

    def check(self, name: str, got: Any, vocab_size: int | None = None) -> None:
        if got is not None or not self.is_optional:
            check_int(name, got, self.low, self.high)


@dataclass(frozen=True)
class Text(FieldRule):
    """A text of at most `max_length` characters."""

    max_length: int
    meaning: str = ""

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "string", "maxLength": self.max_length}

    def check(self, name: str, got: Any, vocab_size: int | None = None) -> None:
        if not isinstance(got, str):
            raise InvalidArgumentError(name, got, "a string")
        if len(got) > self.max_length:
            raise InvalidArgumentError(name, f"{len(got)} characters", f"at most {self.max_length}")
        check_encodable(name, got)


@dataclass(frozen=True)
class TokenIds(FieldRule):
    """Token ids, at most `max_ids` and at most as many as the vocabulary has."""

    meaning: str = ""
    max_ids: int = MAX_TOKEN_IDS

    @property
    def schema(self) -> dict[str, Any]:
        token_id = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
        return {"type": "array", "items": token_id, "maxItems": self.max_ids}

    def check(self, name: str, got: Any, vocab_size: int | None = None) -> None:
        check_token_ids(name, got, vocab_size, self.max_ids)
        if vocab_size is not None and len(got) > vocab_size:  # they would cost time in every cycle
            allowed = f"at most {vocab_size}, the size of the vocabulary"
            raise InvalidArgumentError(name, f"{len(got)} token ids", allowed)

    def copied(self, name: str, value: Any) -> tuple[int, ...]:
        """Return the ids of a sequence, not yet checked except for their number."""
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            raise InvalidArgumentError(name, value, "a sequence of token ids")
        if len(value) > self.max_ids:
            raise InvalidArgumentError(name, f"{len(value)} token ids", f"at most {self.max_ids}")
        return tuple(value)


@dataclass(frozen=True)
class TokenBiases(FieldRule):
    """Numbers in [low, high] by token id, at most `max_entries`."""

    low: float
    high: float
    max_entries: int
    meaning: str = ""

    @property
    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "patternProperties": {"^[0-9]{1,9}$": Number(self.low, self.high).schema},
            "additionalProperties": False,
            "maxProperties": self.max_entries,
        }

    def check(self, name: str, got: Any, vocab_size: int | None = None) -> None:
        self._check_size(name, got)
        for token_id, bias in got.items():
            check_number(f"{name}[{token_id}]", bias, self.low, self.high)
        check_token_ids(name, tuple(got), vocab_size)

    def copied(self, name: str, value: Any) -> dict[int, float]:
        """Return the entries of a mapping, not yet checked except for their number."""
        if not isinstance(value, Mapping):
            raise InvalidArgumentError(name, value, "a mapping of token ids to numbers")
        self._check_size(name, value)
        return dict(value)

    def _check_size(self, name: str, value: Mapping[int, float]) -> None:
        if len(value) > self.max_entries:
            raise InvalidArgumentError(name, f"{len(value)} entries", f"at most {self.max_entries}")


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def is_address(host: str) -> bool:
    """Whether `host` is an IP address; one of IPv6 may be in brackets."""
    return _ip(host) is not None


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    return host == "localhost" if (found := _ip(host)) is None else found.is_loopback


def is_wildcard(host: str) -> bool:
    """Whether `host` means all interfaces, and so is not an address that clients can dial."""
    return (found := _ip(host)) is not None and found.is_unspecified


def split_address(field: str, address: str) -> tuple[str, int]:
    """Split `host:port`; the host is returned without the brackets that one of IPv6 must have."""
    host, separator, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    well_formed = host == (f"[{bare}]" if ":" in bare else bare)
    if not (separator and bare and well_formed and port.isdecimal()) or int(port) > 65535:
        raise InvalidArgumentError(field, address, "host:port, with an IPv6 host in brackets")
    return bare, int(port)


def join_address(host: str, port: int | str) -> str:
    """Return `host:port`, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
