"""Sessions on a target worker's scheduler, without a worker around it."""

from collections.abc import Sequence
from typing import Any

from gammaray.blocks import Shape, Verdict
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from services.own.target_scheduler import TargetScheduler
from services.scheduling.tasks import Reply, VerifyTask
from tests.support.vllm_helpers import NOTHING, Session


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
        self.scheduler.submit([block])
        replies = list[Reply]()
        while not replies:
            replies = [reply for task, reply in self.scheduler.step() if task is block]
        verdict = replies[0].outcome
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
