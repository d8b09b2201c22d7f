"""Drafting in a target worker, by a small draft model or by a head (`services.speculation.head_drafter`).

The target worker calls it before a verification. Nothing here may make the verification fail: if drafting
fails, the session continues without proposals.

After a verdict the target worker has what the next proposal needs, while the orchestrator commits the tokens
and asks for it. `prepare` drafts in that time; `draft` then reads what is there and feeds what is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from ctypes import c_int32
from dataclasses import replace

import torch
from torch import Tensor

from gammaray.blocks import Shape
from gammaray.types import Proposal
from services.engine.core.batch import SequenceInput
from services.engine.core.device import raise_if_lost
from services.engine.core.session_cache import common_prefix
from services.engine.engine import Engine
from services.scheduling.sessions import SessionCopy
from services.speculation.drafting import PendingProposal
from services.speculation.fixed_head import Head
from services.speculation.predictor import DraftModel
from services.speculation.session import Speculation

_log = logging.getLogger(__name__)

Request = tuple[SessionCopy, Shape, int]

CHUNK = 512
"""Tokens of one session in one forward of the drafter."""

_WEIGHT_BITS = 24
"""Rejection: bits of a distribution's weights' sum; many, as nothing is sent."""


class TargetHead(Head):
    """What drafts for the sessions of our own engine; this base class proposes nothing."""

    taps: Sequence[int] = ()  # the target's hidden states that `take` expects, by the ids of `Engine.tap`

    def draft(self, requests: Sequence[Request]) -> list[Proposal]:
        """Return a proposal for each session, empty where there can be none or the drafter fails.

        Args:
            requests: Each session with the shape of its proposal and the number of its tokens whose hidden
                states may be known: what is known of later positions is of other tokens.

        Returns:
            The proposals; those that took no forward are marked as prepared.
        """
        return [Proposal()] * len(requests)

    def prepare(self, requests: Sequence[Request], stop: c_int32) -> None:
        """Draft what `draft` will probably be called for next, so that it needs fewer forwards or none.

        Args:
            requests: As for `draft`, after tokens that will probably be committed.
            stop: Once it is not 0, the current forward is the last one.
        """


class LocalDrafter(TargetHead):
    """Drafts whole proposals with an engine whose logits are those of the target's tokens."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.taps = engine, engine.target_taps
        self._model = DraftModel(engine, bits=_WEIGHT_BITS)
        self._speculations: dict[str, Speculation] = {}

    def end(self, session: SessionCopy) -> None:
        self.drop(session.session_id)

    def take(self, session_id: str, start: int, states: Tensor) -> None:
        try:
            self._take(session_id, start, states)
        except Exception as error:  # the target continues without proposals
            raise_if_lost(error)
            _log.exception("keeping the hidden states of session %s failed", session_id)
            self.drop(session_id)

    def drop(self, session_id: str) -> None:
        """Forget a session."""
        self._speculations.pop(session_id, None)
        self.engine.release(session_id)

    def draft(self, requests: Sequence[Request]) -> list[Proposal]:
        return self._try_draft(requests, None)

    def prepare(self, requests: Sequence[Request], stop: c_int32) -> None:
        if not stop.value:
            self._try_draft(requests, stop)

    def _try_draft(self, requests: Sequence[Request], stop: c_int32 | None) -> list[Proposal]:
        try:
            with torch.inference_mode():
                return self._draft(requests, stop)
        except Exception as error:  # the sessions continue without proposals
            raise_if_lost(error)
            _log.exception("drafting for %d sessions failed", len(requests))
            for session, _, _ in requests:
                self.drop(session.session_id)
            return [Proposal()] * len(requests)

    def _draft(self, requests: Sequence[Request], stop: c_int32 | None) -> list[Proposal]:
        drafts = [self._begin(*request) for request in requests]
        pending = [draft for draft in drafts if draft is not None]
        while unread := [draft for draft in pending if draft.advance()]:
            if stop is not None and stop.value:
                break
            feeds = [self._feed(draft) for draft in unread]
            if len(unread) == 1 and feeds[0].num_logits and unread[0].can_run:
                unread[0].take(unread[0].run(feeds[0], stop))
                continue
            for draft, feed, logits in zip(unread, feeds, self.engine.step(feeds), strict=True):
                if feed.num_logits:
                    draft.take(logits)
        return [Proposal() if draft is None else _proposal(draft) for draft in drafts]

    def _begin(self, session: SessionCopy, shape: Shape, num_valid: int) -> PendingProposal | None:
        """Begin a proposal; None if there can be none. `num_valid` is as for `draft`."""
        speculation = self._speculations.get(session.session_id)
        if speculation is None or speculation.session is not session:
            speculation = self._speculations[session.session_id] = Speculation(self._model, session)
        if not self._follow(speculation, num_valid) or not speculation.has_noise:
            return None
        reading = speculation.read(speculation.tree.root, shape)
        return None if reading is None else PendingProposal(speculation, reading, CHUNK)

    def _follow(self, speculation: Speculation, num_valid: int) -> bool:
        """Move the tree and the cache to the session's last token; return whether that is possible."""
        session, engine = speculation.session, self.engine
        # Cycles may have passed in which others drafted: `changed_from` says nothing about those.
        same = common_prefix(list(engine.tokens(session.session_id)), session.tokens)
        if same == len(session.tokens) and speculation.is_at_end:
            return True
        self._note_outcome(speculation)
        if same < speculation.tree.base or not speculation.follow():
            engine.truncate(session.session_id, min(same, len(session.tokens) - 1))
            speculation.begin()
        return True

    @staticmethod
    def _note_outcome(speculation: Speculation) -> None:
        """Note how far a tree's choices were right: chains here read no confidence."""
        if speculation.sent is not None and speculation.sent.shape.is_tree:
            speculation.note_outcome()

    def _feed(self, pending: PendingProposal) -> SequenceInput:
        start = self.engine.length(pending.speculation.session.session_id)
        return pending.feed(start, min(CHUNK, pending.num_tokens - start))

    def _take(self, session_id: str, start: int, states: Tensor) -> None:
        """Keep hidden states, which only heads read."""


def _proposal(pending: PendingProposal) -> Proposal:
    proposal = pending.reading.proposal()
    return replace(proposal, is_prepared=len(proposal) > 0 and not pending.is_fed)
