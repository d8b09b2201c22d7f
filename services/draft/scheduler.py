"""Drafts proposals for many sessions in lock-step, and prepares likely next proposals ahead of time.

Each forward feeds every drafting session the nodes that its proposal lacks: one token for a chain, a level
for a tree; a chain that is the only block takes several forwards in one call. When no block is left,
forwards go to `services.draft.lookahead`. An arriving block waits for at most one small forward: it stops a
call of several.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from ctypes import c_int32
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from gammaray.types import Proposal, VerificationMethod
from services.draft.lookahead import Lookahead
from services.engine.core.batch import SequenceInput
from services.engine.core.errors import CacheFullError
from services.engine.engine import Engine
from services.scheduling.grammars import Grammars
from services.scheduling.load import LoadCounters
from services.scheduling.planning import Limits, Running
from services.scheduling.scheduler import Scheduler
from services.scheduling.sessions import SessionCopy
from services.scheduling.tasks import ProposeTask, Reply, Timing
from services.speculation.calibration import Calibration
from services.speculation.predictions import DRAFT_TOP_K, WEIGHT_BITS
from services.speculation.proposals import ProposalBuilder
from services.speculation.session import Speculation
from services.speculation.tree import Node


@dataclass(slots=True, eq=False)
class _Drafting(Running[ProposeTask]):
    """A proposal being drafted.

    Args:
        speculation: The session's tree.
        reading: The builder that reads the proposal.
        nodes: The open nodes that the next forward feeds; none while committed tokens are not all fed, nor
            with a parallel draft model, whose masks are the `tail`.
        has_forwarded: Whether a forward returned logits.
        run: The tokens fed by the last call, from the open node on; empty if it was a single forward.
    """

    speculation: Speculation = field(kw_only=True)
    reading: ProposalBuilder = field(kw_only=True)
    nodes: list[Node] = field(kw_only=True)
    has_forwarded: bool = field(kw_only=True, default=False)
    run: list[int] = field(kw_only=True, default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the cache after the next forward."""
        if not self.nodes:
            return self.task.base_position + len(self.tail)
        return self.speculation.tree.chain_length + len(self.nodes)

    def feed(self, start: int, size: int, *, is_last: bool) -> SequenceInput:
        """Return the feed of missing committed tokens, or of the open nodes."""
        if self.nodes:
            return self.speculation.feed(self.nodes)
        return Running.feed(self, start, size, is_last=is_last)


class DraftScheduler(Scheduler[ProposeTask]):
    """Schedules drafting: sessions join the batch when a block arrives and leave with its last token.

    The cache keeps the nodes fed below the committed tokens. Of the next block, only tokens that are not
    found there are fed, and none if the whole next proposal was prepared.

    Args:
        engine: The draft model and its cache.
        limits: Bounds of one forward.
        draft_top_k: Largest support of a shipped distribution.
        weight_bits: Its weights' sum is 2^weight_bits.
        ahead_rows: Upper bound of tokens in one forward of draft-ahead; 0 switches it off.
        grammars: Compiles the sessions' grammars; None: sessions with one are refused.

    Attributes:
        lookahead: Draft-ahead, and its counters.
        speculations: The speculation tree of each session, by session id.
    """

    role: ClassVar[str] = "draft"

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        *,
        draft_top_k: int = DRAFT_TOP_K,
        weight_bits: int = WEIGHT_BITS,
        ahead_rows: int,
        grammars: Grammars | None = None,
    ) -> None:
        super().__init__(engine, limits, grammars=grammars)
        self._stop = c_int32()
        self.lookahead = Lookahead(engine, ahead_rows, self._stop) if ahead_rows > 0 else None
        if self.lookahead is not None:
            self.meter.watch_ahead(self.lookahead.stats)
        self._speculate = partial(
            Speculation,
            max_context=engine.max_context,
            top_k=draft_top_k,
            bits=weight_bits,
            calibration=Calibration(),
            mask_token=engine.mask_token,
            reduced=engine.keep_reduced(),
        )
        self.speculations: dict[str, Speculation] = {}

    def load(self) -> LoadCounters:
        """Return the load counters so far, including draft-ahead hits."""
        counters = super().load()
        if self.lookahead is None:
            return counters
        stats = self.lookahead.stats
        return replace(counters, lookups=stats.lookups, hits=stats.hits)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do, draft-ahead included."""
        return not self.is_idle or (self.lookahead is not None and self.lookahead.has_work)

    def submit(self, tasks: Iterable[ProposeTask]) -> None:
        """Queue blocks; those of one session are served one after another."""
        tasks = list(tasks)
        if not all(task.is_notice for task in tasks):
            self._stop.value = 0  # reset: draft-ahead does not run while blocks wait
        super().submit(tasks)

    def preempt(self, tasks: Iterable[ProposeTask]) -> None:
        """End the current forward soon if a caller waits for one of `tasks`.

        A draft-ahead forward regains its usual priority, and the current forward is the last of its call.
        """
        if not all(task.is_notice for task in tasks):
            self._stop.value = 1
        if self.lookahead is not None and not all(task.is_notice for task in tasks):
            self.lookahead.preempt()

    def step(self) -> list[tuple[ProposeTask, Reply]]:
        """Serve as many blocks as fit, or draft ahead when there are none; return the answers."""
        if self.lookahead is not None and self.is_idle:
            return [
                (prepared.task, Reply(0, prepared.task.session_id, prepared))
                for prepared in self.lookahead.step()
            ]
        for running in self._running.values():
            assert isinstance(running, _Drafting)
            if running.nodes and not running.speculation.is_held(self.engine):
                self._begin_anew(running)
        return super().step()

    def _reply(self, task: ProposeTask, outcome: object, timing: Timing | None = None) -> None:
        super()._reply(task, None if task.is_notice else outcome, timing)

    def _forget(self, session: SessionCopy) -> None:
        self.speculations.pop(session.session_id, None)
        if self.lookahead is not None:
            self.lookahead.drop(session.session_id)
        super()._forget(session)

    def _match_cache(self, session: SessionCopy) -> None:
        """Move the root of the session's tree to its last token; begin a new tree if it lacks that node."""
        if self.lookahead is not None:
            self.lookahead.drop(session.session_id)
        speculation = self.speculations.get(session.session_id)
        if speculation is None:
            speculation = self.speculations[session.session_id] = self._speculate(session)
        speculation.note_outcome()
        if not speculation.follow(self.engine):
            super()._match_cache(session)
            speculation.begin()

    def _start(self, task: ProposeTask, session: SessionCopy) -> Running[ProposeTask] | Proposal:
        speculation = self.speculations[task.session_id]
        shape = task.shape
        if shape.is_tree and session.spec.method is not VerificationMethod.COUPLED:
            shape = replace(shape, max_nodes=0)  # only coupled verification supports trees
        if speculation.is_parallel:
            shape = replace(shape, depth=min(shape.depth, self.limits.max_batch_tokens - 1))
        reading = speculation.read(speculation.tree.root, shape)
        if reading is None:
            return Proposal()
        if speculation.is_parallel and reading.root.prediction is not None and not reading.has_block:
            speculation.begin()  # a shorter block was prepared
            reading.root = speculation.tree.root
        drafting = _Drafting(
            task, session, [], num_logits=1, speculation=speculation, reading=reading, nodes=[]
        )
        return drafting if self._reads_on(drafting) else self._finish(drafting)

    def _advance(self, running: Running[ProposeTask], logits: Tensor) -> Proposal | None:
        assert isinstance(running, _Drafting)
        speculation = running.speculation
        nodes = running.nodes or [speculation.tree.root]
        if running.run:
            speculation.open_run(self.engine, nodes[0], running.run, logits)
        else:
            speculation.open(self.engine, nodes, logits)
        running.has_forwarded = True
        running.run = []
        return None if self._reads_on(running) else self._finish(running)

    def _step(self, batch: list[tuple[Running[ProposeTask], SequenceInput]]) -> list[Tensor]:
        """Run the forward, or several in one call for a chain that is the only block."""
        running, feed = batch[0]
        assert isinstance(running, _Drafting)
        speculation, count = running.speculation, running.reading.run_length
        nodes = running.nodes or [speculation.tree.root]
        is_alone = len(self._running) == 1 and not self._waiting
        is_one = len(feed.token_ids) == feed.num_logits == 1
        if is_alone and is_one and count > 1 and speculation.can_run(self.engine, nodes):
            with suppress(CacheFullError):  # there may still be room for one
                running.run, logits = speculation.run(self.engine, nodes[0], count, stop=self._stop)
                self.num_forwards = len(running.run)
                batch[0] = running, replace(feed, token_ids=running.run, num_logits=len(running.run))
                return [logits]
        return super()._step(batch)

    def _reads_on(self, drafting: _Drafting) -> bool:
        """Read as far as the tree has predictions; True when nodes must be fed to read further."""
        # A level that is wider than a forward is fed in several.
        open_nodes = drafting.reading.go_on()[: self.limits.max_batch_tokens]
        is_root = open_nodes == [drafting.speculation.tree.root]
        drafting.nodes = [] if is_root else open_nodes
        drafting.num_logits = max(1, len(drafting.nodes))
        if drafting.speculation.is_parallel and open_nodes:
            # One more predicts the token after the proposal, which draft-ahead may have to continue.
            depth = drafting.reading.shape.depth - (self.lookahead is None)
            drafting.tail = drafting.speculation.masks(drafting.reading.root, depth)
            drafting.num_logits = 1 + len(drafting.tail)
        return bool(open_nodes)

    def _finish(self, drafting: _Drafting) -> Proposal:
        speculation, proposal = drafting.speculation, drafting.reading.proposal()
        speculation.sent, speculation.ahead = drafting.reading, None
        if self.lookahead is not None:
            self.lookahead.note_answer(speculation, is_hit=not drafting.has_forwarded)
            self.lookahead.add(speculation, drafting.task)
        return proposal

    def _begin_anew(self, drafting: _Drafting) -> None:
        """Start over: the session's cache was evicted while its proposal was drafted."""
        speculation = drafting.speculation
        speculation.begin()
        reading = speculation.read(speculation.tree.root, drafting.reading.shape)
        assert reading is not None
        drafting.reading = reading
        self._reads_on(drafting)
