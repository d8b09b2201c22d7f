"""Drafts proposals for many sessions with vLLM.

A proposal is a request of its own: its prompt is the committed text, of which vLLM's prefix cache has all but
the last tokens, and each step draws a token for each request. It is aborted when the proposal is complete, no
longer wanted, or replaced by a newer block of its session.

Draft-ahead keeps the request of an answered proposal while its session's text is likely to go on as drafted:
with coupled and greedy verification the next text is expected to be the whole proposal and the token that the
draft itself chooses after it. While no block waits, the request drafts that token and the next proposal. A
session whose text is a prefix of what its request has goes on there, and is answered at once if the proposal
is complete; any other text drops the request. Neither the tokens nor their number depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from gammaray.errors import CancelledError, GammarayError
from gammaray.types import Proposal, SparseDistribution, VerificationMethod
from services.engine.core.errors import EngineLostError
from services.scheduling.grammars import Grammars
from services.scheduling.masks import compute_masks
from services.scheduling.scheduler import BlockQueue
from services.scheduling.sessions import SessionCopy
from services.scheduling.tasks import ProposeTask, Release, Reply, SessionSpec
from services.vllm.engine import StepResult, VllmEngine
from services.vllm.messages import DraftBlock, Drafted, Masks
from services.vllm.request_steps import MAX_STEP_S, RequestSteps, RequestWork, salt_of


@dataclass(slots=True, eq=False)
class _Drafting(RequestWork[ProposeTask]):
    """A proposal that vLLM drafts; tokens after an end of sequence only keep the duration constant."""

    depth: int  # tokens to draft
    token_ids: list[int] = field(default_factory=list)
    distributions: list[SparseDistribution | None] = field(default_factory=list)  # what each was drawn from

    @property
    def is_complete(self) -> bool:
        """Whether no further token is drafted.

        A chain with distributions takes the same number of forwards wherever it ends, see
        `services.speculation.proposals`.
        """
        if len(self.token_ids) >= self.depth:
            return True
        is_ended = bool(self.token_ids) and self.token_ids[-1] in self.session.spec.eos_token_ids
        return is_ended and self.distributions[-1] is None

    def append(self, drafted: Drafted) -> None:
        self.token_ids.append(drafted.token_id)
        self.distributions.append(drafted.distribution)

    def proposal(self) -> Proposal:
        """Return the chain up to its first end of sequence, which is a part of it."""
        eos = self.session.spec.eos_token_ids
        ends = (at for at, token_id in enumerate(self.token_ids, 1) if token_id in eos)
        count = next(ends, len(self.token_ids))
        drafts = tuple(draft for draft in self.distributions[:count] if draft is not None)
        return Proposal(tuple(self.token_ids[:count]), None, drafts if len(drafts) == count > 0 else None)


@dataclass(slots=True)
class _Ahead:
    request_id: str  # its id in vLLM
    spec: SessionSpec  # the session's parameters
    limit: int  # number of tokens, prompt included, at which it has drafted enough
    is_paused: bool = False  # whether it waits while blocks are served


class VllmDraftScheduler:
    """Drafts proposals, which are chains, with vLLM.

    Args:
        ahead_rows: Requests that draft ahead in one step, at most; 0 switches it off.
    """

    role: ClassVar[str] = "draft"
    step_timeout_s: float | None = MAX_STEP_S

    def __init__(self, engine: VllmEngine, *, ahead_rows: int, grammars: Grammars | None = None) -> None:
        self._ahead_rows = ahead_rows
        self._ahead: dict[str, _Ahead] = {}  # by session, oldest first
        self._answered: set[str] = set()  # sessions with a proposal
        self.engine = engine
        # The sampler draws the noise, on the device.
        self.queue = BlockQueue[ProposeTask, _Drafting](
            self.role, engine.vocab_size, "cpu", grammars, engine.stats, self._forget, self._withdraw
        )
        self._steps = RequestSteps(engine, self.queue, self.fail_all)
        self._stats = self.queue.meter.ahead

    @property
    def has_work(self) -> bool:
        return not self.queue.is_idle or bool(self._going_ahead())

    def submit(self, tasks: Iterable[ProposeTask]) -> None:
        """Queue blocks; the newest of a session cancels those before it."""
        tasks = list(tasks)
        for task in tasks:
            running = self.queue.running.get(task.session_id)
            if running is not None and task.epoch >= running.task.epoch:
                self.queue.drop(running, _replaced(running.task))
        self.queue.submit(tasks)

    def step(self) -> list[tuple[ProposeTask, Reply]]:
        self.queue.drop_dead()
        self.queue.admit(self._start)
        if self.queue.running:
            self._make_room()
            result = self._steps.run(self._begin_masks)
            if result is not None:
                self._evict_preempted(result)
                self._take(result)
                if not result.num_tokens:
                    self._unblock(is_preempted=bool(result.preempted))
        elif not self.queue.replies:
            self._draft_ahead()
        return self.queue.take_replies()

    def release(self, endings: Iterable[Release]) -> None:
        self.queue.release(endings, self._steps.forget_prefix)

    def fail_all(self, error: GammarayError) -> None:
        self.queue.fail_all(error)
        for session_id in list(self._ahead):
            self._drop_ahead(session_id)
        if not isinstance(error, EngineLostError):
            self.engine.recover()

    def check(self) -> None:
        self.engine.check()

    def close(self) -> None:
        self.engine.shutdown()

    def _start(self, task: ProposeTask, session: SessionCopy) -> _Drafting | Proposal | CancelledError:
        if any(task.epoch <= newer.epoch for newer in self.queue.waiting[task.session_id]):
            return _replaced(task)
        depth = min(task.shape.depth, self.engine.max_context - task.base_position)
        going_on = self._take_ahead(task, session)
        if depth <= 0:
            if going_on is not None:
                self.engine.close(going_on)
            return Proposal()
        ready = (self.engine.tokens(going_on) or ())[len(session.tokens) :] if going_on else ()
        if task.shape.drafted_depth and session.spec.method is VerificationMethod.COUPLED:
            depth = min(depth, max(task.shape.drafted_depth, len(ready)))
        drafting = _Drafting(task, session, going_on or "", depth)
        if going_on is None:
            spec, salt = session.spec, salt_of(session)
            drafting.request_id = self.engine.open(session.session_id, session.tokens, spec, salt)
            self.engine.post(drafting.request_id, DraftBlock(task.base_position))
        else:
            for token_id in ready:
                if not drafting.is_complete:
                    drafting.append(Drafted(token_id))
            if drafting.is_complete:
                return self._finish(drafting)
        self._steps.works[drafting.request_id] = drafting
        return drafting

    def _withdraw(self, work: _Drafting) -> None:
        del self._steps.works[work.request_id]
        self.engine.close(work.request_id)

    def _forget(self, session: SessionCopy) -> None:
        self._answered.discard(session.session_id)
        self._drop_ahead(session.session_id)
        self._steps.forget(session)

    def _evict_preempted(self, result: StepResult) -> None:
        """Give up requests that draft ahead and lost their cache; vLLM computes those of blocks again."""
        for session_id, ahead in list(self._ahead.items()):
            if ahead.request_id in result.preempted:
                self._evict(session_id)

    def _take(self, result: StepResult) -> None:
        for request_id, outcome in result.verdicts.items():
            work = self._steps.works.get(request_id)
            if work is None:
                continue
            if isinstance(outcome, Drafted):
                work.append(outcome)
                if work.is_complete:
                    self._steps.answer(work, self._finish(work))
            else:
                self.engine.close(request_id)
                self._steps.answer(work, outcome)

    def _finish(self, work: _Drafting) -> Proposal:
        """Return a complete proposal; its request drafts ahead, or ends."""
        task, session, proposal = work.task, work.session, work.proposal()
        self._answered.add(session.session_id)
        tokens = self.engine.tokens(work.request_id)
        limit = min(task.base_position + work.depth + 1 + task.shape.depth, self.engine.max_context)
        if tokens is not None and self._may_go_ahead(session.spec, tokens, limit):
            self._ahead[session.session_id] = _Ahead(work.request_id, session.spec, limit)
        else:
            self.engine.close(work.request_id)
        return proposal

    def _unblock(self, *, is_preempted: bool) -> None:
        """Free memory after a step in which nothing fitted: draft-ahead's, else fail the newest block."""
        if self._ahead:
            for session_id in list(self._ahead):
                self._evict(session_id)
        elif not is_preempted:  # else the next step has the memory that vLLM has just taken from a block
            work = next(reversed(self.queue.running.values()))
            self.engine.close(work.request_id)
            self._steps.answer(work, self._steps.too_small())

    def _begin_masks(self, posted: dict[str, DraftBlock]) -> Callable[[], Masks] | None:
        works = [self._steps.works[request_id] for request_id in posted if request_id in self._steps.works]
        masked = [work for work in works if work.session.spec.params.grammar]
        return (lambda: Masks({work.request_id: _masks(work) for work in masked})) if masked else None

    def _may_go_ahead(self, spec: SessionSpec, tokens: Sequence[int], limit: int) -> bool:
        """Whether a request may draft ahead: only where the draft's choice predicts the target's token."""
        is_coupled = spec.method is VerificationMethod.COUPLED or spec.params.temperature == 0
        return (
            self._ahead_rows > 0
            and is_coupled
            and not spec.params.grammar
            and len(tokens) < limit
            and tokens[-1] not in spec.eos_token_ids
        )

    def _going_ahead(self) -> list[_Ahead]:
        """Return the requests that have not drafted enough, as many as may share a step."""
        going: list[_Ahead] = []
        for ahead in self._ahead.values():
            tokens = self.engine.tokens(ahead.request_id)
            if tokens is not None and self._may_go_ahead(ahead.spec, tokens, ahead.limit):
                going.append(ahead)
        return going[: self._ahead_rows]

    def _draft_ahead(self) -> None:
        going = self._going_ahead()
        self._pause_others(going)
        if not going:
            return
        result = self._steps.try_step(self._begin_masks)
        if result is None:
            return
        self._evict_preempted(result)
        self._stats.forwards += 1
        for session_id, ahead in list(self._ahead.items()):
            if isinstance(result.verdicts.get(ahead.request_id), GammarayError):
                self._drop_ahead(session_id)
        if not result.num_tokens and not result.preempted:
            for session_id in list(self._ahead):  # nothing fitted
                self._evict(session_id)

    def _pause_others(self, going: Sequence[_Ahead] = ()) -> None:
        for ahead in self._ahead.values():
            is_paused = ahead not in going
            if is_paused != ahead.is_paused and self.engine.tokens(ahead.request_id) is not None:
                self.engine.pause(ahead.request_id, is_paused=is_paused)
                ahead.is_paused = is_paused

    def _make_room(self) -> None:
        """Pause draft-ahead while blocks are served; close the oldest of it where slots or memory run out."""
        self._pause_others()
        engine, lacking = self.engine, 0
        for request_id, work in self._steps.works.items():
            needed = engine.needed_blocks(work.task.base_position + work.depth)
            lacking += max(0, needed - engine.num_blocks(request_id))
        while self._ahead and (engine.num_free_requests < 0 or engine.num_free_blocks < lacking):
            self._evict(next(iter(self._ahead)))

    def _take_ahead(self, task: ProposeTask, session: SessionCopy) -> str | None:
        """Return the request that has drafted from a session's text on; end one that has another text."""
        ahead = self._ahead.pop(session.session_id, None)
        num_ready = -1
        if ahead is not None:
            num_ready = self._steps.num_ahead(ahead.request_id, ahead.spec, session)
            if num_ready < 0:
                self.engine.close(ahead.request_id)
            else:
                self.engine.pause(ahead.request_id, is_paused=False)
        if self._ahead_rows and session.session_id in self._answered:
            self._stats.lookups += 1
            self._stats.hits += num_ready >= task.shape.depth
        return None if ahead is None or num_ready < 0 else ahead.request_id

    def _drop_ahead(self, session_id: str) -> None:
        ahead = self._ahead.pop(session_id, None)
        if ahead is not None:
            self.engine.close(ahead.request_id)

    def _evict(self, session_id: str) -> None:
        self._drop_ahead(session_id)
        self.engine.num_evictions += 1


def _replaced(task: ProposeTask) -> CancelledError:
    return CancelledError(f"a newer block of session {task.session_id} has arrived")


def _masks(work: _Drafting) -> Sequence[bytes | None] | GammarayError:
    masks: list[bytes | None] = []
    error = compute_masks(work, lambda: masks.extend(work.session.grammar_masks([work.token_ids])))
    return error or masks
