"""Creates the drafter of a session with its gamma controllers; a replica's sessions share cost statistics."""

from __future__ import annotations

from gammaray.config import OrchestratorSettings
from gammaray.types import DrafterKind, GenerationRequest, VerificationMethod
from gammaray.v1 import draft_service_pb2 as draft_pb
from gammaray.v1 import types_pb2 as pb
from orchestrator.cycle.protocols import GammaController
from orchestrator.cycle.session import Session
from orchestrator.drafting.fallback import FallbackDrafter
from orchestrator.gamma.adaptive import AdaptiveGamma
from orchestrator.gamma.cost_model import CostModel
from orchestrator.gamma.fixed import FixedGamma, Reason
from orchestrator.workers.drafter import RemoteDrafter
from orchestrator.workers.pool import WorkerPool

__all__ = ["Drafting"]


class Drafting:
    """Creates the drafters of a replica's sessions, which share statistics of costs and acceptance.

    Args:
        settings: Deadlines and bounds.
        pool: The draft workers.
        vocab_size: Vocabulary size of the target.
    """

    def __init__(
        self,
        settings: OrchestratorSettings,
        pool: WorkerPool[draft_pb.ProposeBlock, draft_pb.ProposeResult],
        vocab_size: int,
    ) -> None:
        self._settings, self._pool, self._vocab_size = settings, pool, vocab_size
        self.costs = {DrafterKind.MODEL: CostModel(), DrafterKind.NGRAM: CostModel()}

    @property
    def plain_cycle_s(self) -> float | None:
        """Estimated seconds of a cycle at gamma 0; None while unknown."""
        found = (costs.plain_cycle_s for costs in self.costs.values())
        return next((seconds for seconds in found if seconds is not None), None)

    def ladder(self, session: Session, request: GenerationRequest, spec: pb.SessionSpec) -> FallbackDrafter:
        """Return the drafter and controller of a session."""
        remote = RemoteDrafter(
            self._pool,
            spec,
            timeout_s=self._settings.propose_timeout_s,
            prefill_timeout_s=self._settings.verify_timeout_s,
            vocab_size=self._vocab_size,
        )
        if request.drafter is DrafterKind.NONE:
            plain = FixedGamma(0, self.costs[DrafterKind.MODEL], reason=Reason.NO_DRAFTER)
            return FallbackDrafter(session, DrafterKind.NONE, remote, {DrafterKind.NONE: plain})
        controllers = {rung: self._controller(rung, request) for rung in self.costs}
        return FallbackDrafter(session, request.drafter, remote, controllers)

    def _controller(self, rung: DrafterKind, request: GenerationRequest) -> GammaController:
        policy, costs = request.gamma, self.costs[rung]
        if policy.fixed is not None:
            return FixedGamma(policy.fixed, costs, policy.max_nodes)
        # Only coupled verification takes trees, at any temperature; prompt lookup proposes chains.
        takes_trees = request.verification is VerificationMethod.COUPLED and rung is DrafterKind.MODEL
        # A chain with distributions costs the same number of forward passes wherever it ends.
        ships_laws = request.verification is VerificationMethod.REJECTION and request.sampling.temperature > 0
        return AdaptiveGamma(
            policy.max_gamma or self._settings.max_gamma,
            costs,
            (policy.max_nodes or self._settings.max_nodes) if takes_trees else 0,
            ends_early=rung is DrafterKind.MODEL and not ships_laws,
        )
