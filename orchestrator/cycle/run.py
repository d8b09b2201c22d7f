"""One cycle: propose, verify, commit, adapt.

This module does not depend on gRPC, Ray or Redis: drafter, verifier and controller are Protocols. The caller
stores the tokens, see `orchestrator.cycle.pipeline`.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from gammaray.blocks import Shape, Verdict
from gammaray.errors import GammarayError, InternalError, InvalidArgumentError
from gammaray.types import DrafterKind, Proposal, TokenOrigin
from orchestrator.cycle.protocols import Drafter, GammaController, Verifier
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import EMPTY, Cycle, Draft, DraftHere, levels_of

_log = logging.getLogger(__name__)


async def run_cycle(
    session: Session, drafter: Drafter, verifier: Verifier, controller: GammaController
) -> Cycle:
    """Run one cycle, which commits at least one token to the session, and return its result.

    A failing drafter degrades the cycle to gamma 0, which uses the same code path. Cancelling leaves the
    session unchanged.

    Raises:
        GammarayError: The verifier failed.
    """
    start, is_first = time.perf_counter(), session.num_emitted == 0
    shape = controller.next_shape().clipped(session.remaining - 1)  # the target emits one token itself
    shape = shape if session.takes_trees else shape.chain

    draft: Draft = EMPTY
    draft_failed = False
    if shape.depth > 0:
        try:
            draft = _checked(session, await drafter.propose(session, shape), shape)
        except GammarayError as error:
            _log.debug("session %s continues without a proposal: %s", session.session_id, error)
            draft_failed = True
    proposed = time.perf_counter()

    proposal, verdict = await _verify(session, verifier, draft)
    verified = time.perf_counter()

    token_ids, origins = _emitted(session, proposal, verdict)
    kept = session.commit(token_ids)
    text = session.text.take(final=session.finish_reason is not None)

    cycle = Cycle(
        gamma=shape.depth,
        num_drafted=len(proposal),
        num_tested=verdict.num_tested,
        num_accepted=len(verdict.accepted_path),
        token_ids=token_ids[:kept],
        origins=origins[:kept],
        logprobs=verdict.logprobs[:kept],
        text=text,
        finish_reason=session.finish_reason,
        draft_s=proposed - start,
        verify_s=verified - proposed,
        total_s=time.perf_counter() - start,
        is_first=is_first,
        draft_failed=draft_failed,
        shape=shape,
        levels=levels_of(proposal, verdict.accepted_path),
        timing=verdict.timing,
        drafter=proposal.drafter if proposal else DrafterKind.NONE,
        drafter_version=proposal.version,
        draft_worker=proposal.worker if proposal else "",
        is_fallback=draft_failed or proposal.is_fallback or shape.is_fallback,
        is_prepared=proposal.is_prepared,
        started=start,
        ahead_s=verdict.ahead_s,
    )
    controller.observe(cycle)
    return cycle


def _checked(session: Session, draft: Draft, shape: Shape) -> Draft:
    """Return a draft as it is verified, without distributions that the session does not need."""
    if isinstance(draft, DraftHere):
        return draft
    within(draft, shape)
    if session.needs_draft_distributions:
        if len(draft) > 0 and draft.draft_distributions is None:
            raise InternalError(
                f"the drafter sent no draft distributions, which {session.method.value} verification needs"
            )
        return draft
    return draft if draft.draft_distributions is None else replace(draft, draft_distributions=None)


def within(proposal: Proposal, shape: Shape) -> Proposal:
    """Return a proposal after checking its size; InternalError if it is larger than its shape."""
    if proposal.depth > shape.depth:
        raise InternalError(f"the drafter proposed {proposal.depth} levels, {shape.depth} were asked for")
    if len(proposal) > max(shape.depth, shape.max_nodes):
        raise InternalError(f"the drafter proposed {len(proposal)} nodes, asked for were {shape}")
    return proposal


async def _verify(session: Session, verifier: Verifier, draft: Draft) -> tuple[Proposal, Verdict]:
    """Return the verdict and the verified proposal, which is empty if the target refused the given one."""
    if isinstance(draft, DraftHere):
        verdict = await verifier.verify(session, draft)
        drafted = replace(verdict.drafted or EMPTY, drafter=DrafterKind.HEAD)
        return within(drafted, draft.shape), verdict
    try:
        verdict = await verifier.verify(session, draft)
        return verdict.drafted or draft, verdict
    except InvalidArgumentError as error:
        if not draft:
            raise
        _log.warning("session %s: the target refused a proposal: %s", session.session_id, error)
        return EMPTY, await verifier.verify(session, EMPTY)


def _emitted(
    session: Session, proposal: Proposal, verdict: Verdict
) -> tuple[tuple[int, ...], tuple[TokenOrigin, ...]]:
    """Return the emitted tokens and their origins, after checking the verdict against the proposal."""
    parents = proposal.parents or range(-1, len(proposal) - 1)  # those of a chain
    parent = -1
    for node in verdict.accepted_path:
        if not 0 <= node < len(proposal) or parents[node] != parent:
            raise InternalError(
                f"session {session.session_id}: {verdict.accepted_path} is no path of the proposal"
            )
        parent = node
    further = verdict.further_token_ids
    num_emitted = len(verdict.accepted_path) + 1 + len(further)
    if session.num_top_logprobs is not None and len(verdict.logprobs) != num_emitted:
        raise InternalError(
            f"session {session.session_id}: {len(verdict.logprobs)} log-probabilities came back"
        )
    accepted = tuple(proposal.token_ids[node] for node in verdict.accepted_path)
    own = verdict.next_origin, *(TokenOrigin.BONUS for _ in further)
    return (*accepted, verdict.next_token_id, *further), (*(TokenOrigin.ACCEPTED for _ in accepted), *own)
