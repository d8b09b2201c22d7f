"""Drafts with a head in the target worker, from the hidden states of the forwards that it runs anyway.

The states of committed positions are kept as features until the head is fed the tokens after them. They are a
cache: where features are missing, as behind a shared prefix or after an eviction, the head starts later and
does not attend to the tokens before. Without the feature of the last position but one there is no proposal.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gammaray.blocks import Shape
from gammaray.types import Proposal, VerificationMethod
from services.engine.core.errors import CacheFullError
from services.engine.engine import SequenceInput
from services.heads.runner import HeadEngine
from services.scheduling.sessions import SessionCopy
from services.speculation.calibration import Calibration
from services.speculation.proposals import ProposalBuilder
from services.speculation.session import Speculation
from services.speculation.tree import Node

__all__ = ["HeadDrafter"]

_log = logging.getLogger(__name__)

MAX_FEATURES = 4096
"""Features of one session that wait for the head; the oldest are dropped."""

CHUNK = 512
"""Tokens of one session in one forward of the head."""

TOP_K, WEIGHT_BITS = 64, 24
"""Rejection: support of a distribution and bits of its weights' sum; nothing is sent, so both are large."""


@dataclass(slots=True)
class _Features:
    """The features of one session that the head has not read.

    Attributes:
        start: Position of the first one.
        rows: [positions, width].
        fed: How many of the session's tokens the head was fed with features.
        lowest: The first position at which tokens may have changed since.
        speculation: The session's tree.
    """

    start: int
    rows: Tensor
    fed: int = 0
    lowest: int = 0
    speculation: Speculation | None = None

    def truncate(self, end: int) -> None:
        """Drop the features of the positions from `end` on."""
        if end < self.end:
            self.rows = self.rows[: max(0, end - self.start)]
            self.start = min(self.start, end)
            self.lowest = min(self.lowest, end)

    @property
    def end(self) -> int:
        """Position after the last feature."""
        return self.start + len(self.rows)


@dataclass(slots=True, eq=False)
class _Drafting:
    """One proposal being drafted."""

    session: SessionCopy
    speculation: Speculation
    reading: ProposalBuilder
    nodes: list[Node] = field(default_factory=list)


class HeadDrafter:
    """Drafts for the sessions of a target with one head.

    Args:
        engine: Runs the head.
        taps: The hidden states that `take` expects, by the ids of `Engine.tap`.
    """

    def __init__(self, engine: HeadEngine, taps: Sequence[int]) -> None:
        self.engine, self.taps = engine, taps
        self._reduced = engine.keep_reduced()
        self._calibration = Calibration()
        self._sessions: dict[str, _Features] = {}

    def take(self, session_id: str, start: int, states: Tensor) -> None:
        """Keep the features of committed positions.

        Args:
            session_id: The session.
            start: Position of the first.
            states: The target's states [positions, taps, target_hidden_size].
        """
        rows = self.engine.fuse(states)
        held = self._sessions.get(session_id)
        if held is None:
            self._sessions[session_id] = _Features(start, rows[-MAX_FEATURES:])
            return
        held.lowest = min(held.lowest, start)
        if held.start <= start <= held.end:
            rows = torch.cat([held.rows[: start - held.start], rows])
        else:
            held.start = start
        held.start += max(0, len(rows) - MAX_FEATURES)
        held.rows = rows[-MAX_FEATURES:]

    def drop(self, session_id: str) -> None:
        """Forget a session."""
        self._sessions.pop(session_id, None)
        self.engine.release(session_id)

    def draft(self, asked: Sequence[tuple[SessionCopy, Shape, int]]) -> list[Proposal]:
        """Return a proposal for each session, empty where features are missing or the head fails.

        Args:
            asked: Each session with the shape of its proposal and the number of its tokens that the target
                has cached: the features of later positions are of other tokens.
        """
        try:
            with torch.inference_mode():
                return self._draft(asked)
        except Exception:  # the target goes on without proposals
            _log.exception("drafting for %d sessions failed", len(asked))
            for session, _, _ in asked:
                self.drop(session.session_id)
            return [Proposal()] * len(asked)

    def _draft(self, asked: Sequence[tuple[SessionCopy, Shape, int]]) -> list[Proposal]:
        drafting = [self._begin(*one) for one in asked]
        self._feed_committed([one for one in drafting if one is not None])
        while open_ones := [one for one in drafting if one is not None and self._reads_on(one)]:
            self._feed_nodes(open_ones)
        return [Proposal() if one is None else one.reading.proposal() for one in drafting]

    def _begin(self, session: SessionCopy, shape: Shape, num_valid: int) -> _Drafting | None:
        """Make the head's cache end before the tokens whose features are at hand."""
        held = self._sessions.get(session.session_id)
        if held is None:
            return None
        held.truncate(min(num_valid, len(session.tokens) - 1))
        if held.end != len(session.tokens) - 1 or not self._has_start(held, session):
            return None
        if shape.is_tree and session.spec.method is not VerificationMethod.COUPLED:
            shape = replace(shape, max_nodes=0)  # only coupled verification supports trees
        speculation = held.speculation
        if speculation is None or speculation.session is not session:
            speculation = held.speculation = Speculation(
                session,
                max_context=self.engine.max_context,
                top_k=TOP_K,
                bits=WEIGHT_BITS,
                calibration=self._calibration,
                reduced=self._reduced,
            )
        speculation.note_outcome()
        speculation.begin()
        if not speculation.has_noise:
            return None
        reading = speculation.read(speculation.tree.root, shape)
        if reading is None:
            return None
        return _Drafting(session, speculation, reading)

    def _has_start(self, held: _Features, session: SessionCopy) -> bool:
        """Find out how much of the head's cache is valid; begin a new one if features between are missing."""
        session_id, tokens = session.session_id, session.tokens
        cached = self.engine.tokens(session_id)
        fed = min(held.fed, len(cached), len(tokens) - 1)
        for position in range(min(held.lowest, fed), fed):
            if cached[position] != tokens[position]:
                fed = position
                break
        if fed <= held.start:
            try:
                self.engine.skip(session_id, tokens[: held.start + 1])
            except CacheFullError:
                return False
            fed = held.start + 1
        held.fed, held.lowest = fed, len(tokens)
        return fed < len(tokens)

    def _feed_committed(self, drafting: Sequence[_Drafting]) -> None:
        """Feed the committed tokens with their features, in chunks, and open the roots."""
        waiting = list(drafting)
        while waiting:
            feeds, done = [], []
            for one in waiting:
                held, session = self._sessions[one.session.session_id], one.session
                end = min(len(session.tokens), held.fed + CHUNK)
                features = held.rows[held.fed - 1 - held.start : end - 1 - held.start]
                is_last = end == len(session.tokens)
                feeds.append(
                    SequenceInput(
                        session.session_id,
                        held.fed,
                        session.tokens[held.fed : end],
                        int(is_last),
                        features=features,
                    )
                )
                held.fed = end
                if is_last:
                    done.append(one)
            logits = self.engine.step(feeds)
            for one, feed, rows in zip(waiting, feeds, logits, strict=True):
                if feed.num_logits:
                    one.speculation.open(self.engine, [one.speculation.tree.root], rows)
                    held = self._sessions[one.session.session_id]
                    held.start, held.rows = held.end - 1, held.rows[-1:]  # in case the block is repeated
            waiting = [one for one in waiting if one not in done]

    def _reads_on(self, one: _Drafting) -> bool:
        """Read as far as there are predictions; whether nodes must be fed to read further."""
        one.nodes = one.reading.go_on()[:CHUNK]
        if not one.nodes:
            one.speculation.sent = one.reading
        return bool(one.nodes)

    def _feed_nodes(self, drafting: Sequence[_Drafting]) -> None:
        one, count = drafting[0], drafting[0].reading.run_length
        if len(drafting) == 1 and count > 1 and one.speculation.can_run(self.engine, one.nodes):
            token_ids, logits = one.speculation.run(self.engine, one.nodes[0], count)
            one.speculation.open_run(self.engine, one.nodes[0], token_ids, logits)
            return
        feeds = [one.speculation.feed(one.nodes) for one in drafting]
        for one, logits in zip(drafting, self.engine.step(feeds), strict=True):
            one.speculation.open(self.engine, one.nodes, logits)
