"""Decodes ahead the sessions without proposals whose blocks ask for that.

What is drawn plainly depends on the tokens before it only, so a session's next forward need not wait until
its tokens are stored and another block comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Generic

from gammaray.blocks import TokenLogprobs, Verdict
from services.scheduling.scheduler import BlockQueue, WorkT
from services.scheduling.sessions import SessionCopy
from services.scheduling.tasks import AheadTokens, VerifyTask

AHEAD_PERIOD_S = 0.02
"""Between two messages with tokens that are decoded ahead: a message costs more than a token."""

AHEAD_TIMEOUT_S = 60.0


@dataclass(slots=True, eq=False)
class _Unsent(Generic[WorkT]):
    """The tokens of a session that are not sent yet; its task is a copy, which the last ones answer."""

    work: WorkT
    sent_at: float = field(default_factory=time.monotonic)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def take(self, *, is_last: bool = False) -> AheadTokens:
        """Return the tokens, and begin to collect the next ones."""
        task = self.work.task
        first = task.base_position - len(self.token_ids)
        tokens = AheadTokens(task, first, self.token_ids, self.logprobs, is_last)
        self.token_ids, self.logprobs, self.sent_at = [], [], time.monotonic()
        return tokens


class DecodeAhead(Generic[WorkT]):
    """The sessions of a target worker that are decoded ahead.

    Args:
        queue: The scheduler's.
        answer: Ends the work on a block.
        begin: Begins the work on the block that asks for a session's next token.
    """

    def __init__(
        self,
        queue: BlockQueue[VerifyTask, WorkT],
        answer: Callable[[WorkT, object], None],
        begin: Callable[[VerifyTask, SessionCopy], WorkT],
    ) -> None:
        self._queue, self._answer, self._begin = queue, answer, begin
        self._unsent = dict[str, _Unsent[WorkT]]()
        self._answered = list[tuple[VerifyTask, SessionCopy]]()

    def goes_on(self, task: VerifyTask, session: SessionCopy) -> bool:
        """Return whether a session is decoded ahead from the next step on, its block being answered."""
        is_plain = not task.proposal and (task.head is None or task.head.depth == 0)
        has_scores = task.num_prompt_logprobs is not None
        # Masks of a grammar would come too late.
        is_free = not (has_scores or session.spec.params.grammar or _ends(session))
        if not (task.num_ahead > 0 and is_plain and is_free):
            return False
        self._answered.append((task, session))
        return True

    def clear(self) -> None:
        """Begin with none of the sessions that were answered in this step."""
        self._answered.clear()

    def end_overtaken(self) -> None:
        """End it for sessions that have another block."""
        for name in self._queue.waiting:
            unsent = self._unsent.get(name)
            if unsent is not None and self._queue.running.get(name) is unsent.work:
                self._answer(unsent.work, self.last(unsent.work))

    def last(self, work: WorkT) -> AheadTokens:
        """Return the answer that ends it for a session."""
        return self._unsent.pop(work.task.session_id).take(is_last=True)

    def step(self) -> None:
        """Send the tokens that have waited long enough, and begin with the sessions answered in this step."""
        running, now = self._queue.running, time.monotonic()
        self._unsent = {name: one for name, one in self._unsent.items() if running.get(name) is one.work}
        for unsent in self._unsent.values():
            if unsent.token_ids and now >= unsent.sent_at + AHEAD_PERIOD_S:
                self._queue.send(unsent.work, unsent.take())
        answered, self._answered = self._answered, []
        for task, session in answered:
            own = replace(task, base_position=len(session.tokens), context=(), spec=None, is_ahead=True)
            own.arrived, own.deadline = now, now + AHEAD_TIMEOUT_S
            work = running[session.session_id] = self._begin(own, session)
            self._unsent[session.session_id] = _Unsent(work)

    def take(self, work: WorkT, verdict: Verdict) -> bool:
        """Keep the token of a step, which is in the session; return whether it is the last."""
        task, session = work.task, work.session
        unsent = self._unsent[task.session_id]
        unsent.token_ids.append(verdict.next_token_id)
        unsent.logprobs += verdict.logprobs
        task.base_position += 1
        task.num_ahead -= 1
        return task.num_ahead == 0 or _ends(session)


def _ends(session: SessionCopy) -> bool:
    """Return whether the last token ends the completion."""
    return session.tokens[-1] in session.spec.eos_token_ids
