"""Drafts with a DFlash head in the target worker: a whole proposal in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gammaray.blocks import Shape
from services.engine.core.errors import CacheFullError
from services.engine.engine import SequenceInput
from services.heads.block_runners import DFlashEngine
from services.scheduling.sessions import SessionCopy
from services.speculation.head_drafter import HeadDrafter, HeldFeatures
from services.speculation.local_drafter import Drafting

__all__ = ["DFlashDrafter"]


class DFlashDrafter(HeadDrafter):
    """Drafts for the sessions of a target with one DFlash head.

    Args:
        engine: Runs the head.
    """

    def __init__(self, engine: DFlashEngine) -> None:
        super().__init__(engine, engine.config.taps)
        self._config = engine.config

    def _begin(self, session: SessionCopy, shape: Shape, num_valid: int) -> Drafting | None:
        return super()._begin(session, replace(shape, depth=min(shape.depth, self._config.depth)), num_valid)

    def _has_start(self, held: HeldFeatures, session: SessionCopy) -> bool:
        """Find out which positions the head has; it does not see those before missing features."""
        session_id, tokens = session.session_id, session.tokens
        fed = self._num_fed(held, session)
        if fed < held.start:
            try:
                self.engine.skip(session_id, tokens[: held.start])
            except CacheFullError:
                return False
            fed = held.start
        elif fed == 0:
            self.engine.release(session_id)
        held.fed, held.lowest = fed, len(tokens)
        return True

    def _feed_committed(self, drafting: Sequence[Drafting]) -> None:
        """Feed the features that the head has not read and the blocks, and open the roots."""
        feeds = []
        for one in drafting:
            session, root = one.session, one.speculation.tree.root
            held = self._sessions[session.session_id]
            block = [root.token_id, *one.speculation.masks(root, self._config.block_size - 1)]
            token_ids = [*session.tokens[held.fed : -1], *block]
            features = held.rows[held.fed - held.start :]
            feeds.append(
                SequenceInput(session.session_id, held.fed, token_ids, len(block), features=features)
            )
            held.fed = root.position
            held.start, held.rows = held.end - 1, held.rows[-1:]  # in case the block is repeated
        first = self._config.first_row
        for one, logits in zip(drafting, self.engine.step(feeds), strict=True):
            rows = logits[first : first + one.reading.shape.depth]
            one.speculation.open(self.engine, [one.speculation.tree.root], rows)
