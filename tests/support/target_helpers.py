"""Sessions on a target worker's scheduler, without a worker around it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from gammaray.blocks import Shape, Verdict
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from services.scheduling.tasks import SessionSpec, VerifyTask
from services.target.scheduler import TargetScheduler

NOTHING = Proposal()
_names = itertools.count()


@dataclass
class Run:
    """One session on a scheduler whose idle time is used in full."""

    scheduler: TargetScheduler
    prompt: Sequence[int]
    params: SamplingParams
    method: VerificationMethod = VerificationMethod.COUPLED
    eos_token_ids: tuple[int, ...] = ()
    name: str = field(default_factory=lambda: f"session {next(_names)}")
    tokens: list[int] = field(init=False)
    held: int = 0
    proposals: list[tuple[int, ...]] = field(default_factory=list)
    prepared: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    def block(self, shape: Shape, proposal: Proposal = NOTHING) -> VerifyTask:
        return VerifyTask(
            request_id=0,
            session_id=self.name,
            epoch=1,
            base_position=len(self.tokens),
            context_start=self.held,
            context=self.tokens[self.held :],
            spec=SessionSpec(self.params, self.method, len(self.prompt), self.eos_token_ids),
            deadline=math.inf,
            deliver=lambda task, reply: None,
            proposal=proposal,
            num_top_logprobs=None,
            head=shape,
        )

    def ask(self, block: VerifyTask) -> Verdict:
        """Return a block's verdict, without drafting ahead."""
        self.scheduler.submit([block])
        while not (replies := self.scheduler.step()):
            pass
        verdict = replies[0][1].outcome
        assert isinstance(verdict, Verdict), verdict
        return verdict

    def cycle(self, shape: Shape, proposal: Proposal = NOTHING) -> None:
        verdict = self.ask(self.block(shape, proposal))
        drafted = verdict.drafted or proposal
        self.held = len(self.tokens)
        self.tokens += [drafted.token_ids[node] for node in verdict.accepted_path]
        self.tokens.append(verdict.next_token_id)
        self.proposals.append(drafted.token_ids)
        self.prepared.append(drafted.is_prepared)

    def idle(self) -> None:
        while self.scheduler.has_work:
            assert self.scheduler.step() == []
