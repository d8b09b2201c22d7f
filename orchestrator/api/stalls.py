"""Ends generations whose client has stopped reading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

from gammaray.errors import UnavailableError

READ_TIMEOUT_S = 30.0
"""Time for a client to take a piece of a stream; sending blocks while the buffers up to it are full."""

T = TypeVar("T")


async def while_read(pieces: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yield pieces; close their generator if one is not taken within `READ_TIMEOUT_S`.

    This generator is suspended then, as its last piece is still being sent, but what the other one holds is
    free: the request's place and its caches. A stored session can be resumed after its last token. A client
    that reads on gets UnavailableError.
    """
    loop = asyncio.get_running_loop()
    since: float | None = None  # when the piece was yielded that is not taken yet
    closing: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal timer, closing
        left_s = READ_TIMEOUT_S if since is None else since + READ_TIMEOUT_S - loop.time()
        if left_s > 0:
            timer = loop.call_later(left_s, look)
        else:
            closing = loop.create_task(pieces.aclose(), name="end of a stream that is not read")

    timer = loop.call_later(READ_TIMEOUT_S, look)
    try:
        async for piece in pieces:
            since = loop.time()
            yield piece
            since = None
            if closing is not None:
                raise UnavailableError(
                    f"the stream was not read for {READ_TIMEOUT_S:g} s, and its generation ended; a stored "
                    "session can be resumed"
                )
    finally:
        timer.cancel()
        await (pieces.aclose() if closing is None else closing)
