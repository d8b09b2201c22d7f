"""The draft-verify cycle without a cluster: one thread calls the two workers' schedulers in turn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gammaray.blocks import Shape, Verdict
from gammaray.errors import GammarayError, InternalError
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from services.own.target_scheduler import TargetScheduler
from services.scheduling.scheduler import Scheduler
from services.scheduling.tasks import ProposeTask, Release, SessionSpec, VerifyTask


@dataclass(frozen=True)
class Ask:
    """A completion to make."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    eos_token_ids: tuple[int, ...]
    method: VerificationMethod = VerificationMethod.COUPLED
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters for the workers."""
        return SamplingParams(**{"temperature": self.temperature, "seed": self.seed, **self.fields})


@dataclass(frozen=True)
class Cycle:
    """What became of one proposal."""

    num_drafted: int
    num_tested: int
    num_accepted: int


@dataclass(frozen=True)
class Text:
    """A completion: its tokens, without the prompt, and its cycles."""

    token_ids: tuple[int, ...]
    cycles: tuple[Cycle, ...]


class Pair:
    """A target and what drafts for it.

    Args:
        target: The target's scheduler, used exclusively by this object.
        draft: The draft's; None: nothing drafts.
    """

    def __init__(self, target: TargetScheduler, draft: Scheduler[ProposeTask] | None) -> None:
        self.target, self.draft = target, draft
        self._names = map(str, itertools.count())

    def complete(self, ask: Ask, gamma: int) -> Text:
        """Return the completion with chains of `gamma`; 0 is plain decoding.

        Raises:
            GammarayError: A model failed.
        """
        session, cycles = _Completion(next(self._names), ask, list(ask.prompt)), []
        try:
            while not session.is_over:
                cycles.append(self._cycle(session, min(gamma, session.remaining - 1)))
        finally:
            schedulers: list[Scheduler[Any] | None] = [self.target, self.draft]
            for scheduler in filter(None, schedulers):
                scheduler.release([Release(session.name)])
                scheduler.step()
        return Text(tuple(session.output), tuple(cycles))

    def _cycle(self, session: _Completion, gamma: int) -> Cycle:
        proposal: Any = Proposal()
        if gamma > 0 and self.draft is not None:
            proposal = _answer(self.draft, ProposeTask(**session.block("draft"), shape=Shape(gamma)))
        task = VerifyTask(**session.block("target"), proposal=proposal, num_top_logprobs=None)
        verdict: Verdict = _answer(self.target, task)
        accepted = [proposal.token_ids[node] for node in verdict.accepted_path]
        for token_id in [*accepted, verdict.next_token_id][: session.remaining]:
            session.tokens.append(token_id)
            if session.is_over:
                break
        return Cycle(len(proposal), verdict.num_tested, len(accepted))


@dataclass
class _Completion:
    """The tokens of one completion, and how many were sent to each worker."""

    name: str
    ask: Ask
    tokens: list[int]
    sent: dict[str, int] = field(default_factory=lambda: {"target": 0, "draft": 0})

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.ask.prompt) :]

    @property
    def remaining(self) -> int:
        return self.ask.max_tokens - len(self.output)

    @property
    def is_over(self) -> bool:
        return self.remaining == 0 or (bool(self.output) and self.tokens[-1] in self.ask.eos_token_ids)

    def block(self, role: str) -> dict[str, Any]:
        """Return the fields of the next task of a worker."""
        sent, self.sent[role] = self.sent[role], len(self.tokens)
        ask = self.ask
        spec = SessionSpec(ask.params, ask.method, len(ask.prompt), ask.eos_token_ids)
        return {
            "request_id": 0,
            "session_id": self.name,
            "epoch": 1,
            "base_position": len(self.tokens),
            "context_start": sent,
            "context": self.tokens[sent:],
            "spec": spec if sent == 0 else None,
            "deadline": math.inf,
            "deliver": lambda task, reply: None,
        }


def _answer(scheduler: Scheduler[Any], task: Any) -> Any:
    """Return the outcome of the only block."""
    scheduler.submit([task])
    while scheduler.has_work:
        for _, reply in scheduler.step():
            if isinstance(reply.outcome, GammarayError):
                raise reply.outcome
            return reply.outcome
    raise InternalError(f"the {scheduler.role} did not respond")
