"""A worker whose engine waits for the test, so that running work does not finish early on any machine."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from tests.support.workers.workers_helpers import ANSWER_TIMEOUT_S, Link, propose_block, verify_block


class HeldEngine:
    """Blocks after a forward until it is released; notes the sessions of each forward."""

    def __init__(self, worker: Any) -> None:
        self._engine = worker.engine.scheduler.engine
        self._step, self._chain = self._engine.step, self._engine.chain
        self._is_held, self._may_go_on = threading.Event(), threading.Event()
        self.forwards: list[list[str]] = []

    async def __aenter__(self) -> HeldEngine:
        self._engine.step, self._engine.chain = self._held_step, self._held_chain
        return self

    async def __aexit__(self, *_: object) -> None:
        self.let_go()
        self._engine.step, self._engine.chain = self._step, self._chain

    def _held_step(self, feeds: Any, *arguments: Any, **options: Any) -> Any:
        self.forwards.append([feed.session_id for feed in feeds])
        logits = self._step(feeds, *arguments, **options)
        self._hold()
        return logits

    def _held_chain(self, feed: Any, *arguments: Any, **options: Any) -> Any:
        """Several forwards in one call: the engine blocks after all of them."""
        token_ids, logits = self._chain(feed, *arguments, **options)
        self.forwards += [[feed.session_id] for _ in logits]
        self._hold()
        return token_ids, logits

    def _hold(self) -> None:
        self._is_held.set()
        self._may_go_on.wait(ANSWER_TIMEOUT_S)

    async def waits(self) -> None:
        """Return once the engine blocks."""
        assert await asyncio.to_thread(self._is_held.wait, ANSWER_TIMEOUT_S)

    def let_go(self) -> None:
        """Let the engine run without further holds."""
        self._may_go_on.set()


async def all_read(link: Link) -> None:
    """Return once the worker has read earlier blocks: it rejects a bad block without its engine."""
    block = verify_block([]) if link.is_target else propose_block([], 1)
    assert (await link.ask(block)).WhichOneof("outcome") == "error"
