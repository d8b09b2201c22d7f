"""Drafts proposals for many sessions in lock-step, and prepares likely next proposals ahead of time.

Each forward feeds every drafting session the nodes that its proposal lacks: one token for a chain, a level
for a tree; a chain that is the only block takes several forwards in one call. When no block is left,
forwards go to `services.own.lookahead`. An arriving block waits for at most one small forward: it
stops a call of several.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from gammaray.errors import GammarayError
from gammaray.types import Proposal
from services.engine.core.batch import SequenceInput
from services.engine.core.errors import CacheFullError
from services.engine.engine import Engine
from services.own.lookahead import Lookahead
from services.scheduling.batcher import Batcher, Feeds
from services.scheduling.grammars import Grammars
from services.scheduling.planning import Limits, Running
from services.scheduling.scheduler import BlockQueue
from services.scheduling.sessions import SessionCopy
from services.scheduling.tasks import ProposeTask, Release, Reply
from services.speculation.drafting import PendingProposal
from services.speculation.outcomes import MAX_LEVELS
from services.speculation.predictor import DraftModel
from services.speculation.session import Speculation
from services.vocabulary.translation import Translation


@dataclass(slots=True, eq=False)
class _DraftBlock(Running[ProposeTask]):
    pending: PendingProposal = field(kw_only=True)

    @property
    def num_tokens(self) -> int:
        return self.pending.num_tokens

    def feed(self, start: int, size: int, *, is_last: bool) -> SequenceInput:
        return self.pending.feed(start, size)

    def advance(self) -> bool:
        is_open = self.pending.advance()
        self.num_logits = self.pending.num_logits
        return is_open


class DraftScheduler:
    """Schedules drafting: sessions join the batch when a block arrives and leave with its last token.

    The cache keeps the nodes fed below the committed tokens. Of the next block, only tokens that are not
    found there are fed, and none if the whole next proposal was prepared.

    A draft model with another vocabulary than the target's has its own tokens in the cache, which are those
    of the committed text. After a verification the text is tokenised again from its last segment on, and the
    cache is cut where the tokens differ. Its proposals are chains; nothing is drafted ahead.

    Args:
        ahead_rows: Upper bound of tokens in one forward of draft-ahead; 0 switches it off.
        rows_cost, ahead_levels: As `rows_cost` and `max_levels` of `Lookahead`.
        translation: The vocabularies, if the target's is another one.

    Attributes:
        lookahead: Draft-ahead.
        speculations: The speculation tree of each session, by session id.
    """

    role: ClassVar[str] = "draft"
    step_timeout_s: float | None = None

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        *,
        ahead_rows: int,
        rows_cost: float = math.inf,
        ahead_levels: int = MAX_LEVELS,
        translation: Translation | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.engine, self._limits = engine, limits
        vocab_size = engine.vocab_size if translation is None else translation.target_size
        self.queue = BlockQueue[ProposeTask, _DraftBlock](
            self.role, vocab_size, str(engine.device), grammars, engine.stats, self._forget
        )
        self.batcher = Batcher(engine, limits, self.queue)
        max_rows = ahead_rows if translation is None else 0
        self.lookahead = Lookahead(engine, max_rows, rows_cost, ahead_levels, self.queue)
        self.queue.on_stop = self.lookahead.preempt
        self._model = DraftModel(engine, translation=translation)
        self.speculations: dict[str, Speculation] = {}

    @property
    def has_work(self) -> bool:
        return not self.queue.is_idle or self.lookahead.has_work

    def submit(self, tasks: Iterable[ProposeTask]) -> None:
        self.queue.submit(tasks)

    def step(self) -> list[tuple[ProposeTask, Reply]]:
        if self.queue.is_idle:
            prepared = self.lookahead.step()
            return [(ahead.task, Reply(0, ahead.task.session_id, ahead)) for ahead in prepared]
        self._restart_evicted()
        self.queue.drop_dead()
        self.batcher.admit(self._start)
        self.batcher.run(self._forward, self._advance)
        return self.queue.take_replies()

    def release(self, endings: Iterable[Release]) -> None:
        self.queue.release(endings, self.engine.forget)

    def fail_all(self, error: GammarayError) -> None:
        self.queue.fail_all(error)
        self.engine.drop_retained()

    def check(self) -> None:
        """An engine of this process is lost only by an error of its own step."""

    def close(self) -> None:
        """Nothing was started."""

    def _restart_evicted(self) -> None:
        for block in self.queue.running.values():
            if not (block.pending.is_at_root or block.pending.speculation.is_held):
                block.pending.restart()
                block.advance()

    def _forget(self, session: SessionCopy) -> None:
        self.speculations.pop(session.session_id, None)
        self.lookahead.drop(session.session_id)
        self.batcher.forget(session)

    def _follow(self, session: SessionCopy) -> Speculation:
        """Move the root of the session's tree to its last token; begin a new tree if it lacks that node."""
        self.lookahead.drop(session.session_id)
        speculation = self.speculations.get(session.session_id)
        if speculation is None:
            speculation = self.speculations[session.session_id] = Speculation(self._model, session)
        speculation.note_outcome()
        if not speculation.follow():
            num_kept = speculation.translate()
            self.batcher.match(session, speculation.committed, num_kept)
            speculation.begin()
        return speculation

    def _start(self, task: ProposeTask, session: SessionCopy) -> _DraftBlock | Proposal:
        speculation, shape = self._follow(session), task.shape
        if speculation.is_parallel:
            shape = shape.clipped(self._limits.max_batch_tokens - 1)
        reading = speculation.read(speculation.tree.root, shape)
        if reading is None:
            return Proposal()
        num_beyond = self.lookahead.num_beyond  # draft-ahead may have to continue after the proposal
        pending = PendingProposal(speculation, reading, self._limits.max_batch_tokens, num_beyond)
        block = _DraftBlock(task, session, [], num_logits=1, pending=pending)
        return block if block.advance() else self._finish(block)

    def _advance(self, running: _DraftBlock, logits: Tensor) -> Proposal | None:
        running.pending.take(logits)
        return None if running.advance() else self._finish(running)

    def _forward(self, batch: Feeds[_DraftBlock]) -> list[Tensor]:
        """Run the forward, or several in one call for a chain that is the only block."""
        running, feed = batch[0]
        pending = running.pending
        is_alone = len(self.queue.running) == 1 and not self.queue.waiting
        if is_alone and feed.num_logits and pending.can_run:
            with suppress(CacheFullError):  # there may still be room for one
                logits = pending.run(feed, self.queue.stop)
                self.batcher.num_forwards = len(pending.ran)
                token_ids = [*feed.token_ids[:-1], *pending.ran]
                batch[0] = running, replace(feed, token_ids=token_ids, num_logits=len(pending.ran))
                return [logits]
        return self.engine.step([feed for _, feed in batch])

    def _finish(self, block: _DraftBlock) -> Proposal:
        pending = block.pending
        self.lookahead.add(pending.speculation, block.task, is_hit=not pending.is_fed)
        return pending.reading.proposal()
