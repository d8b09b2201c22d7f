"""Serves the blocks of a target worker with vLLM.

A session is one request of vLLM, held between its blocks. Where a request is missing or has other tokens, a
new one reads the committed tokens, with what the prefix cache has of them. A request that is read anew for a
block with a proposal takes a step more: vLLM verifies no draft tokens in the step that ends a prompt, so that
the prompt is all but the last committed token, and that step gives the last one, which is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from gammaray.blocks import Verdict
from gammaray.errors import GammarayError, InvalidArgumentError, ResourceExhaustedError
from gammaray.types import PromptLogprobs, Proposal
from services.engine.core.errors import EngineLostError
from services.engine.sampling.edits import row_paths
from services.scheduling.grammars import Grammars
from services.scheduling.planning import Limits
from services.scheduling.sessions import SessionCopy
from services.scheduling.tasks import NeedTokens, Reply, SessionSpec, VerifyTask
from services.vllm.engine import StepResult, VllmEngine
from services.vllm.messages import Drafted, Masks, PostedBlock, first_tokens
from services.vllm.request_queue import RequestQueue, RequestWork


class _Held(NamedTuple):
    """The request of a session.

    Args:
        spec: The session's parameters, which the sampler got with the request.
        depth: Tokens that vLLM's drafter proposes after its step.
        drafts: What it proposed after the last one.
    """

    request_id: str
    spec: SessionSpec
    depth: int = 0
    drafts: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class _Verifying(RequestWork[VerifyTask]):
    """A verification that vLLM computes.

    Args:
        follows: The block that is posted once the request has read the prompt; None: it is posted already.
        num_needed: KV blocks of the request when the block has been verified.
    """

    follows: PostedBlock | None = None
    num_needed: int = 0


class VllmScheduler(RequestQueue[VerifyTask, _Verifying]):
    """Implements `BlockScheduler` for verifications.

    Args:
        engine: The model.
        limits: Bounds of one forward.
        grammars: Compiles the sessions' grammars; None: sessions with one are refused.
    """

    role: ClassVar[str] = "target"

    def __init__(self, engine: VllmEngine, limits: Limits, grammars: Grammars | None = None) -> None:
        self.requests: dict[str, _Held] = {}  # by session, least recently used first
        super().__init__(engine, limits, grammars)
        self._masks: list[Future[Masks]] = []
        self._mask_thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        engine.set_mask_maker(self._begin_masks)

    def fail_all(self, error: GammarayError) -> None:
        """Answer every block with `error` and drop every session and the prefix cache."""
        wait(self._masks)  # it reads the sessions
        super().fail_all(error)
        if not isinstance(error, EngineLostError):
            self.engine.recover()

    def close(self) -> None:
        """End vLLM's engine, and the thread of the masks."""
        self._mask_thread.shutdown()
        self.engine.shutdown()

    def step(self) -> list[tuple[VerifyTask, Reply]]:
        """Run one step for all blocks, and return the answers that are ready."""
        self._drop_dead()
        self._admit()
        if self._running:
            self._make_room()
            self._run()
        replies, self._replies = self._replies, []
        return replies

    def _try_start(self, task: VerifyTask) -> _Verifying | object:
        try:
            # Before the session changes, so that its request still has the tokens before `changed_from`.
            self.limits.check_proposal(len(task.proposal))
            if task.proposal.parents is not None:
                raise InvalidArgumentError("proposal.parents", "a tree", "a chain with vLLM as the engine")
            task.proposal = first_tokens(task.proposal, self.engine.max_proposal)
            session = self.sessions.admit(task)
            return session if isinstance(session, NeedTokens) else self._start(task, session)
        except EngineLostError:
            raise
        except GammarayError as error:
            return error

    def _start(self, task: VerifyTask, session: SessionCopy) -> _Verifying:
        tokens = session.tokens
        held, follows = self.requests.pop(session.session_id, None), None
        depth = _draft_depth(task, 0 if held is None else held.depth)
        if held is not None and self._can_continue(held, task, session):
            request_id = held.request_id
            if task.head is not None and task.head.depth > 0:
                task.proposal = Proposal(tuple(held.drafts[: task.head.depth]), is_prepared=True)
            self.engine.post(request_id, _block(task, depth))
        else:
            if held is not None:
                self.engine.close(held.request_id)
            request_id, follows = self._open(task, session, _block(task, depth))
        self.requests[session.session_id] = _Held(request_id, session.spec, depth)
        needed = self.engine.needed_blocks(len(tokens) + len(task.proposal))
        work = _Verifying(task, session, request_id, follows, needed)
        self._by_request[request_id] = work
        return work

    def _can_continue(self, held: _Held, task: VerifyTask, session: SessionCopy) -> bool:
        """Whether a request has exactly the committed tokens, and the session's parameters."""
        tokens = self.engine.tokens(held.request_id)
        if tokens is None or task.reads_anew or held.spec != session.spec:
            return False
        first = min(session.changed_from, len(tokens))
        return len(tokens) == len(session.tokens) and tokens[first:] == session.tokens[first:]

    def _open(
        self, task: VerifyTask, session: SessionCopy, block: PostedBlock
    ) -> tuple[str, PostedBlock | None]:
        """Open a request for a session; return it, and what has to be posted when it has read the prompt."""
        tokens, spec = session.tokens, session.spec
        is_split = len(block.proposal) > 0 and len(tokens) > 1 and task.num_prompt_logprobs is None
        request_id = self.engine.open(
            session.session_id,
            tokens[:-1] if is_split else tokens,
            spec,
            _salt(session),
            task.num_prompt_logprobs,
        )
        if not is_split:
            # A proposal is not tested here after a single token, which vLLM's prompt needs, nor beside a
            # prompt that is scored whole.
            self.engine.post(request_id, replace(block, proposal=Proposal()))
            return request_id, None
        known = PostedBlock(Proposal(), block.base_position - 1, known_token_id=tokens[-1])
        self.engine.post(request_id, known)
        return request_id, block

    def _withdraw(self, work: _Verifying) -> None:
        # Its prompt may be half read: the next block reads it anew, from the prefix cache.
        del self._by_request[work.request_id]
        del self.requests[work.session.session_id]
        self.engine.close(work.request_id)

    def _forget(self, session: SessionCopy) -> None:
        held = self.requests.pop(session.session_id, None)
        if held is not None:
            self.engine.close(held.request_id)
        if session.spec.cache_salt is None:
            self.engine.forget(session.tokens, session.spec, _salt(session))

    def _forget_prefix(self, session_id: str) -> None:
        session = self.sessions.find(session_id)
        if session is not None:
            self.engine.forget(session.tokens, session.spec, _salt(session))

    def _make_room(self) -> None:
        """Close the least recently used idle requests while the blocks of this step lack slots or memory.

        vLLM never takes memory from a request that it holds for one that waits.
        """
        count = self.engine.held_blocks
        lacking = sum(max(0, work.num_needed - count(name)) for name, work in self._by_request.items())
        for session_id, held in list(self.requests.items()):
            if self.engine.num_free_requests >= 0 and self.engine.num_free_blocks >= lacking:
                return
            if held.request_id not in self._by_request:
                self._evict(session_id)

    def _evict(self, session_id: str) -> None:
        self.engine.close(self.requests.pop(session_id).request_id)
        self.engine.num_evictions += 1

    def _run(self) -> None:
        began = time.perf_counter()
        result = self._step_engine()
        if result is None:
            return
        self._take(result, int((time.perf_counter() - began) * 1e6))
        self._reopen(result.preempted)
        if not result.num_tokens and not result.preempted:
            self._unblock()

    def _take(self, result: StepResult, took_us: int) -> None:
        """Add a step's time to its blocks, and answer those that it completed."""
        num_rows = sum(
            1 + (0 if outcome is None else len(self._by_request[request_id].task.proposal))
            for request_id, outcome in result.verdicts.items()
            if request_id in self._by_request
        )
        self._count(result, took_us, num_rows)
        for request_id, outcome in result.verdicts.items():
            work = self._by_request.get(request_id)
            if work is None:
                continue  # its block was dropped, and the request is read anew
            assert not isinstance(outcome, Drafted)
            if outcome is None:
                assert work.follows is not None
                self.engine.post(request_id, work.follows)
                work.follows = None
            else:
                session_id, drafts = work.session.session_id, result.drafts.get(request_id, ())
                self.requests[session_id] = self.requests[session_id]._replace(drafts=drafts)
                self._finish(work, outcome, result.prompt_scores.get(request_id))

    def _finish(self, work: _Verifying, outcome: Verdict | GammarayError, scores: Any) -> None:
        session, task = work.session, work.task
        if isinstance(outcome, Verdict):
            emitted = [task.proposal.token_ids[node] for node in outcome.accepted_path]
            session.tokens += [*emitted, outcome.next_token_id]
            if task.head is not None and task.head.depth > 0:
                outcome = replace(outcome, drafted=task.proposal)
            if scores is not None:
                prompt = session.tokens[: session.spec.prompt_length]
                outcome = replace(outcome, prompt_logprobs=_prompt_logprobs(prompt, scores, task))
        else:
            self.engine.close(work.request_id)
            self.requests.pop(session.session_id, None)
        del self._running[session.session_id], self._by_request[work.request_id]
        self._reply(task, outcome, work.timing)

    def _reopen(self, preempted: Sequence[str]) -> None:
        """Close requests that lost their cache, and read those with a block again.

        vLLM would recompute them and sample one more token, without a block.
        """
        for request_id in preempted:
            work = self._by_request.pop(request_id, None)
            self.engine.close(request_id)
            self.engine.num_evictions += 1
            if work is None:
                self.requests = {s: r for s, r in self.requests.items() if r.request_id != request_id}
                continue
            depth = self.requests[work.session.session_id].depth
            work.request_id, work.follows = self._open(work.task, work.session, _block(work.task, depth))
            self.requests[work.session.session_id] = _Held(work.request_id, work.session.spec, depth)
            self._by_request[work.request_id] = work

    def _unblock(self) -> None:
        """Free memory after a step in which nothing fitted: idle sessions, else fail the newest block."""
        idle = [s for s, held in self.requests.items() if held.request_id not in self._by_request]
        for session_id in idle:
            self._evict(session_id)
        if idle or not self._running:
            return
        work = next(reversed(self._running.values()))
        budget = self.engine.stats().cache_budget_bytes
        self._finish(work, ResourceExhaustedError(f"the KV cache budget is too small: {budget} bytes"), None)

    def _begin_masks(self, posted: dict[str, PostedBlock]) -> Callable[[], Masks] | None:
        """Begin to compute the masks of the posted blocks with a grammar; return what waits for them."""
        blocks = [
            (self._by_request[request_id], block)
            for request_id, block in posted.items()
            if block.known_token_id is None and self._by_request[request_id].session.spec.params.grammar
        ]
        if not blocks:
            return None
        masks = self._mask_thread.submit(self._compute_masks, blocks)
        self._masks = [masks]
        return masks.result

    def _compute_masks(self, blocks: Sequence[tuple[_Verifying, PostedBlock]]) -> Masks:
        masks: dict[str, Sequence[bytes | None] | GammarayError] = {}
        for work, block in blocks:
            began, paths = time.perf_counter(), row_paths(block.proposal)
            try:
                masks[work.request_id] = work.session.grammar_masks(paths)
            except GammarayError as error:
                masks[work.request_id] = error
            work.timing.mask_us += int((time.perf_counter() - began) * 1e6)
        return Masks(masks)


def _salt(session: SessionCopy) -> str:
    """Return what separates the prefix cache of a session; without a salt of its own, it shares none."""
    salt = session.spec.cache_salt
    return f"session {session.session_id}" if salt is None else f"tenant {salt}"


def _block(task: VerifyTask, depth: int) -> PostedBlock:
    return PostedBlock(task.proposal, task.base_position, task.num_top_logprobs, depth)


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
