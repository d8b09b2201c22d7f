"""Creates the drafters and the gamma controller of a session; a replica's sessions share their statistics."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from gammaray.config import OrchestratorSettings
from gammaray.errors import InvalidArgumentError
from gammaray.grammar.matcher import GrammarState
from gammaray.types import DrafterKind, GenerationRequest, VerificationMethod
from gammaray.v1 import draft_service_pb2 as draft_pb
from gammaray.v1 import types_pb2 as pb
from orchestrator.cycle.session import Session
from orchestrator.drafting.choice import AdaptiveChoice, FixedChoice
from orchestrator.drafting.corpus import Corpus
from orchestrator.drafting.grammar import GrammarDrafter
from orchestrator.drafting.head import TargetHead
from orchestrator.drafting.http.drafter import ServerDrafter
from orchestrator.drafting.http.server import DraftServer
from orchestrator.drafting.matches import TextDrafter
from orchestrator.drafting.prediction import PredictionDrafter
from orchestrator.drafting.prompt_lookup import PromptLookup
from orchestrator.drafting.session_drafter import ModelDrafter, SessionDrafter
from orchestrator.drafting.suffix_decoding import SuffixDrafter
from orchestrator.drafting.text_gamma import TextGamma
from orchestrator.gamma.adaptive import AdaptiveGamma
from orchestrator.gamma.cost_model import CostModel
from orchestrator.gamma.fixed import FixedGamma, Reason
from orchestrator.workers.drafter import RemoteDrafter
from orchestrator.workers.pool import WorkerPool
from orchestrator.workers.verifier import VERIFY_TIMEOUT_S, TargetPool, has_head, takes_trees

__all__ = ["Drafting"]

PROPOSE_TIMEOUT_S = 2.0
"""Longest wait for one proposal, after which the cycle goes on without one; usual delays lower it, see
`orchestrator.workers.backoff.Patience`."""

MAX_TEXT_GAMMA = 24
"""Upper bound of an adaptive gamma for proposals that are looked up: repetitions are longer than what a model
drafts well, and cost nothing to propose."""

MAX_CORPUS_TOKENS = 2**20
"""Most tokens of past outputs that a replica keeps, 20 bytes each: 20 MiB, or 4096 outputs of 256 tokens."""


class Drafting:
    """Creates the drafters of a replica's sessions, which share statistics of costs and acceptance.

    Args:
        settings: Deadlines and bounds.
        pool: The draft workers.
        targets: The target workers, of which some may have heads.
        vocab_size: Vocabulary size of the target.
        server: The server that drafts in place of draft workers, if any.

    Attributes:
        costs: Costs and acceptance over all sessions.
        corpus: Past outputs, in which later sessions of the same tenant look up continuations.
    """

    def __init__(
        self,
        settings: OrchestratorSettings,
        pool: WorkerPool[draft_pb.ProposeBlock, draft_pb.ProposeResult],
        targets: TargetPool,
        vocab_size: int,
        server: DraftServer | None = None,
    ) -> None:
        self._settings, self._pool, self._vocab_size = settings, pool, vocab_size
        self._targets = targets
        self._server = server
        self.costs = CostModel()
        # Proposals from past outputs are a shared cache: without prefix caching nothing is shared.
        max_tokens = MAX_CORPUS_TOKENS if settings.prefix_caching else 0
        self.corpus = Corpus(max_tokens, settings.max_tenant_share, settings.session_ttl_s)

    def open(
        self,
        session: Session,
        request: GenerationRequest,
        spec: pb.SessionSpec,
        prediction: Sequence[int] = (),
        grammar: GrammarState | None = None,
    ) -> tuple[SessionDrafter, AdaptiveChoice | FixedChoice]:
        """Return the drafters of a session and the controller that chooses among them.

        Args:
            session: The session.
            request: Says which drafter is allowed, and bounds gamma.
            spec: Session parameters for the draft worker.
            prediction: Token ids of the request's prediction.
            grammar: The session's grammar before the first token of the completion; None without one.
        """
        settings, policy, allowed = self._settings, request.gamma, request.drafter
        session.takes_trees = self._takes_trees
        remote = self._remote(session, request, spec)
        kind = DrafterKind.MODEL if self._server is None else DrafterKind.SERVER
        if isinstance(remote, TargetHead):
            kind, session.uses_head, session.has_head = DrafterKind.HEAD, True, True
        by_server = MAX_TEXT_GAMMA if settings.max_gamma > 0 else 0
        max_text = policy.fixed or policy.max_gamma or by_server
        texts = self._texts(request, prediction) if max_text > 0 else []
        forced = GrammarDrafter(grammar) if grammar is not None and max_text > 0 else None
        drafter = SessionDrafter(remote, texts, max_text, forced)
        if allowed is DrafterKind.NONE:
            plain = FixedGamma(0, self.costs, reason=Reason.NO_DRAFTER)
            return drafter, FixedChoice(session, drafter, allowed, plain)
        if policy.fixed is not None:
            max_nodes = policy.max_nodes if self._server is None else 0
            fixed = FixedGamma(policy.fixed, self.costs, max_nodes, drafter=kind)
            return drafter, FixedChoice(session, drafter, allowed, fixed)
        text = TextGamma(max_text, self.costs, request.sampling.temperature)
        return drafter, AdaptiveChoice(
            session, drafter, allowed, self._model(request, kind), text, self.costs
        )

    def check(self, request: GenerationRequest) -> None:
        """Check that a new request can use the drafter that it allows.

        Raises:
            InvalidArgumentError: It allows a server and there is none, or the verification method would need
                the distributions from which a server draws, which no server sends.
        """
        if self._server is None and request.drafter is DrafterKind.SERVER:
            allowed = "another drafter: this cluster has no server that drafts (draft_server)"
            raise InvalidArgumentError("drafter", request.drafter.value, allowed)
        if (
            request.drafter is DrafterKind.HEAD
            and not self._has_head
            and self._targets.pick_any() is not None
        ):
            allowed = "another drafter: no target worker of this cluster has a head (head)"
            raise InvalidArgumentError("drafter", request.drafter.value, allowed)
        if self._server is not None and request.drafter.is_model and _tests_distributions(request):
            method = request.verification.value
            allowed = (
                "coupled or naive: a server drafts for this cluster and sends no draft distribution, without "
                f"which {method} is not exact; or {method} with drafter ngram, suffix, prediction or none"
            )
            raise InvalidArgumentError("verification", method, allowed)

    def _remote(
        self, session: Session, request: GenerationRequest, spec: pb.SessionSpec
    ) -> ModelDrafter | None:
        """Return the drafter that has a model, if the request allows one."""
        bounds = {"timeout_s": PROPOSE_TIMEOUT_S, "prefill_timeout_s": VERIFY_TIMEOUT_S}
        if self._server is not None:
            if not request.drafter.is_model or _tests_distributions(request):
                return None
            # Names of tenants and of sessions are not for the server: it only compares the salts.
            salt = spec.cache_salt if spec.HasField("cache_salt") else session.session_id
            hashed = hashlib.sha256(salt.encode()).hexdigest()[:32]
            return ServerDrafter(self._server, hashed, **bounds)
        if request.drafter.is_model and self._has_head:
            return TargetHead()
        if request.drafter is not DrafterKind.MODEL:
            return None
        return RemoteDrafter(self._pool, spec, vocab_size=self._vocab_size, **bounds)

    @property
    def kinds(self) -> list[DrafterKind]:
        """What can draft for a session now: models first, then look-ups."""
        found = [DrafterKind.SERVER] if self._server is not None else []
        if not found and self._has_head:
            found = [DrafterKind.HEAD]
        elif not found and self._pool.pick_any() is not None:
            found = [DrafterKind.MODEL]
        return [*found, DrafterKind.NGRAM, DrafterKind.SUFFIX, DrafterKind.PREDICTION, DrafterKind.GRAMMAR]

    @property
    def _has_head(self) -> bool:
        """Whether a usable target worker has a head."""
        return self._targets.pick_any(has_head) is not None

    @property
    def _takes_trees(self) -> bool:
        """Whether a usable target worker verifies trees, or none is known yet."""
        return self._targets.pick_any(takes_trees) is not None or self._targets.pick_any() is None

    def _texts(self, request: GenerationRequest, prediction: Sequence[int]) -> list[TextDrafter]:
        """Return the text drafters that a request may use; a draft model may be replaced by any of them.

        Rejection sampling, of tokens or blocks, is exact only if a proposal does not depend on the noise that
        tests it. A past output of a request with the same seed does, so these methods do not use past
        outputs.
        """
        allowed = request.drafter
        is_any = allowed is DrafterKind.MODEL
        corpus = None if _tests_distributions(request) else self.corpus
        texts: list[TextDrafter] = []
        if prediction and (is_any or allowed is DrafterKind.PREDICTION):
            texts.append(PredictionDrafter(prediction))
        if is_any or allowed is DrafterKind.SUFFIX:
            texts.append(SuffixDrafter(corpus))
        if is_any or allowed is DrafterKind.NGRAM:
            texts.append(PromptLookup())
        return texts

    def _model(self, request: GenerationRequest, kind: DrafterKind) -> AdaptiveGamma:
        """Return the controller of the proposals of the draft model, head or server."""
        settings, policy = self._settings, request.gamma
        max_gamma = policy.max_gamma or settings.max_gamma
        if kind is DrafterKind.SERVER:  # it returns one chain
            return AdaptiveGamma(max_gamma, self.costs, drafter=kind)
        # Only coupled verification takes trees, at any temperature.
        may_be_tree = request.verification is VerificationMethod.COUPLED and self._takes_trees
        max_nodes = (policy.max_nodes or settings.max_nodes) if may_be_tree else 0
        return AdaptiveGamma(max_gamma, self.costs, max_nodes, drafter=kind)


def _tests_distributions(request: GenerationRequest) -> bool:
    return request.verification.uses_draft_distributions and request.sampling.temperature > 0
