"""Drafts proposals for many sessions in lock-step: each forward feeds one token of every drafting session."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from gammaray.types import Proposal, SamplingParams, SparseDistribution
from services.batching import Scheduler
from services.draft.sampling import propose_token
from services.engine.engine import Engine
from services.engine.processing import processed_log_probs
from services.planning import Limits, Running
from services.sessions import Session
from services.tasks import ProposeTask

__all__ = ["DraftScheduler"]

_NO_PROPOSAL = Proposal()


@dataclass(slots=True, eq=False)
class _Drafting(Running[ProposeTask]):
    """A proposal being drafted; `tail` holds its tokens so far.

    Args:
        params: What the draft's logits are processed with; None when its own logits will do.
        gamma: Length to stop at.
        output: Tokens after the prompt, drafted ones included.
        confidence: Probability that all tokens so far are accepted, as far as the draft can tell.
    """

    params: SamplingParams | None = None
    gamma: int = 0
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    distributions: list[SparseDistribution] = field(default_factory=list)
    confidence: float = 1.0


class DraftScheduler(Scheduler[ProposeTask]):
    """Sessions join when their block arrives and leave with their last token.

    The cache keeps the drafted tokens that were fed; when the next block's committed tokens agree with them,
    only the one or two that lack are fed.

    Args:
        engine: The draft model and its cache.
        limits: Bounds of one forward.
        draft_top_k: Largest support of a shipped distribution.
        weight_bits: Its weights' sum is 2^weight_bits.
    """

    def __init__(self, engine: Engine, limits: Limits, *, draft_top_k: int, weight_bits: int) -> None:
        super().__init__(engine, limits)
        self._draft_top_k, self._weight_bits = draft_top_k, weight_bits

    def _start(self, task: ProposeTask, session: Session) -> Running[ProposeTask] | Proposal:
        gamma = min(task.gamma, self.engine.max_context - task.base_position)
        if gamma <= 0:
            return _NO_PROPOSAL
        params = _draft_params(session.spec.params)
        drafting = _Drafting(task, session, [], num_logits=1, params=params, gamma=gamma)
        if params is not None:
            drafting.prompt, drafting.output = session.prompt, session.output
        return drafting

    def _advance(self, running: Running[ProposeTask], logits: Tensor) -> Proposal | None:
        assert isinstance(running, _Drafting)
        drafting, task, spec = running, running.task, running.session.spec
        if drafting.params is not None:
            logits = processed_log_probs(
                logits,
                drafting.params,
                prompt=drafting.prompt,
                output=drafting.output,
                proposal=_NO_PROPOSAL,
                eos_token_ids=spec.eos_token_ids,
            )
        token_id, distribution, confidence = propose_token(
            spec.method,
            logits[0],
            drafting.session.noise,
            task.base_position,
            task.base_position + len(drafting.tail),
            self._draft_top_k,
            self._weight_bits,
            want_confidence=task.stop_threshold > 0,
        )
        drafting.tail.append(token_id)
        drafting.output.append(token_id)
        if distribution is not None:
            drafting.distributions.append(distribution)
        drafting.confidence *= confidence
        if not self._is_finished(drafting, token_id):
            return None
        return Proposal(tuple(drafting.tail), None, tuple(drafting.distributions) or None)

    def _is_finished(self, drafting: _Drafting, token_id: int) -> bool:
        """Whether the chain ends with this token.

        Dropping nothing that was drawn keeps every method lossless: each token's place in the proposal is
        decided before it is drawn.
        """
        return (
            len(drafting.tail) >= drafting.gamma
            or token_id in drafting.session.spec.eos_token_ids
            or drafting.confidence < drafting.task.stop_threshold
        )


def _draft_params(params: SamplingParams) -> SamplingParams | None:
    """What to process the draft's logits with; None when the plain logits have the same best token.

    At temperature 0 the argmax is all that counts, and a temperature of 1 with no token dropped keeps it and
    leaves a distribution that the confidence can be read from.
    """
    if params.temperature > 0:
        return params
    greedy = replace(params, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
    plain: Any = SamplingParams(seed=params.seed, sample_index=params.sample_index)
    return None if greedy == plain else greedy
