"""Tokens that a target worker decodes ahead, for the next cycles of one session."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

from gammaray.blocks import Verdict
from gammaray.v1 import target_service_pb2 as target_pb
from gammaray.wire.blocks import ahead_from_proto

MAX_AHEAD = 32
"""Tokens that a block lets its worker decode ahead. After the last of them the session leaves out a step or
two; if it ends at a stop string, so many tokens at most were computed in vain."""

CROWD = 8
"""Sessions on a worker from which plain ones are decoded ahead: fewer leave the orchestrator time for each
token, and their cycles have no trip less than those of a session that drafts."""

NOWHERE = -1


class AheadTokens:
    """What has arrived of the tokens that follow the last block.

    Attributes:
        last: The last message that was taken.
    """

    def __init__(self) -> None:
        self.last = target_pb.AheadTokens()
        self._epoch, self._position, self._end = 0, NOWHERE, NOWHERE
        self._messages: list[target_pb.AheadTokens] = []
        self._is_coming = False
        self._arrival: asyncio.Future[Any] | None = None

    def expect(self, epoch: int, position: int) -> None:
        """Accept tokens from a position on; from `NOWHERE` none."""
        self._epoch, self._position, self._end = epoch, position, position
        self._messages, self._is_coming = [], position != NOWHERE

    def put(self, message: target_pb.AheadTokens | None) -> None:
        """Keep tokens that follow those before; without an epoch or a message no more will come."""
        if message is not None and message.epoch:
            if (message.epoch, message.base_position) != (self._epoch, self._end):
                return  # of a block before
            self._messages.append(message)
            self._end += len(message.token_ids)
        self._is_coming &= message is not None and not message.is_last
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def follow(self, epoch: int, position: int) -> bool:
        """Whether tokens from this position on have arrived or will."""
        is_here = (epoch, position) == (self._epoch, self._position)
        return is_here and (self._is_coming or bool(self._messages))

    def arrival(self) -> asyncio.Future[Any] | None:
        """Return what is done once the next message is here; None if one is."""
        if self._messages or not self._is_coming:
            return None
        self._arrival = asyncio.get_running_loop().create_future()
        return self._arrival

    def take(self, vocab_size: int, *, has_logprobs: bool) -> Verdict | None:
        """Return the tokens that are here as one verdict, None without any; InternalError if malformed."""
        messages, self._messages = [one for one in self._messages if one.token_ids], []
        self._position = self._end
        if not messages:
            return None
        self.last = messages[-1]
        verdicts = [ahead_from_proto(one, vocab_size, has_logprobs=has_logprobs) for one in messages]
        first, *others = verdicts
        more = [(other.next_token_id, *other.further_token_ids) for other in others]
        return replace(
            first,
            further_token_ids=(*first.further_token_ids, *itertools.chain.from_iterable(more)),
            logprobs=tuple(itertools.chain.from_iterable(verdict.logprobs for verdict in verdicts)),
        )
