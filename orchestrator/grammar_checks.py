"""Checks and compiles the grammars of requests, in turn between tenants, and remembers results of checks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakValueDictionary

from gammaray.aio import end_tasks
from gammaray.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError
from gammaray.grammar.check_pool import CheckPool, GrammarCheck
from gammaray.grammar.matcher import GrammarState, grammar_identity
from orchestrator.access.admission import Admission
from orchestrator.access.caller import Caller
from orchestrator.text.cpu_threads import NUM_COMPILER_THREADS, in_compiler_thread, in_thread
from orchestrator.text.tokenizer import Tokenizer

MAX_REMEMBERED = 4096
"""Grammars whose result is remembered, least recently used first out."""

MAX_RUNNING = NUM_COMPILER_THREADS
"""Checks and compilations at once; a named tenant has at most one, so that others do not wait for it."""

MAX_FOLLOWED_S = 0.05
"""CPU time of the check of a grammar by which an orchestrator drafts. A step by the grammar may take as long,
on the event loop; ordinary grammars take less than 10 ms."""

MAX_WAITING = 256
MAX_WAIT_S = 30.0
"""Bounds of the queue."""


class GrammarChecks:
    """Checks and compiles grammars for one tokenizer; checks each at most once at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._results: OrderedDict[bytes, InvalidArgumentError | float] = OrderedDict()
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._places = Admission(MAX_RUNNING, MAX_WAITING, MAX_WAIT_S, tenant_capacity=1)
        self._pool: asyncio.Task[CheckPool] | None = None

    def is_remembered(self, grammar: str) -> bool:
        """Return whether the result of `check` is known, so that it takes no time."""
        return _digest(grammar) in self._results

    async def check(self, grammar: str, caller: Caller) -> None:
        """Check a grammar; cancellation frees the place, and ends the check.

        InvalidArgumentError if it is wrong or too complex, or llguidance cannot use the model's tokenizer;
        ResourceExhaustedError if too many checks wait, or it took too long on a busy machine;
        DeadlineExceededError if the caller's deadline came first; UnavailableError if its process was ended
        from outside.
        """
        work = asyncio.create_task(self._check_once(grammar, caller))
        left_s = caller.deadline - time.monotonic()
        try:
            await asyncio.wait({work}, timeout=None if math.isinf(left_s) else max(0.0, left_s))
        finally:
            await end_tasks(work)
        if work.cancelled():
            raise DeadlineExceededError("the deadline passed while the grammar was checked")
        work.result()

    async def begin(self, grammar: str, caller: Caller, token_ids: Sequence[int] = ()) -> GrammarState | None:
        """Compile a checked grammar, and return its state after the tokens of a resumed session.

        None if its check took more than `MAX_FOLLOWED_S`: then only target and draft workers follow it.
        Errors are those of `check`, and FailedPreconditionError if the tokens do not follow it: another
        version of llguidance allowed them.
        """
        found = self._results.get(_digest(grammar))
        is_followed = not isinstance(found, float) or found <= MAX_FOLLOWED_S
        if not is_followed and not token_ids:
            return None
        async with self._places.place(caller):
            work = asyncio.ensure_future(in_compiler_thread(self._follow, grammar, token_ids))
            try:
                state = await asyncio.shield(work)
            finally:
                if not work.done():  # a thread cannot be cancelled, and holds the place until it ends
                    await asyncio.wait({work})
        return state if is_followed else None

    def _follow(self, grammar: str, token_ids: Sequence[int]) -> GrammarState:
        state = self._tokenizer.begin_grammar(grammar)
        try:
            state.extend(token_ids)
        except InvalidArgumentError as error:
            raise FailedPreconditionError(
                f"grammar: the tokens of the session do not follow it with {grammar_identity()}: "
                f"got {error.got}"
            ) from error
        return state

    async def close(self) -> None:
        if self._pool is not None:
            with contextlib.suppress(Exception):
                (await self._pool).close()

    async def _check_once(self, grammar: str, caller: Caller) -> None:
        key = _digest(grammar)
        # Another request of this grammar, such as another choice of this one, may be checking it.
        turn = self._turns.setdefault(key, asyncio.Lock())
        async with turn:
            if key not in self._results:
                self._remember(key, await self._run(grammar, caller))
        self._results.move_to_end(key)
        found = self._results[key]
        if isinstance(found, InvalidArgumentError):
            raise InvalidArgumentError(found.field, found.got, found.allowed)

    def _remember(self, key: bytes, result: InvalidArgumentError | float) -> None:
        self._results[key] = result
        if len(self._results) > MAX_REMEMBERED:
            self._results.popitem(last=False)

    async def _run(self, grammar: str, caller: Caller) -> InvalidArgumentError | float:
        async with self._places.place(caller):
            pool = await self._get_pool()
            check = GrammarCheck(grammar)
            try:
                return await asyncio.wrap_future(pool.submit(check))
            except InvalidArgumentError as error:
                return error
            finally:
                check.cancel()

    async def _get_pool(self) -> CheckPool:
        failed = self._pool is not None and self._pool.done() and self._pool.exception() is not None
        if self._pool is None or failed:
            make = in_thread(self._tokenizer.check_pool, MAX_RUNNING)
            self._pool = asyncio.create_task(make, name="tokenizer of the grammar checks")
        return await asyncio.shield(self._pool)


def _digest(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()
