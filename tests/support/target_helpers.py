"""Sessions on a target worker's scheduler, without a worker around it."""

from collections.abc import Sequence
from typing import Any

from gammaray.blocks import Shape, Verdict
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from services.own.target_scheduler import TargetScheduler
from services.scheduling.tasks import VerifyTask
from tests.support.vllm_helpers import NOTHING, Session, answers


class Run(Session):
    """One session on a scheduler whose idle time is used in full; each block brings the parameters."""

    def __init__(
        self,
        scheduler: TargetScheduler,
        prompt: Sequence[int],
        params: SamplingParams,
        method: VerificationMethod = VerificationMethod.COUPLED,
        **fields: Any,
    ) -> None:
        super().__init__(prompt, params, method, **fields)
        self.scheduler = scheduler
        self.proposals: list[tuple[int, ...]] = []
        self.prepared: list[bool] = []

    def block(self, shape: Shape, proposal: Proposal = NOTHING) -> VerifyTask:
        return super().block(proposal, spec=self.spec(), head=shape)

    def ask(self, block: VerifyTask) -> Verdict:
        """Return a block's verdict, without drafting ahead."""
        (reply,) = answers(self.scheduler, [block])
        return self.take(block, reply)

    def cycle(self, shape: Shape, proposal: Proposal = NOTHING) -> None:
        drafted = self.ask(self.block(shape, proposal)).drafted or proposal
        self.proposals.append(drafted.token_ids)
        self.prepared.append(drafted.is_prepared)

    def idle(self) -> None:
        while self.scheduler.has_work:
            assert self.scheduler.step() == []
