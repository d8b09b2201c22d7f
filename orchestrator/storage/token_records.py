"""Emitted tokens as bytes: fixed-size records per session, so a token's offset follows from its index.

A record is the token id (uint32, little endian) and its origin (one byte). If log-probabilities were
requested, the token's own (float64) follows, then the k most likely tokens with theirs; absent: id 2^32 - 1.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from gammaray.blocks import TokenLogprobs
from gammaray.types import TokenOrigin

StoredToken = tuple[int, TokenOrigin, TokenLogprobs | None]
"""Token id, its origin, and its log-probabilities if requested."""

_ORIGINS = (TokenOrigin.ACCEPTED, TokenOrigin.CORRECTION, TokenOrigin.BONUS)
_CODE = {origin: code for code, origin in enumerate(_ORIGINS)}
_ABSENT = 2**32 - 1


class TokenRecords:
    """Packs tokens into records of `size` bytes with so many alternatives; None: no log-probabilities."""

    def __init__(self, num_top_logprobs: int | None) -> None:
        self._num_top = num_top_logprobs
        self._plain = num_top_logprobs is None
        self._struct = struct.Struct("<IB" if num_top_logprobs is None else "<IBd" + "Id" * num_top_logprobs)
        self.size = self._struct.size

    def pack(
        self, token_ids: Sequence[int], origins: Sequence[TokenOrigin], logprobs: Sequence[TokenLogprobs]
    ) -> bytes:
        """Return the records of tokens; `logprobs` has one entry per token if requested."""
        if self._plain:
            return b"".join(
                self._struct.pack(token_id, _CODE[origin])
                for token_id, origin in zip(token_ids, origins, strict=True)
            )
        return b"".join(
            self._struct.pack(token_id, _CODE[origin], entry.logprob, *self._top(entry))
            for token_id, origin, entry in zip(token_ids, origins, logprobs, strict=True)
        )

    def unpack(self, data: bytes) -> tuple[StoredToken, ...]:
        """Return the tokens of complete records; a truncated record at the end is ignored."""
        whole = len(data) - len(data) % self.size
        return tuple(map(self._token, self._struct.iter_unpack(data[:whole])))

    def _top(self, entry: TokenLogprobs) -> list[float]:
        assert self._num_top is not None
        pairs = [*entry.top[: self._num_top]]
        pairs += [(_ABSENT, 0.0)] * (self._num_top - len(pairs))
        return [value for pair in pairs for value in pair]

    def _token(self, fields: tuple[int, ...]) -> StoredToken:
        token_id, code, *rest = fields
        if self._plain:
            return token_id, _ORIGINS[code], None
        top = tuple((i, p) for i, p in zip(rest[1::2], rest[2::2], strict=True) if i != _ABSENT)
        return token_id, _ORIGINS[code], TokenLogprobs(rest[0], top)
