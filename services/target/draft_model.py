"""Drafts with a small draft model in the target worker."""

from __future__ import annotations

from collections.abc import Sequence

from gammaray.blocks import Shape
from services.engine.core.batch import SequenceInput
from services.engine.core.session_cache import common_prefix
from services.engine.engine import Engine
from services.scheduling.sessions import SessionCopy
from services.speculation.local_drafter import CHUNK, Drafting, LocalDrafter
from services.speculation.session import Speculation


class ModelDrafter(LocalDrafter):
    """Drafts for the sessions of a target with an ordinary draft model.

    Args:
        engine: Runs the draft model; its logits are those of the target's tokens.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._speculations: dict[str, Speculation] = {}

    def _forget(self, session_id: str) -> None:
        self._speculations.pop(session_id, None)

    def _begin(self, session: SessionCopy, shape: Shape, num_valid: int) -> Drafting | None:
        speculation = self._speculations.get(session.session_id)
        if speculation is None or speculation.session is not session:
            speculation = self._speculations[session.session_id] = self._speculate(session)
        # Cycles may have passed in which others drafted: `changed_from` says nothing about those.
        same = common_prefix(list(self.engine.tokens(session.session_id)), session.tokens)
        if same == len(session.tokens) and speculation.is_at_end(self.engine, shape.depth):
            return self._read(speculation, shape)
        speculation.note_outcome()
        if same < speculation.tree.base or not speculation.follow(self.engine):
            self.engine.truncate(session.session_id, min(same, len(session.tokens) - 1))
            speculation.begin()
        return self._read(speculation, shape)

    def _feed_committed(self, drafting: Sequence[Drafting]) -> None:
        waiting = list(drafting)
        if len(waiting) == 1 and self._runs_from_root(waiting[0]):
            return
        while waiting:
            feeds = []
            for one in waiting:
                session = one.session
                start = self.engine.length(session.session_id)
                end = min(len(session.tokens), start + CHUNK)
                is_last = end == len(session.tokens)
                feeds.append(
                    SequenceInput(session.session_id, start, session.tokens[start:end], int(is_last))
                )
            done = []
            for one, feed, logits in zip(waiting, feeds, self.engine.step(feeds), strict=True):
                if feed.num_logits:
                    one.speculation.open(self.engine, [one.speculation.tree.root], logits)
                    done.append(one)
            waiting = [one for one in waiting if one not in done]

    def _runs_from_root(self, one: Drafting) -> bool:
        """Whether one call drafts the whole chain, the root's prediction included."""
        speculation, session = one.speculation, one.session
        is_next = self.engine.length(session.session_id) == len(session.tokens) - 1
        return (
            is_next
            and one.reading.run_length > 1
            and speculation.can_run(self.engine, [speculation.tree.root])
        )
