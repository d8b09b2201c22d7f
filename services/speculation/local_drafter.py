"""Drafting for several sessions in one call: by a head on the target's hidden states, or by a small model.

The target worker calls it before a verification. Nothing here may make the verification fail: if drafting
fails, the session goes on without proposals.

After a verdict the target worker has what the next proposal needs, while the orchestrator commits the tokens
and asks for it. `prepare` drafts in that time; `draft` then reads what is there and feeds what is missing.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from ctypes import c_int32
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gammaray.blocks import Shape
from gammaray.types import Proposal, VerificationMethod
from services.engine.core.device import raise_if_lost
from services.engine.engine import Engine
from services.scheduling.sessions import SessionCopy
from services.speculation.calibration import Calibration
from services.speculation.proposals import ProposalBuilder
from services.speculation.session import Speculation
from services.speculation.tree import Node

_log = logging.getLogger(__name__)

CHUNK = 512
"""Tokens of one session in one forward of the drafter."""

_TOP_K, _WEIGHT_BITS = 64, 24
"""Rejection: support of a distribution and bits of its weights' sum; large, as nothing is sent."""


@dataclass(slots=True, eq=False)
class Drafting:
    """One proposal being drafted; `is_fed` once it took a forward."""

    session: SessionCopy
    speculation: Speculation
    reading: ProposalBuilder
    nodes: list[Node] = field(default_factory=list)
    is_fed: bool = False


class LocalDrafter(ABC):
    """Drafts for sessions, a whole proposal of each in one call.

    Args:
        engine: Runs the drafter.

    Attributes:
        taps: The hidden states of the target that `take` expects, by the ids of `Engine.tap`.
    """

    taps: Sequence[int] = ()

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._reduced = engine.keep_reduced()
        self._calibration = Calibration()

    @abstractmethod
    def _begin(self, session: SessionCopy, shape: Shape, num_valid: int) -> Drafting | None:
        """Begin a proposal; None if there can be none. `num_valid` is as for `draft`."""

    @abstractmethod
    def _feed_committed(self, drafting: Sequence[Drafting]) -> None:
        """Feed the committed tokens that the drafter lacks, and open the roots, which have no prediction."""

    @abstractmethod
    def _forget(self, session_id: str) -> None:
        """Drop what is kept of a session besides its cache."""

    def take(self, session_id: str, start: int, states: Tensor) -> None:
        """Keep the hidden states of committed positions; where that fails, the session is forgotten.

        Args:
            session_id: The session.
            start: Position of the first.
            states: The target's states [positions, taps, hidden_size].
        """
        try:
            self._take(session_id, start, states)
        except Exception as error:  # the target goes on without proposals
            raise_if_lost(error)
            _log.exception("keeping the hidden states of session %s failed", session_id)
            self.drop(session_id)

    def _take(self, session_id: str, start: int, states: Tensor) -> None:  # noqa: B027 - only heads need them
        """Keep hidden states, see `take`."""

    def drop(self, session_id: str) -> None:
        """Forget a session."""
        self._forget(session_id)
        self.engine.release(session_id)

    def draft(self, asked: Sequence[tuple[SessionCopy, Shape, int]]) -> list[Proposal]:
        """Return a proposal for each session, empty where there can be none or the drafter fails.

        Args:
            asked: Each session with the shape of its proposal and the number of its tokens whose hidden
                states may be known: what is known of later positions is of other tokens.

        Returns:
            The proposals; those that took no forward are marked as prepared.
        """
        return self._try_draft(asked, None)

    def prepare(self, asked: Sequence[tuple[SessionCopy, Shape, int]], stop: c_int32) -> None:
        """Draft what `draft` will probably be asked for next, so that it needs fewer forwards or none.

        Args:
            asked: As for `draft`, after tokens that will probably be committed.
            stop: Once it is not 0, the current forward is the last one.
        """
        if not stop.value:
            self._try_draft(asked, stop)

    def _try_draft(
        self, asked: Sequence[tuple[SessionCopy, Shape, int]], stop: c_int32 | None
    ) -> list[Proposal]:
        try:
            with torch.inference_mode():
                return self._draft(asked, stop)
        except Exception as error:  # the sessions go on without proposals
            raise_if_lost(error)
            _log.exception("drafting for %d sessions failed", len(asked))
            for session, _, _ in asked:
                self.drop(session.session_id)
            return [Proposal()] * len(asked)

    def _draft(self, asked: Sequence[tuple[SessionCopy, Shape, int]], stop: c_int32 | None) -> list[Proposal]:
        begun = [self._begin(*one) for one in asked]
        drafting = [one for one in begun if one is not None]
        if unopened := [one for one in drafting if one.speculation.tree.root.prediction is None]:
            self._feed_committed(unopened)
            for one in unopened:
                one.is_fed = True
        while open_ones := [one for one in drafting if self._reads_on(one)]:
            if stop is not None and stop.value:
                break
            self._feed_nodes(open_ones, stop)
            for one in open_ones:
                one.is_fed = True
        return [Proposal() if one is None else _proposal(one) for one in begun]

    def _speculate(self, session: SessionCopy) -> Speculation:
        """Return a new tree for a session."""
        return Speculation(
            session,
            max_context=self.engine.max_context,
            top_k=_TOP_K,
            bits=_WEIGHT_BITS,
            calibration=self._calibration,
            reduced=self._reduced,
        )

    def _read(self, speculation: Speculation, shape: Shape) -> Drafting | None:
        """Begin to read a proposal below the tree's root."""
        session = speculation.session
        if not speculation.has_noise:
            return None
        if shape.is_tree and session.spec.method is not VerificationMethod.COUPLED:
            shape = replace(shape, max_nodes=0)  # only coupled verification supports trees
        reading = speculation.read(speculation.tree.root, shape)
        return None if reading is None else Drafting(session, speculation, reading)

    def _reads_on(self, one: Drafting) -> bool:
        """Read as far as there are predictions; whether nodes must be fed to read further."""
        one.nodes = one.reading.go_on()[:CHUNK]
        if not one.nodes:
            one.speculation.sent = one.reading
        return bool(one.nodes)

    def _feed_nodes(self, drafting: Sequence[Drafting], stop: c_int32 | None) -> None:
        one, count = drafting[0], drafting[0].reading.run_length
        if len(drafting) == 1 and count > 1 and one.speculation.can_run(self.engine, one.nodes):
            token_ids, logits = one.speculation.run(self.engine, one.nodes[0], count, stop=stop)
            one.speculation.open_run(self.engine, one.nodes[0], token_ids, logits)
            return
        feeds = [one.speculation.feed(one.nodes) for one in drafting]
        for one, logits in zip(drafting, self.engine.step(feeds), strict=True):
            one.speculation.open(self.engine, one.nodes, logits)


def _proposal(one: Drafting) -> Proposal:
    proposal = one.reading.proposal()
    return replace(proposal, is_prepared=len(proposal) > 0 and not one.is_fed)
