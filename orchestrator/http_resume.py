"""Streams over HTTP that go on where they broke: `id:` of each event, `Last-Event-ID` of the next request.

An id is `<session>:<turn>:<tokens>`, with `:end` behind it once the choice has finished. A client that lost
its stream sends the same body again with the last id it has seen; the events behind that one follow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gammaray.errors import InvalidArgumentError
from gammaray.types import Chunk
from orchestrator.access.caller import Caller
from orchestrator.backend import Backend
from orchestrator.http_requests import ChoicePlan
from orchestrator.http_responses import Response
from orchestrator.sessions.lifecycle import REPLAY_TOKENS

__all__ = ["HEADER", "EventId", "recall", "resumed"]

HEADER = "last-event-id"
_END = "end"
_FORM = "an id of an event of this server: <session>:<turn>:<tokens>"


@dataclass(frozen=True)
class EventId:
    """Where in a stream an event stands.

    Args:
        session_id: The session.
        turn: Its turn.
        offset: Emitted tokens up to and with the event.
        has_ended: Whether the event told why the turn ended.
    """

    session_id: str
    turn: int
    offset: int
    has_ended: bool = False

    @classmethod
    def of(cls, chunk: Chunk) -> EventId:
        """Return the id of a piece's event."""
        offset = chunk.offset + len(chunk.tokens)
        return cls(chunk.session_id, chunk.turn, offset, chunk.finish_reason is not None)

    @classmethod
    def parse(cls, text: str) -> EventId:
        """Return the id in a header.

        Raises:
            InvalidArgumentError: It is none of ours.
        """
        session_id, *rest = text.strip().split(":")
        has_ended = rest[2:] == [_END]
        numbers = rest[:2] if has_ended else rest
        if not session_id or len(numbers) != 2 or not all(n.isascii() and n.isdigit() for n in numbers):
            raise InvalidArgumentError("Last-Event-ID", text, _FORM)
        turn, offset = (int(number[:12]) for number in numbers)
        return cls(session_id, turn, offset, has_ended)

    def __str__(self) -> str:
        text = f"{self.session_id}:{self.turn}:{self.offset}"
        return f"{text}:{_END}" if self.has_ended else text


def resumed(plans: Sequence[ChoicePlan], seen: EventId, *, is_stream: bool) -> list[ChoicePlan]:
    """Return the plans of a request that goes on behind an event.

    Raises:
        InvalidArgumentError: Not a stream of one choice, or one of another session.
    """
    if not is_stream:
        raise InvalidArgumentError("Last-Event-ID", "a request without stream", "stream: true")
    if len(plans) != 1:
        raise InvalidArgumentError(
            "Last-Event-ID", f"{len(plans)} choices", "one prompt with n = 1: only such streams are resumed"
        )
    (plan,) = plans
    own = plan.request.session_id
    if own and own != seen.session_id:
        raise InvalidArgumentError("session_id", own, f"{seen.session_id}, which the Last-Event-ID names")
    request = replace(plan.request, session_id=seen.session_id, turn=seen.turn, resume_from=seen.offset)
    request.validate()
    return [replace(plan, request=request)]


async def recall(response: Response, backend: Backend, seen: EventId, caller: Caller) -> None:
    """Tell a response of one choice what its client has: the tokens before an event.

    Raises:
        NotFoundError: There is no such session (any more).
    """
    _, tokens = await backend.sessions.get(seen.session_id, caller)
    for start in range(0, min(seen.offset, len(tokens)), REPLAY_TOKENS):
        response.recall(tokens[start : min(start + REPLAY_TOKENS, seen.offset)])
        await asyncio.sleep(0)
