"""A session as it is stored in Redis: its fields, its request, and what they come to.

Fields of a session's hash: `turn`; `seed`, `sample_index`, `max_tokens`, `num_top` and `prompt_tokens` of the
turn; `digest` of its request; `epoch`, the fencing number of its owner, and `first_epoch`, that of its first
one; `lease`, the time until which the owner is taken to be alive, absent when there is none; `size`, the
bytes of the tokens, and `room`, those of as many as the turn may emit; `state`, what the next owner should
know (`orchestrator.heritage`); `model_identity` of the target that emitted them, from the first commit on
(`orchestrator.identity`); `created`; `nonce` of the call that began the turn; `finish_reason` once it has
ended.

A request is stored apart, once for all sessions that were begun by an equal one: 4 bytes with the length of
the request, the request, the prompt as token ids (uint32, little endian).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gammaray.types import FinishReason, TokenOrigin
from orchestrator.records import StoredToken, TokenRecords
from orchestrator.session import Session

__all__ = [
    "SUMMARY_FIELDS",
    "SessionSummary",
    "StoredSession",
    "digest_of",
    "fields_of",
    "pack_request",
    "parse",
    "parse_summary",
    "room_of",
    "split_summary",
]

SUMMARY_FIELDS = (
    "digest",
    "epoch",
    "turn",
    "seed",
    "prompt_tokens",
    "num_top",
    "size",
    "created",
    "lease",
    "finish_reason",
)
"""Fields that a listing needs, without tokens. A hash without the first was stored by an earlier version."""


@dataclass(frozen=True)
class SessionSummary:
    """What a listing tells of a session.

    Args:
        session_id: Its (qualified) name.
        turn: The current turn, from 0.
        epoch: Fencing number of the owner.
        seed: The seed in use.
        finish_reason: None while the turn is not finished.
        is_running: Whether an owner was alive of late.
        prompt_tokens: Number of tokens of the turn's prompt: all that was committed before.
        emitted_tokens: Number of tokens emitted in the turn.
        created_ms: Unix time at which the session was begun.
        expires_ms: Milliseconds until the session expires.
    """

    session_id: str
    turn: int
    epoch: int
    seed: int
    finish_reason: FinishReason | None
    is_running: bool
    prompt_tokens: int
    emitted_tokens: int
    created_ms: int
    expires_ms: int


@dataclass(frozen=True)
class StoredSession:
    """All that the store has of a session.

    Args:
        summary: What a listing tells of it.
        request: The request that began the turn, as it was given to the store.
        digest: Of the request.
        prompt: Token ids of the turn's prompt: all that was committed before.
        sample_index: Which of the request's choices it is.
        max_tokens: Upper bound of emitted tokens, as it was clipped to the context.
        tokens: The emitted tokens.
        state: What the owner left for the next one.
        model_identity: Of the target that emitted the tokens, in this turn or before; "" where unknown.
        is_whole: Whether all tokens are there that were committed.
    """

    summary: SessionSummary
    request: bytes
    digest: str
    prompt: tuple[int, ...]
    sample_index: int
    max_tokens: int
    tokens: tuple[StoredToken, ...]
    state: bytes
    model_identity: str
    is_whole: bool

    @property
    def session_id(self) -> str:
        """The session's (qualified) name."""
        return self.summary.session_id

    @property
    def turn(self) -> int:
        """The current turn, from 0."""
        return self.summary.turn

    @property
    def epoch(self) -> int:
        """Fencing number of the owner."""
        return self.summary.epoch

    @property
    def seed(self) -> int:
        """The seed in use."""
        return self.summary.seed

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while the turn is not finished."""
        return self.summary.finish_reason

    @property
    def is_running(self) -> bool:
        """Whether an owner was alive of late."""
        return self.summary.is_running

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The emitted tokens' ids."""
        return tuple(token_id for token_id, _, _ in self.tokens)

    @property
    def origins(self) -> tuple[TokenOrigin, ...]:
        """Where the emitted tokens came from."""
        return tuple(origin for _, origin, _ in self.tokens)


def parse_summary(session_id: str, head: Mapping[str, bytes], expires_ms: int, now_ms: int) -> SessionSummary:
    """Return the summary in a hash's fields, as of `now_ms`."""
    reason = head.get("finish_reason")
    records = _records(int(head["num_top"]))
    return SessionSummary(
        session_id=session_id,
        turn=int(head["turn"]),
        epoch=int(head["epoch"]),
        seed=int(head["seed"]),
        finish_reason=FinishReason(reason.decode()) if reason is not None else None,
        is_running=reason is None and int(head.get("lease", 0)) > now_ms,
        prompt_tokens=int(head["prompt_tokens"]),
        emitted_tokens=int(head["size"]) // records.size,
        created_ms=int(head["created"]),
        expires_ms=max(0, expires_ms),
    )


def split_summary(session_id: str, line: bytes, now_ms: int) -> SessionSummary:
    """Return the summary in a line of `orchestrator.store_scripts.LIST`."""
    *values, expires_ms = line.split(b" ")
    head = {name: value for name, value in zip(SUMMARY_FIELDS, values, strict=True) if value != b"-"}
    return parse_summary(session_id, head, int(expires_ms), now_ms)


def parse(
    session_id: str, fields: Mapping[bytes, bytes], request: bytes, data: bytes, expires_ms: int, now_ms: int
) -> StoredSession:
    """Return the session in a hash, its request and its tokens, as of `now_ms`."""
    head = {name.decode(): value for name, value in fields.items()}
    body, prompt = _unpack_request(request)
    return StoredSession(
        summary=parse_summary(session_id, head, expires_ms, now_ms),
        request=body,
        digest=head["digest"].decode(),
        prompt=prompt,
        sample_index=int(head["sample_index"]),
        max_tokens=int(head["max_tokens"]),
        tokens=_records(int(head["num_top"])).unpack(data),
        state=head.get("state", b""),
        model_identity=head.get("model_identity", b"").decode(),
        is_whole=int(head["size"]) == len(data),
    )


def fields_of(session: Session) -> list[Any]:
    """Return what a hash says of a turn, field and value in turn."""
    fields = {
        "seed": session.params.seed or 0,
        "sample_index": session.params.sample_index,
        "max_tokens": session.max_tokens,
        "num_top": -1 if session.num_top_logprobs is None else session.num_top_logprobs,
        "prompt_tokens": len(session.prompt),
    }
    return [part for field in fields.items() for part in field]


def room_of(session: Session) -> int:
    """Return the bytes of as many tokens as a turn may emit."""
    return session.max_tokens * TokenRecords(session.num_top_logprobs).size


def pack_request(request: bytes, prompt: Sequence[int]) -> bytes:
    """Return what is stored of a request and the prompt that it led to."""
    return struct.pack("<I", len(request)) + request + struct.pack(f"<{len(prompt)}I", *prompt)


def digest_of(packed: bytes) -> str:
    """Return the name of a packed request: equal ones of a tenant are stored once."""
    return hashlib.sha256(packed).hexdigest()[:32]


def _unpack_request(packed: bytes) -> tuple[bytes, tuple[int, ...]]:
    (length,) = struct.unpack_from("<I", packed)
    count = (len(packed) - 4 - length) // 4
    return packed[4 : 4 + length], struct.unpack_from(f"<{count}I", packed, 4 + length)


def _records(num_top: int) -> TokenRecords:
    return _RECORDS[num_top]


_RECORDS = {num_top: TokenRecords(None if num_top < 0 else num_top) for num_top in range(-1, 21)}
