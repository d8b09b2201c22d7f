"""Serves the blocks of a target worker with vLLM.

A session is one request of vLLM, paused between its blocks. Where a request is missing or has other tokens, a
new one reads the committed tokens, with what the prefix cache has of them. A request that is read anew for a
block with a proposal takes a step more: vLLM verifies no draft tokens in the step that ends a prompt, so that
the prompt is all but the last committed token, and that step gives the last one, which is known.

A block whose masks are late leaves its step without a verdict (`services.scheduling.masks`). Its request, to
which vLLM has appended a token, is closed, and the block runs again when its masks are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

from gammaray.blocks import Verdict
from gammaray.errors import GammarayError, InvalidArgumentError
from gammaray.types import PromptLogprobs, Proposal
from services.engine.core.errors import EngineLostError
from services.engine.sampling.edits import row_paths
from services.scheduling.decode_ahead import DecodeAhead
from services.scheduling.grammars import Grammars
from services.scheduling.masks import MaskThreads, wait_for_any, wait_for_masks
from services.scheduling.planning import Limits
from services.scheduling.scheduler import BlockQueue
from services.scheduling.sessions import SessionCopy
from services.scheduling.tasks import Release, Reply, SessionSpec, VerifyTask
from services.speculation.fixed_head import FixedHead
from services.vllm.engine import StepResult, VllmEngine
from services.vllm.messages import Drafted, Masks, PostedBlock, first_tokens
from services.vllm.request_steps import MAX_STEP_S, RequestSteps, RequestWork, salt_of


class _Request(NamedTuple):
    request_id: str  # its id in vLLM
    spec: SessionSpec  # the session's parameters, which the sampler got with the request
    depth: int = 0  # tokens that vLLM's drafter proposes after its step
    drafts: Sequence[int] = ()  # what it proposed after the last one
    version: int = 0  # number of the head's version that did


@dataclass(slots=True, eq=False)
class _Verifying(RequestWork[VerifyTask]):
    depth: int = 0  # tokens that vLLM's drafter proposes after its step
    follows: PostedBlock | None = None  # posted once the request has read the prompt; None: posted already
    num_needed: int = 0  # KV blocks of the request when the block has been verified
    masks: Sequence[bytes | None] = ()  # those of its rows, once they are there

    @property
    def num_rows(self) -> int:
        return 1 if self.follows is not None else 1 + len(self.task.proposal)

    @property
    def block(self) -> PostedBlock:
        task = self.task
        return PostedBlock(task.proposal, task.base_position, task.num_top_logprobs, self.depth)


class VllmScheduler:
    """Verifies blocks with vLLM; `head` are the versions of the engine's head."""

    role: ClassVar[str] = "target"
    step_timeout_s: float | None = MAX_STEP_S

    def __init__(
        self,
        engine: VllmEngine,
        limits: Limits,
        grammars: Grammars | None = None,
        head: FixedHead | None = None,
    ) -> None:
        self.requests: dict[str, _Request] = {}  # by session, least recently used first
        self.engine, self._limits = engine, limits
        # The sampler draws the noise, on the device.
        self.queue = BlockQueue[VerifyTask, _Verifying](
            self.role, engine.vocab_size, "cpu", grammars, engine.stats, self._forget, self._withdraw
        )
        self._steps = RequestSteps(engine, self.queue, self.fail_all)
        self._head = head or FixedHead()
        self.queue.meter.first_tokens = self._head.first_tokens
        self._masks = MaskThreads()
        self._decoding = DecodeAhead(self.queue, self._steps.answer, self._begin_ahead)

    @property
    def has_work(self) -> bool:
        return not self.queue.is_idle

    def submit(self, tasks: Iterable[VerifyTask]) -> None:
        self.queue.submit(tasks)

    def step(self) -> list[tuple[VerifyTask, Reply]]:
        queue = self.queue
        queue.drop_dead()
        self._decoding.end_overtaken()
        queue.admit(self._start, self._check_task)
        for work in queue.running.values():  # no step waited for its masks
            if not work.request_id and not work.session.is_masking:
                self._post(work)
        if self._steps.works:
            self._make_room()
            self._head.take_turns(time.monotonic())
            result = self._steps.run(self._begin_masks)
            if result is not None:
                self._take(result)
                self._reopen(result.preempted)
                if not result.num_tokens and not result.preempted:
                    self._unblock()
        elif not queue.replies:
            wait_for_any(queue)
        self._decoding.step()
        return queue.take_replies()

    def release(self, endings: Iterable[Release]) -> None:
        self.queue.release(endings, self._forget_prefix)

    def fail_all(self, error: GammarayError) -> None:
        self._decoding.clear()
        self.queue.fail_all(error)
        if not isinstance(error, EngineLostError):
            self.engine.recover()

    def check(self) -> None:
        self.engine.check()

    def close(self) -> None:
        self._masks.close()
        self._head.close()
        self.engine.shutdown()

    def _check_task(self, task: VerifyTask) -> None:
        self._limits.check_proposal(len(task.proposal))
        if task.proposal.parents is not None:
            raise InvalidArgumentError("proposal.parents", "a tree", "a chain with vLLM as the engine")
        task.proposal = first_tokens(task.proposal, self.engine.max_proposal)

    def _start(self, task: VerifyTask, session: SessionCopy) -> _Verifying:
        request = self.requests.get(session.session_id)
        depth = _draft_depth(task, 0 if request is None else request.depth)
        num_drafts = 0 if task.head is None else task.head.depth
        if num_drafts > 0 and request is not None and self._can_continue(request, task, session):
            drafts = tuple(request.drafts[:num_drafts])
            task.proposal = Proposal(drafts, is_prepared=True, version=request.version)
        work = _Verifying(task, session, "", depth=depth)
        if session.has_slow_masks:
            self._masks.begin(work, partial(_compute_masks, work))
        if not session.is_masking:
            self._post(work)
        return work

    def _post(self, work: _Verifying) -> None:
        """Let a block run, in the request of its session or in a new one."""
        task, session = work.task, work.session
        request = self.requests.pop(session.session_id, None)
        if request is not None and self._can_continue(request, task, session):
            work.request_id = request.request_id
            self.engine.post(work.request_id, work.block)
        else:
            if request is not None:
                self.engine.close(request.request_id)
            self._open(work)
        self.requests[session.session_id] = _Request(work.request_id, session.spec, work.depth)
        work.num_needed = self.engine.needed_blocks(len(session.tokens) + len(task.proposal))
        self._steps.works[work.request_id] = work

    def _begin_ahead(self, task: VerifyTask, session: SessionCopy) -> _Verifying:
        work = _Verifying(task, session, "")
        self._post(work)
        return work

    def _can_continue(self, request: _Request, task: VerifyTask, session: SessionCopy) -> bool:
        """Whether a request has exactly the committed tokens, and the session's parameters."""
        return not task.reads_anew and self._steps.num_ahead(request.request_id, request.spec, session) == 0

    def _open(self, work: _Verifying) -> None:
        """Open a request for a block, and post what it runs first."""
        task, session = work.task, work.session
        tokens, block = session.tokens, work.block
        is_split = len(block.proposal) > 0 and len(tokens) > 1 and task.num_prompt_logprobs is None
        work.request_id = self.engine.open(
            session.session_id,
            tokens[:-1] if is_split else tokens,
            session.spec,
            salt_of(session),
            task.num_prompt_logprobs,
            is_kept=task.head is not None and self._head.keeps(session.session_id),
        )
        if is_split:
            work.follows = block
            block = PostedBlock(Proposal(), block.base_position - 1, known_token_id=tokens[-1])
        else:
            # A proposal is not tested here after a single token, which vLLM's prompt needs, nor beside a
            # prompt that is scored whole.
            work.follows, block = None, replace(block, proposal=Proposal())
        self.engine.post(work.request_id, block)

    def _withdraw(self, work: _Verifying) -> None:
        # Its prompt may be half read: the next block reads it anew, from the prefix cache.
        if work.request_id:
            del self._steps.works[work.request_id]
            del self.requests[work.session.session_id]
            self.engine.close(work.request_id)

    def _forget(self, session: SessionCopy) -> None:
        self._head.end(session)
        request = self.requests.pop(session.session_id, None)
        if request is not None:
            self.engine.close(request.request_id)
        self._steps.forget(session)

    def _forget_prefix(self, session_id: str) -> None:
        self._head.forget(session_id)
        self._steps.forget_prefix(session_id)

    def _make_room(self) -> None:
        """Close the least recently used idle requests while the blocks of this step lack slots or memory.

        vLLM never takes memory from a paused request for one that waits.
        """
        count = self.engine.num_blocks
        lacking = sum(max(0, work.num_needed - count(name)) for name, work in self._steps.works.items())
        for session_id, request in list(self.requests.items()):
            if self.engine.num_free_requests >= 0 and self.engine.num_free_blocks >= lacking:
                return
            if request.request_id not in self._steps.works:
                self._evict(session_id)

    def _evict(self, session_id: str) -> None:
        self.engine.close(self.requests.pop(session_id).request_id)
        self.engine.num_evictions += 1

    def _take(self, result: StepResult) -> None:
        for request_id, (start, states) in result.states.items():
            if request_id in self._steps.works:
                self._head.take(self._steps.works[request_id].session.session_id, start, states)
        for request_id, outcome in result.verdicts.items():
            work = self._steps.works.get(request_id)
            if work is None:
                continue  # its block was dropped, and the request is read anew
            assert not isinstance(outcome, Drafted)
            if outcome is None and work.follows is not None:
                self.engine.post(request_id, work.follows)
                work.follows = None
            elif outcome is None:  # its masks are late
                self._withdraw(work)
                work.request_id = ""
            else:
                session_id, drafts = work.session.session_id, result.drafts.get(request_id, ())
                request = self.requests[session_id]._replace(drafts=drafts, version=self._head.number)
                self.requests[session_id] = request
                self._finish(work, outcome, result.prompt_scores.get(request_id))

    def _finish(self, work: _Verifying, outcome: Verdict | GammarayError, scores: Any) -> None:
        session, task = work.session, work.task
        if isinstance(outcome, Verdict):
            emitted = [task.proposal.token_ids[node] for node in outcome.accepted_path]
            session.tokens += [*emitted, outcome.next_token_id]
            if task.head is not None and task.head.depth > 0:
                outcome = replace(outcome, drafted=task.proposal)
                if task.proposal:
                    first, is_accepted = task.base_position, bool(outcome.accepted_path)
                    self._head.count(task.proposal.version, session.session_id, first, is_accepted)
            if scores is not None:
                prompt = session.tokens[: session.spec.prompt_length]
                outcome = replace(outcome, prompt_logprobs=_prompt_logprobs(prompt, scores, task))
            if task.is_ahead:
                self._go_on(work, outcome)
                return
            outcome = replace(outcome, is_followed=self._decoding.goes_on(task, session))
        else:
            self.engine.close(work.request_id)
            self.requests.pop(session.session_id, None)
        self._steps.answer(work, outcome)

    def _go_on(self, work: _Verifying, verdict: Verdict) -> None:
        """Decode a further token ahead, unless it was the last one, or other sessions wait for a place."""
        if self._decoding.take(work, verdict) or self.engine.num_free_requests < 0:
            self._steps.answer(work, self._decoding.last(work))
        else:
            self.engine.post(work.request_id, work.block)  # vLLM takes memory from paused requests for it

    def _reopen(self, preempted: Sequence[str]) -> None:
        """Close requests that lost their cache, and read those with a block again.

        vLLM would recompute them and sample one more token, without a block.
        """
        for request_id in preempted:
            work = self._steps.works.pop(request_id, None)
            self.engine.close(request_id)
            self.engine.num_evictions += 1
            if work is None:
                self.requests = {s: r for s, r in self.requests.items() if r.request_id != request_id}
            else:
                self._post(work)

    def _unblock(self) -> None:
        """Free memory after a step in which nothing fitted: idle sessions, else fail the newest block."""
        idle = [s for s, request in self.requests.items() if request.request_id not in self._steps.works]
        for session_id in idle:
            self._evict(session_id)
        posted = [work for work in self.queue.running.values() if work.request_id]
        if posted and not idle:
            self._finish(posted[-1], self._steps.too_small(), None)

    def _begin_masks(self, posted: dict[str, PostedBlock]) -> Callable[[], Masks] | None:
        works = [self._steps.works[name] for name, block in posted.items() if block.known_token_id is None]
        masked = [work for work in works if work.session.spec.params.grammar]
        for work in masked:
            self._masks.begin(work, partial(_compute_masks, work))
        return partial(_wait_for_masks, masked) if masked else None


def _compute_masks(work: _Verifying) -> None:
    work.masks = work.session.grammar_masks(row_paths(work.task.proposal))


def _wait_for_masks(works: Sequence[_Verifying]) -> Masks:
    """Return the masks of blocks, once they are there or late."""
    wait_for_masks(work.session for work in works)
    return Masks({work.request_id: _masks(work) for work in works})


def _masks(work: _Verifying) -> Sequence[bytes | None] | GammarayError | None:
    masking = work.session.masking
    assert masking is not None
    if not masking.done():
        return None
    return masking.result() or work.masks


def _draft_depth(task: VerifyTask, before: int) -> int:
    """Return how many tokens to draft after a block, for the next one, whose shape is not known yet.

    As many as for this block. After a proposal from elsewhere, such as a look-up, the head may be asked
    again, as it was before; after gamma 0 it probably does not pay.
    """
    if task.head is None:
        return 0
    return task.head.depth or (before if len(task.proposal) else 0)


def _prompt_logprobs(prompt: Sequence[int], scores: Any, task: VerifyTask) -> PromptLogprobs:
    """Return the columns of a prompt's log-probabilities; column 0 of vLLM's tensors is the token itself."""
    entries, num_top = len(prompt) - 1, task.num_prompt_logprobs or 0
    ids, logprobs = scores.logprob_token_ids[:entries], scores.logprobs[:entries].double()
    top_ids, top = ids[:, 1 : num_top + 1], logprobs[:, 1 : num_top + 1]
    return PromptLogprobs(
        tuple(prompt),
        tuple(logprobs[:, 0].tolist()),
        tuple(scores.selected_token_ranks[:entries].tolist()),
        int(top_ids.shape[1]),
        tuple(top_ids.flatten().tolist()),
        tuple(top.flatten().tolist()),
    )
