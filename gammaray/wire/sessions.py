"""Session state as reported to clients."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gammaray.errors import InternalError
from gammaray.types import FinishReason
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.convert import values_of
from gammaray.wire.enums import FINISH_REASONS, FINISH_REASONS_BACK


class SessionState(str, Enum):
    """State of the current turn; detached: its client or orchestrator is gone, and it can be resumed."""

    RUNNING = "running"
    DETACHED = "detached"
    FINISHED = "finished"


@dataclass(frozen=True)
class SessionInfo:
    """The stored state of a session.

    Args:
        session_id: Its name.
        turn: The current turn, from 0.
        state: State of that turn.
        finish_reason: Why the turn ended; None while it has not.
        prompt_tokens: Tokens of the turn's prompt, including the previous turns.
        emitted_tokens: Tokens emitted in the turn.
        seed: The seed in use.
        epoch: Fencing number of the owner; incremented with each takeover.
        created_ms: Unix time of the session's creation, in milliseconds.
        expires_in_ms: Milliseconds until it expires.
    """

    session_id: str
    turn: int
    state: SessionState
    finish_reason: FinishReason | None
    prompt_tokens: int
    emitted_tokens: int
    seed: int
    epoch: int
    created_ms: int
    expires_in_ms: int


_STATES = {state: pb.SessionState.Value(f"SESSION_STATE_{state.name}") for state in SessionState}
_STATES_BACK = {value: state for state, value in _STATES.items()}


def info_to_proto(info: SessionInfo) -> pb.SessionInfo:
    reason = info.finish_reason
    fields = vars(info) | {
        "state": _STATES[info.state],
        "finish_reason": FINISH_REASONS[reason] if reason else 0,
    }
    return pb.SessionInfo(**fields)


def info_from_proto(message: pb.SessionInfo) -> SessionInfo:
    """Return the session of a wire message; InternalError if its state is unknown to this version."""
    if message.state not in _STATES_BACK:
        raise InternalError(f"the server sent session state {message.state}, allowed: {sorted(_STATES_BACK)}")
    values = values_of(message, SessionInfo)
    values["state"] = _STATES_BACK[message.state]
    values["finish_reason"] = FINISH_REASONS_BACK.get(message.finish_reason)
    return SessionInfo(**values)
