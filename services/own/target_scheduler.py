"""Verifies proposals of many sessions with one forward per batch.

A head drafts here before the forward. While no block waits, it drafts ahead: for the sessions that it drafted
for last, after the tokens of their verdicts, in the shapes that they asked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from gammaray.blocks import Shape, Verdict
from gammaray.errors import GammarayError
from gammaray.types import Proposal
from services.engine.core.batch import SequenceInput
from services.engine.engine import Engine
from services.engine.sampling.edits import LogitEdits, row_paths
from services.own.prompt_scores import PromptScores
from services.scheduling.batcher import Batcher, Feeds
from services.scheduling.decode_ahead import DecodeAhead
from services.scheduling.grammars import Grammars
from services.scheduling.masks import MaskThreads, wait_for_masks
from services.scheduling.planning import Limits, Running
from services.scheduling.scheduler import BlockQueue
from services.scheduling.sessions import SessionCopy
from services.scheduling.tasks import AheadTokens, Release, Reply, VerifyTask
from services.speculation.local_drafter import Request, TargetHead
from services.verification.verdicts import judge, token_logprobs


@dataclass(slots=True, eq=False)
class _Verifying(Running[VerifyTask]):
    scores: PromptScores | None = None  # collects the requested log-probabilities of the prompt
    must_draft: bool = False  # whether the head has to draft before the first forward
    is_expected: bool = False  # whether it may have done so ahead
    must_mask: bool = False  # whether the next forward that includes it must wait for its masks
    states: Tensor | None = None  # for a head: states of the last feed's tokens, [tokens, taps, hidden_size]

    @property
    def is_ready(self) -> bool:
        return not self.must_draft and not (self.must_mask and self.session.is_masking)

    def propose(self, proposal: Proposal) -> None:
        """Verify a proposal that the block did not bring."""
        self.task.proposal = proposal
        self.tail, self.parents = list(proposal.token_ids), proposal.parents
        self.num_logits = len(self.tail) + 1


class TargetScheduler:
    """Feeds the committed tokens that are not cached and then a whole proposal, and verifies it.

    `head` drafts for blocks that ask for it, and with `draft_ahead` while no block waits.
    """

    role: ClassVar[str] = "target"
    step_timeout_s: float | None = None

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        grammars: Grammars | None = None,
        head: TargetHead | None = None,
        *,
        draft_ahead: bool = True,
    ) -> None:
        self.engine, self._limits = engine, limits
        self.queue = BlockQueue[VerifyTask, _Verifying](
            self.role, engine.vocab_size, str(engine.device), grammars, engine.stats, self._forget
        )
        self.batcher = Batcher(engine, limits, self.queue)
        self._head = head or TargetHead()
        self._drafts_ahead, self._ahead = draft_ahead, dict[str, tuple[SessionCopy, Shape]]()
        self._expected = set[str]()
        self._stats = self.queue.meter.ahead
        self._is_tapped = len(self._head.taps) > 0
        if self._is_tapped:
            engine.tap(self._head.taps)
        self.queue.meter.first_tokens = self._head.first_tokens
        self._masks = MaskThreads()
        self._decoding = DecodeAhead(
            self.queue, self.queue.answer, lambda task, session: _Verifying(task, session, [], num_logits=1)
        )

    @property
    def has_work(self) -> bool:
        return bool(self._ahead) or not self.queue.is_idle

    def submit(self, tasks: Iterable[VerifyTask]) -> None:
        self.queue.submit(tasks)

    def step(self) -> list[tuple[VerifyTask, Reply]]:
        if self.queue.is_idle:
            self._draft_ahead()
            return []
        self.queue.drop_dead()
        self._decoding.end_overtaken()
        self.batcher.admit(self._start)
        self._draft_blocks()
        self._begin_slow_masks()
        self.batcher.run(self._forward, self._advance)
        self._decoding.step()
        return self.queue.take_replies()

    def release(self, endings: Iterable[Release]) -> None:
        self.queue.release(endings, self._forget_prefix)

    def fail_all(self, error: GammarayError) -> None:
        self._decoding.clear()
        self.queue.fail_all(error)
        self.engine.drop_retained()

    def check(self) -> None:
        """An engine of this process is lost only by an error of its own step."""

    def close(self) -> None:
        self._masks.close()
        self._head.close()

    def _draft_ahead(self) -> None:
        length, ahead, self._ahead = self.engine.length, self._ahead, {}
        self._head.prepare(
            [(session, shape, length(session_id)) for session_id, (session, shape) in ahead.items()],
            self.queue.stop,
        )
        if self.queue.stop.value:
            # Resume drafting ahead for the other sessions after this block.
            self._ahead = ahead

    def _start(self, task: VerifyTask, session: SessionCopy) -> _Verifying:
        if task.reads_anew:
            self.engine.truncate(task.session_id, 0)
        else:
            self.batcher.match(session, session.tokens, session.changed_from)
        proposal = task.proposal
        self._ahead.pop(task.session_id, None)
        was_expected = task.session_id in self._expected
        self._expected.discard(task.session_id)
        self._limits.check_proposal(len(proposal))
        nodes, num_top = list(proposal.token_ids), task.num_prompt_logprobs
        running = _Verifying(task, session, nodes, num_logits=len(nodes) + 1, parents=proposal.parents)
        if num_top is not None:
            prompt = session.tokens[: session.spec.prompt_length]
            running.scores = PromptScores(prompt, num_top, self.engine.vocab_size)
            running.is_scored = True
        running.must_draft = task.head is not None and task.head.depth > 0
        running.is_expected = running.must_draft and was_expected
        return running

    def _draft_blocks(self) -> None:
        """Draft for the oldest blocks that leave it to the head, as many as a step may verify."""
        drafting, requests, num_tokens = list[_Verifying](), list[Request](), 0
        for running in self.queue.running.values():
            if running.must_draft and (shape := running.task.head) is not None:
                num_tokens += 1 + max(shape.depth, shape.max_nodes)
                if drafting and num_tokens > self.batcher.budget.num_tokens:
                    break
                drafting.append(running)
                num_cached = self.engine.length(running.session.session_id)
                requests.append((running.session, shape, num_cached))
                running.must_draft = False
        if not drafting:
            return
        began = time.perf_counter()
        proposals = self._head.draft(requests)
        took_us = int((time.perf_counter() - began) * 1e6)
        for running, proposal in zip(drafting, proposals, strict=True):
            running.timing.head_us = took_us
            if running.is_expected:
                self._stats.lookups += 1
                self._stats.hits += proposal.is_prepared
            if len(proposal) < self._limits.max_batch_tokens:
                running.propose(proposal)

    def _begin_slow_masks(self) -> None:
        """Begin the masks that no step waits for."""
        for running in self.queue.running.values():
            if running.session.has_slow_masks and not (running.has_masks or running.must_draft):
                running.must_mask = True
                self._masks.begin(running, partial(self._prepare, running))

    def _forward(self, batch: Feeds[_Verifying]) -> list[Tensor]:
        """Run the forward, and meanwhile compute the masks of the sessions with a grammar."""
        for running, feed in batch:
            if feed.num_logits:
                self._masks.begin(running, partial(self._prepare, running))
        logits = self.engine.step([feed for _, feed in batch])
        wait_for_masks(running.session for running, feed in batch if feed.num_logits)
        if self._is_tapped:
            for (running, feed), states in zip(batch, self.engine.taps, strict=True):
                self._note_states(running, feed, states)
        return logits

    def _note_states(self, running: _Verifying, feed: SequenceInput, states: Tensor) -> None:
        """Keep the hidden states of committed tokens; those of a proposal wait for the verdict."""
        if running.task.head is None:
            return
        if feed.start + len(feed.token_ids) < running.num_tokens:
            self._head.take(running.task.session_id, feed.start, states)
        else:
            running.states = states

    def _prepare(self, running: _Verifying) -> None:
        self._edits(running.session).prepare(row_paths(running.task.proposal))

    def _advance(self, running: _Verifying, logits: Tensor) -> Verdict | AheadTokens | None:
        if running.task.is_ahead:
            is_last = self._decoding.take(running, self._judge(running, logits))
            return self._decoding.last(running) if is_last else None
        scores = running.scores
        if scores is not None:
            scores.take(running.fed_from, logits)
            if running.fed_from + len(logits) < running.num_tokens:
                return None
            logits = logits[-running.num_logits :]
        if running.has_masks:
            assert running.session.masking is not None
            if running.session.is_masking:
                self._put_off(running)
                return None
            if (error := running.session.masking.result()) is not None:
                raise error
        verdict = self._judge(running, logits)
        if scores is not None:
            return replace(verdict, prompt_logprobs=scores.result())
        is_followed = self._decoding.goes_on(running.task, running.session)
        return replace(verdict, is_followed=True) if is_followed else verdict

    def _put_off(self, running: _Verifying) -> None:
        """Forget the last forward of a block, except for committed tokens: its masks are late."""
        running.must_mask = True
        if running.states is not None and (num_kept := len(running.states) - running.num_logits) > 0:
            self._head.take(running.task.session_id, running.fed_from, running.states[:num_kept])
        running.states = None
        self.engine.truncate(running.session.session_id, running.task.base_position)

    def _judge(self, running: _Verifying, logits: Tensor) -> Verdict:
        task, session = running.task, running.session
        proposal, base = task.proposal, task.base_position
        edits = self._edits(session) if LogitEdits.needed(session.spec.params) else None
        verdict = judge(session.spec, proposal, logits, base, session.noise, edits)
        path = verdict.accepted_path
        # Drop rejected tokens: the cache ends with the accepted path.
        if proposal.parents is None:
            self.engine.truncate(session.session_id, base + len(path))
        else:
            self.engine.keep_path(session.session_id, base, path)
        if running.states is not None:
            first = len(running.states) - len(proposal)
            if proposal.parents is None:  # NOTE: indexing by rows takes ten times as long
                states = running.states[: first + len(path)].clone()
            else:
                states = running.states[[*range(first), *(first + node for node in path)]]
            self._head.take(session.session_id, running.fed_from, states)
        if task.head is not None and task.head.depth > 0:
            verdict = replace(verdict, drafted=replace(proposal, draft_distributions=None))
            if self._drafts_ahead and verdict.next_token_id not in session.spec.eos_token_ids:
                self._ahead[session.session_id] = session, task.head
                self._expected.add(session.session_id)
        emitted = [*(proposal.token_ids[node] for node in path), verdict.next_token_id]
        session.tokens += emitted
        if task.num_top_logprobs is None:
            return verdict
        rows = [0, *(node + 1 for node in path)]
        return replace(verdict, logprobs=token_logprobs(logits[rows], emitted, task.num_top_logprobs))

    def _forget(self, session: SessionCopy) -> None:
        self._ahead.pop(session.session_id, None)
        self._expected.discard(session.session_id)
        self._head.end(session)
        self.batcher.forget(session)

    def _forget_prefix(self, session_id: str) -> None:
        self._head.forget(session_id)
        self.engine.forget(session_id)

    def _edits(self, session: SessionCopy) -> LogitEdits:
        return session.edits_for(session.spec.params, self.engine.vocab_size, self.engine.device)
