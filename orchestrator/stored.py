"""A session as it lies in Redis: its keys, its fields, and what they come to."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from gammaray.types import FinishReason, TokenOrigin
from orchestrator.records import StoredToken, TokenRecords
from orchestrator.session import Session

__all__ = ["StoredSession", "fields_of", "index_of", "keys_of", "parse", "tenant_of"]


@dataclass(frozen=True)
class StoredSession:
    """What the store knows of a session.

    Args:
        session_id: Its (qualified) name.
        request: The request that began the turn, a serialised GenerateRequest.
        prompt: Token ids of the turn's prompt: all that was committed before.
        seed: The seed in use.
        max_tokens: Upper bound of emitted tokens, as it was clipped to the context.
        turn: The current turn, from 0.
        epoch: Fencing number of the owner.
        tokens: The emitted tokens.
        finish_reason: None while the turn is not finished.
        is_running: Whether an owner was alive of late.
        state: What the owner left for an heir.
        model_identity: Of the target that emitted the tokens, in this turn or before; "" where unknown.
        created_ms: Unix time at which the session was begun.
        expires_ms: Milliseconds until the session expires.
        is_whole: Whether all tokens are there that were committed.
    """

    session_id: str
    request: bytes
    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    turn: int
    epoch: int
    tokens: tuple[StoredToken, ...]
    finish_reason: FinishReason | None
    is_running: bool
    state: bytes
    model_identity: str
    created_ms: int
    expires_ms: int
    is_whole: bool

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The emitted tokens' ids."""
        return tuple(token_id for token_id, _, _ in self.tokens)

    @property
    def origins(self) -> tuple[TokenOrigin, ...]:
        """Where the emitted tokens came from."""
        return tuple(origin for _, origin, _ in self.tokens)


def parse(
    session_id: str, head: dict[bytes, bytes], data: bytes, expires_ms: int, now_ms: int
) -> StoredSession:
    """Return the session in a hash and its tokens, as of `now_ms`."""
    num_top, prompt = int(head[b"num_top"]), head[b"prompt"]
    reason = head.get(b"finish_reason")
    return StoredSession(
        session_id=session_id,
        request=head[b"request"],
        prompt=struct.unpack(f"<{len(prompt) // 4}I", prompt),
        seed=int(head[b"seed"]),
        max_tokens=int(head[b"max_tokens"]),
        turn=int(head[b"turn"]),
        epoch=int(head[b"epoch"]),
        tokens=TokenRecords(None if num_top < 0 else num_top).unpack(data),
        finish_reason=FinishReason(reason.decode()) if reason is not None else None,
        is_running=reason is None and int(head.get(b"lease", 0)) > now_ms,
        state=head.get(b"state", b""),
        model_identity=head.get(b"model_identity", b"").decode(),
        created_ms=int(head[b"created"]),
        expires_ms=max(0, expires_ms),
        is_whole=int(head[b"size"]) == len(data),
    )


def fields_of(session: Session, request: bytes) -> list[Any]:
    """Return what a hash says of a turn, field and value in turn."""
    fields = {
        "request": request,
        "prompt": struct.pack(f"<{len(session.prompt)}I", *session.prompt),
        "seed": session.params.seed or 0,
        "max_tokens": session.max_tokens,
        "num_top": -1 if session.num_top_logprobs is None else session.num_top_logprobs,
    }
    return [part for field in fields.items() for part in field]


def keys_of(session_id: str) -> list[str]:
    """Return the keys of a session: its hash, its tokens, and its epoch when it was deleted."""
    head = f"gammaray:session:{{{session_id}}}"
    return [head, f"{head}:tokens", f"{head}:deleted"]


def tenant_of(session_id: str) -> str:
    """Return the tenant in a qualified name, see `orchestrator.access.Caller`."""
    tenant, separator, _ = session_id.partition(":")
    return tenant if separator else ""


def index_of(tenant: str) -> str:
    """Return the key of a tenant's sessions."""
    return f"gammaray:sessions:{tenant}"
