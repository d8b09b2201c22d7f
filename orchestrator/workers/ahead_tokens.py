"""Tokens that a target worker decodes ahead, for the next cycles of one session."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import replace
from typing import Any

from gammaray.blocks import Verdict
from gammaray.v1 import target_service_pb2 as target_pb
from gammaray.v1 import types_pb2 as pb
from gammaray.wire.blocks import ahead_from_proto

CROWD = 8
"""Sessions on a worker from which those without a proposal are decoded ahead. With fewer the orchestrator
keeps up, and a plain cycle takes the same trip to the worker as one with a proposal."""

NOTHING = target_pb.VerifyBlock()


class AheadCache:
    """What has arrived of the tokens that follow the last block.

    Attributes:
        last: The last message that was taken.
        error: Why no more will come; None for no error.
    """

    def __init__(self) -> None:
        self.last = target_pb.AheadTokens()
        self.error: pb.BlockError | None = None
        self._block, self._position, self._end, self._limit = NOTHING, 0, 0, 0
        self._messages: list[target_pb.AheadTokens] = []
        self._taken_s = self._arrived_s = 0.0  # when the last message that was taken came, and the last one
        self._is_coming = False
        self._arrival: asyncio.Future[Any] | None = None

    def expect(self, block: target_pb.VerifyBlock, position: int) -> None:
        """Accept the tokens that a block asks for, from a position on; after `NOTHING` none."""
        self._block, self._position, self._end = block, position, position
        self._limit = position + block.num_ahead
        self._messages, self._is_coming, self.error = [], block is not NOTHING, None
        self._taken_s = 0.0

    def put(self, message: target_pb.AheadTokens | None) -> None:
        """Keep the tokens of a message; after None or what does not follow those before no more will come."""
        if message is not None and message.request_id != self._block.request_id:
            return  # of another block
        if message is not None and self._is_coming:
            end = message.base_position + len(message.token_ids)
            is_right = message.base_position == self._end and end <= self._limit
            self._is_coming = is_right and not message.is_last
            if message.HasField("error"):
                self.error = message.error
            elif is_right and message.token_ids:
                self._messages.append(message)
                self._end, self._arrived_s = end, time.perf_counter()
        self._is_coming &= message is not None
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def follow(self, position: int) -> bool:
        """Whether tokens from this position on have arrived or will, or an error instead."""
        is_open = self._is_coming or self._messages or self.error is not None
        return position == self._position and self._block is not NOTHING and bool(is_open)

    def arrival(self) -> asyncio.Future[Any] | None:
        """Return what is done once the next message is here; None if one is, or none will come."""
        if self._messages or not self._is_coming:
            return None
        self._arrival = asyncio.get_running_loop().create_future()
        return self._arrival

    def take(self, vocab_size: int, *, has_logprobs: bool) -> Verdict | None:
        """Return the tokens that are here as one verdict, None without any; InternalError if malformed."""
        messages, self._messages = self._messages, []
        num_tokens, self._position = self._end - self._position, self._end
        if not messages:
            return None
        self.last = messages[-1]
        seconds = self._arrived_s - self._taken_s if self._taken_s else 0.0
        self._taken_s = self._arrived_s
        first, *others = [ahead_from_proto(one, vocab_size, has_logprobs=has_logprobs) for one in messages]
        more = [(other.next_token_id, *other.further_token_ids) for other in others]
        return replace(
            first,
            ahead_s=seconds / num_tokens,
            further_token_ids=(*first.further_token_ids, *itertools.chain.from_iterable(more)),
            logprobs=tuple(itertools.chain(first.logprobs, *(other.logprobs for other in others))),
        )
