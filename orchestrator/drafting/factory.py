"""Creates the drafters and the gamma controller of a session; a replica's sessions share their statistics."""

from __future__ import annotations

from collections.abc import Sequence

from gammaray.config import OrchestratorSettings
from gammaray.errors import InvalidArgumentError
from gammaray.grammar.matcher import GrammarState
from gammaray.types import DrafterKind, GenerationRequest, VerificationMethod
from gammaray.v1 import draft_service_pb2 as draft_pb
from gammaray.v1 import types_pb2 as pb
from orchestrator.access.caller import TENANT_SHARE
from orchestrator.control.adaptive import FEW, AdaptiveGamma
from orchestrator.control.costs import CostModel
from orchestrator.control.either import EitherModel
from orchestrator.control.fixed import FixedGamma, Reason
from orchestrator.control.row_costs import RowCosts
from orchestrator.cycle.session import Session
from orchestrator.drafting.corpus import Corpus
from orchestrator.drafting.grammar import GrammarDrafter
from orchestrator.drafting.head import TargetHead
from orchestrator.drafting.matches import TextDrafter
from orchestrator.drafting.prediction import PredictionDrafter
from orchestrator.drafting.session_drafter import Controller, DrafterChoice, ModelDrafter, SessionDrafter
from orchestrator.drafting.suffix_decoding import SuffixDrafter
from orchestrator.workers.drafter import RemoteDrafter
from orchestrator.workers.pool import WorkerPool
from orchestrator.workers.verifier import VERIFY_TIMEOUT_S, TargetPool, has_head, info_of, takes_trees

PROPOSE_TIMEOUT_S = 2.0
"""Longest wait for one proposal, after which the cycle continues without one; usual delays lower it, see
`orchestrator.workers.backoff.AdaptiveTimeout`."""

MAX_TEXT_GAMMA = 24
"""Upper bound of an adaptive gamma for proposals that are looked up: repetitions are longer than what a model
drafts well, and cost nothing to propose."""

MAX_CORPUS_TOKENS = 2**20
"""Most tokens of past outputs that a replica keeps, 24 bytes each: 24 MiB, or 4096 outputs of 256 tokens."""


class Drafting:
    """Creates the drafters of a replica's sessions, which share statistics and past outputs (the corpus)."""

    def __init__(
        self,
        settings: OrchestratorSettings,
        pool: WorkerPool[draft_pb.ProposeBlock, draft_pb.ProposeResult],
        targets: TargetPool,
        vocab_size: int,
    ) -> None:
        self._settings, self._pool, self._vocab_size = settings, pool, vocab_size
        self._targets = targets
        self._costs = {kind: CostModel() for kind in DrafterKind if kind.is_model}
        self._has_rows = False
        # Proposals from past outputs are a shared cache: without prefix caching nothing is shared.
        max_tokens = MAX_CORPUS_TOKENS if settings.prefix_caching else 0
        self.corpus = Corpus(max_tokens, TENANT_SHARE, settings.session_ttl_s)

    def open(
        self,
        session: Session,
        request: GenerationRequest,
        spec: pb.SessionSpec,
        prediction: Sequence[int] = (),
        grammar: GrammarState | None = None,
    ) -> tuple[SessionDrafter, DrafterChoice]:
        """Return the drafters of a session, and what chooses among them.

        `grammar` is the state before the completion; None without one, and where drafting by it is too slow.
        """
        settings, policy = self._settings, request.gamma
        session.takes_trees = self._takes_trees
        models = self._models(request, spec)
        self._take_row_costs()
        if DrafterKind.HEAD in models:
            session.uses_head, session.has_head = True, self._has_head
        max_text = policy.fixed or policy.max_gamma or (MAX_TEXT_GAMMA if settings.max_gamma > 0 else 0)
        texts = self._texts(request, prediction) if max_text > 0 else []
        forced = GrammarDrafter(grammar) if grammar is not None and max_text > 0 else None
        fixed = 0 if request.drafter is DrafterKind.NONE else policy.fixed
        drafter = SessionDrafter(models, texts, max_text, forced, fixed)
        controller: Controller
        if fixed is None:
            can_end = request.verification is VerificationMethod.COUPLED  # at any length
            adaptive = {
                kind: AdaptiveGamma(
                    policy.max_gamma or settings.max_gamma,
                    self._costs[kind],
                    self._max_nodes(request),
                    max_match=max_text,
                    temperature=request.sampling.temperature,
                    few=FEW if can_end and kind is DrafterKind.MODEL else 0,
                )
                for kind in models or [DrafterKind.MODEL]
            }
            controller = EitherModel(adaptive) if len(adaptive) > 1 else next(iter(adaptive.values()))
        else:
            reason = Reason.NO_DRAFTER if request.drafter is DrafterKind.NONE else None
            costs = self._costs[next(iter(models), DrafterKind.MODEL)]
            controller = FixedGamma(fixed, costs, policy.max_nodes if fixed else 0, reason)
        return drafter, DrafterChoice(session, drafter, controller)

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request that allows a head alone when no target worker has one."""
        if (
            request.drafter is DrafterKind.HEAD
            and not self._has_head
            and self._targets.pick_any() is not None
        ):
            allowed = "another drafter: no target worker of this cluster has a head (head)"
            raise InvalidArgumentError("drafter", request.drafter.value, allowed)

    def _take_row_costs(self) -> None:
        """Take what rows cost from a target worker that has timed its forwards; once, as it sets a unit."""
        link = None if self._has_rows else self._targets.pick_any(lambda link: bool(info_of(link).forward_s))
        if link is not None:
            self._has_rows = True
            for costs in self._costs.values():
                costs.rows = RowCosts(info_of(link).forward_s)

    def _models(self, request: GenerationRequest, spec: pb.SessionSpec) -> dict[DrafterKind, ModelDrafter]:
        found: dict[DrafterKind, ModelDrafter] = {}
        if request.drafter is DrafterKind.HEAD or (request.drafter.is_model and self._has_head):
            found[DrafterKind.HEAD] = TargetHead()
        if request.drafter is DrafterKind.MODEL and (not found or self._pool.pick_any() is not None):
            found[DrafterKind.MODEL] = RemoteDrafter(
                self._pool,
                spec,
                vocab_size=self._vocab_size,
                timeout_s=PROPOSE_TIMEOUT_S,
                prefill_timeout_s=VERIFY_TIMEOUT_S,
            )
        return found

    @property
    def plain_cycle_s(self) -> float | None:
        """Estimated seconds of a cycle at gamma 0; None while unknown."""
        found = (costs.plain_cycle_s for costs in self._costs.values())
        return next((seconds for seconds in found if seconds is not None), None)

    @property
    def kinds(self) -> list[DrafterKind]:
        """What can draft for a session now: models first, then look-ups."""
        found = [DrafterKind.HEAD] if self._has_head else []
        if self._pool.pick_any() is not None:
            found.append(DrafterKind.MODEL)
        return [*found, DrafterKind.SUFFIX, DrafterKind.PREDICTION, DrafterKind.GRAMMAR]

    @property
    def _has_head(self) -> bool:
        return self._targets.pick_any(has_head) is not None

    @property
    def _takes_trees(self) -> bool:
        """Whether a usable target worker verifies trees, or none is known yet."""
        return self._targets.pick_any(takes_trees) is not None or self._targets.pick_any() is None

    def _texts(self, request: GenerationRequest, prediction: Sequence[int]) -> list[TextDrafter]:
        """Return the text drafters that a request may use; a draft model may be replaced by any of them.

        Rejection sampling, of tokens or blocks, is exact only if a proposal does not depend on the noise that
        tests it. A past output of a request with the same seed does, so these methods use none.
        """
        tests_drafts = request.verification.uses_draft_distributions and request.sampling.temperature > 0
        texts: list[TextDrafter] = []
        if prediction and request.drafter in (DrafterKind.MODEL, DrafterKind.PREDICTION):
            texts.append(PredictionDrafter(prediction))
        if request.drafter in (DrafterKind.MODEL, DrafterKind.SUFFIX):
            texts.append(SuffixDrafter(None if tests_drafts else self.corpus))
        return texts

    def _max_nodes(self, request: GenerationRequest) -> int:
        """Return the upper bound of a proposal's nodes; only coupled verification takes trees."""
        allows_trees = request.verification is VerificationMethod.COUPLED and self._takes_trees
        return request.gamma.max_nodes if allows_trees else 0
