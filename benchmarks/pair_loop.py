"""The draft-verify cycle without a cluster: one thread calls the two workers' schedulers in turn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gammaray.blocks import Shape, Verdict
from gammaray.errors import GammarayError, InternalError
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from services.scheduling.scheduler import Scheduler
from services.scheduling.tasks import ProposeTask, Release, Reply, SessionSpec, VerifyTask
from services.target_worker.scheduler import TargetScheduler


@dataclass(frozen=True)
class Ask:
    """A completion to make.

    Args:
        prompt: Its token ids, at least one.
        max_tokens: Upper bound of emitted tokens.
        temperature: 0 is greedy.
        seed: Seed of the session's noise.
        eos_token_ids: Tokens that end it.
        method: Verification method.
        max_nodes: Nodes of a proposal at most; above gamma proposals are trees.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    eos_token_ids: tuple[int, ...]
    method: VerificationMethod = VerificationMethod.COUPLED
    max_nodes: int = 0

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters for the workers."""
        return SamplingParams(temperature=self.temperature, seed=self.seed)


@dataclass(frozen=True)
class MeasuredCycle:
    """Figures of one cycle; times are those of the schedulers' steps, in milliseconds."""

    num_drafted: int
    num_tested: int
    num_accepted: int
    num_emitted: int
    draft_ms: float
    draft_forwards: int
    verify_ms: float
    is_first: bool


@dataclass(frozen=True)
class Text:
    """A completion: its tokens, without the prompt, and its cycles."""

    token_ids: tuple[int, ...]
    cycles: tuple[MeasuredCycle, ...]


class Pair:
    """A target and what drafts for it.

    Args:
        target: The target's scheduler, used exclusively by this object.
        draft: The draft's; None: the target's scheduler has a drafter of its own.
    """

    def __init__(self, target: TargetScheduler, draft: Scheduler[ProposeTask] | None) -> None:
        self.target, self.draft = target, draft
        self._names = map(str, itertools.count())

    def complete(self, ask: Ask, gamma: int) -> Text:
        """Return the completion with chains of `gamma`; 0 is plain decoding.

        Raises:
            GammarayError: A model failed.
        """
        session, cycles = _Completion(next(self._names), ask), []
        try:
            while not session.is_over:
                cycles.append(self._cycle(session, min(gamma, session.remaining - 1)))
        finally:
            for scheduler in (self.target, self.draft):
                if scheduler is not None:
                    scheduler.release([Release(session.name)])
                    scheduler.step()
        return Text(tuple(session.output), tuple(cycles))

    def _cycle(self, session: _Completion, gamma: int) -> MeasuredCycle:
        proposal, drafted = Proposal(), None
        is_first = not session.output
        if gamma > 0 and self.draft is not None:
            drafted = _answer(self.draft, session.propose_task(gamma))
            assert isinstance(drafted.outcome, Proposal)
            proposal = drafted.outcome
        verified = _answer(self.target, session.verify_task(proposal, gamma if self.draft is None else 0))
        verdict = verified.outcome
        assert isinstance(verdict, Verdict)
        if verdict.drafted is not None:
            proposal = verdict.drafted
        timing = verified.timing if drafted is None else drafted.timing
        accepted = [proposal.token_ids[node] for node in verdict.accepted_path]
        session.commit([*accepted, verdict.next_token_id])
        return MeasuredCycle(
            num_drafted=len(proposal),
            num_tested=verdict.num_tested,
            num_accepted=len(accepted),
            num_emitted=len(accepted) + 1,
            draft_ms=(timing.head_us if drafted is None else timing.compute_us) / 1e3,
            draft_forwards=len(proposal) if drafted is None else timing.num_forwards,
            verify_ms=verified.timing.compute_us / 1e3,
            is_first=is_first,
        )


class _Completion:
    """The tokens of one completion, and how many were sent to each worker.

    Attributes:
        name: Its session on both workers.
        is_over: Whether it has `max_tokens` or ended.
    """

    def __init__(self, name: str, ask: Ask) -> None:
        self.name, self._ask = name, ask
        self._tokens = list(ask.prompt)
        self._sent = {"target": 0, "draft": 0}
        self.is_over = False

    @property
    def output(self) -> list[int]:
        """The emitted tokens."""
        return self._tokens[len(self._ask.prompt) :]

    @property
    def remaining(self) -> int:
        """Tokens that it may still emit."""
        return self._ask.max_tokens - len(self.output)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append emitted tokens up to the one that ends the completion."""
        for token_id in token_ids[: self.remaining]:
            self._tokens.append(token_id)
            if token_id in self._ask.eos_token_ids:
                self.is_over = True
                return
        self.is_over = self.remaining == 0

    def propose_task(self, gamma: int) -> ProposeTask:
        """Return the task of the next proposal."""
        return ProposeTask(**self._block("draft"), shape=Shape(gamma, self._ask.max_nodes))

    def verify_task(self, proposal: Proposal, local_gamma: int = 0) -> VerifyTask:
        """Return the task of its verification; above 0, the target worker drafts that many tokens itself."""
        head = Shape(local_gamma, self._ask.max_nodes) if local_gamma else None
        return VerifyTask(**self._block("target"), proposal=proposal, num_top_logprobs=None, head=head)

    def _block(self, role: str) -> dict[str, Any]:
        sent, self._sent[role] = self._sent[role], len(self._tokens)
        ask = self._ask
        spec = SessionSpec(ask.params, ask.method, len(ask.prompt), ask.eos_token_ids)
        return {
            "request_id": 0,
            "session_id": self.name,
            "epoch": 1,
            "base_position": len(self._tokens),
            "context_start": sent,
            "context": self._tokens[sent:],
            "spec": spec if sent == 0 else None,
            "deadline": math.inf,
            "deliver": lambda task, reply: None,
        }


def _answer(scheduler: Scheduler[Any], task: Any) -> Reply:
    """Step until the only block is answered."""
    scheduler.submit([task])
    while scheduler.has_work:
        for _, reply in scheduler.step():
            if isinstance(reply.outcome, GammarayError):
                raise reply.outcome
            return reply
    raise InternalError(f"the {scheduler.role} did not respond")
