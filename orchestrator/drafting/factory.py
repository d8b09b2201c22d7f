"""Who drafts for a session and how much: the ladder of a request, and what its rungs learn of the replica."""

from __future__ import annotations

from gammaray.config import OrchestratorSettings
from gammaray.types import DrafterKind, GenerationRequest, VerificationMethod
from gammaray.v1 import draft_service_pb2 as draft_pb
from gammaray.v1 import types_pb2 as pb
from orchestrator.cycle.protocols import GammaController
from orchestrator.cycle.session import Session
from orchestrator.drafting.fallback import FallbackDrafter
from orchestrator.gamma.adaptive import AdaptiveGamma, FixedGamma, Reason
from orchestrator.gamma.bandit import Arms, BanditGamma
from orchestrator.gamma.cost_model import CostModel
from orchestrator.gamma.linear import LinearGamma
from orchestrator.gamma.linear_costs import LinearCosts
from orchestrator.workers.drafter import RemoteDrafter
from orchestrator.workers.pool import WorkerPool

__all__ = ["COMPARED", "Drafting"]

COMPARED = {31: "linear", 30: "bandit"}
"""Controllers that are compared on one cluster, by the request's `max_nodes`."""


class Drafting:
    """Makes the ladders of a replica's sessions, which share what they learn of costs and acceptance.

    Args:
        settings: Deadlines and bounds.
        pool: The draft workers.
        vocab_size: The target's.
    """

    def __init__(
        self,
        settings: OrchestratorSettings,
        pool: WorkerPool[draft_pb.ProposeBlock, draft_pb.ProposeResult],
        vocab_size: int,
    ) -> None:
        self._settings, self._pool, self._vocab_size = settings, pool, vocab_size
        self._linear = {DrafterKind.MODEL: LinearCosts(), DrafterKind.NGRAM: LinearCosts()}
        self._arms = {DrafterKind.MODEL: Arms(), DrafterKind.NGRAM: Arms()}
        self.costs = {DrafterKind.MODEL: CostModel(), DrafterKind.NGRAM: CostModel()}

    @property
    def plain_cycle_s(self) -> float | None:
        """Seconds of a cycle at gamma 0 at this moment; None while unknown."""
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
        # Only sample-and-match walks trees, at any temperature; prompt lookup proposes chains.
        takes_trees = request.verification is VerificationMethod.COUPLED and rung is DrafterKind.MODEL
        # Chains with their laws take as many forwards wherever they end.
        ships_laws = request.verification is VerificationMethod.REJECTION and request.sampling.temperature > 0
        max_gamma = policy.max_gamma or self._settings.max_gamma
        max_nodes = (policy.max_nodes or self._settings.max_nodes) if takes_trees else 0
        ends_early = rung is DrafterKind.MODEL and not ships_laws
        name: str = self._settings.gamma_controller
        if name == "compare":
            name = COMPARED.get(policy.max_nodes, "adaptive")
            max_nodes = self._settings.max_nodes if takes_trees else 0
        if name == "bandit":
            return BanditGamma(max_gamma, self._arms[rung])
        if name == "linear":
            return LinearGamma(max_gamma, self._linear[rung], max_nodes, ends_early=ends_early)
        return AdaptiveGamma(max_gamma, costs, max_nodes, ends_early=ends_early)
