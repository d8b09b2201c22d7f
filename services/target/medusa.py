"""Drafts with Medusa heads in the target worker: a whole proposal from one hidden state.

The state is that of the position before the last committed token. The tokens at one depth have the same
prediction, whatever precedes them, as with a parallel draft model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from gammaray.blocks import Shape
from gammaray.types import MAX_NODES
from services.engine.engine import SequenceInput
from services.heads.block_runners import MedusaEngine
from services.scheduling.sessions import SessionCopy
from services.speculation.head_drafter import HeadDrafter
from services.speculation.local_drafter import Drafting

__all__ = ["MedusaDrafter"]

_KEPT = MAX_NODES + 1
"""Latest features of a session that are kept: a repeated block goes back by a proposal at most."""


class MedusaDrafter(HeadDrafter):
    """Drafts for the sessions of a target with its Medusa heads.

    Args:
        engine: Runs the heads.
        last_layer: The state that they read, by the ids of `Engine.tap`.
    """

    def __init__(self, engine: MedusaEngine, last_layer: int) -> None:
        super().__init__(engine, [last_layer])
        self._most = engine.num_heads

    def _take(self, session_id: str, start: int, states: Tensor) -> None:
        dropped = max(0, len(states) - _KEPT)
        super()._take(session_id, start + dropped, states[dropped:])
        held = self._sessions[session_id]
        held.start += max(0, len(held.rows) - _KEPT)
        held.rows = held.rows[-_KEPT:]

    def _begin(self, session: SessionCopy, shape: Shape, num_valid: int) -> Drafting | None:
        return super()._begin(session, replace(shape, depth=min(shape.depth, self._most)), num_valid)

    def _has_start(self, held: object, session: SessionCopy) -> bool:
        """The heads need no token before the last one."""
        self.engine.skip(session.session_id, session.tokens[:-1])
        return True

    def _feed_committed(self, drafting: Sequence[Drafting]) -> None:
        """Feed the last tokens and a mask for each further token of the proposals, and open the roots."""
        feeds = []
        for one in drafting:
            session, root = one.session, one.speculation.tree.root
            token_ids = [root.token_id, *one.speculation.masks(root, one.reading.shape.depth - 1)]
            last = self._sessions[session.session_id].rows[-1:]
            feeds.append(
                SequenceInput(session.session_id, root.position, token_ids, len(token_ids), features=last)
            )
        for one, logits in zip(drafting, self.engine.step(feeds), strict=True):
            one.speculation.open(self.engine, [one.speculation.tree.root], logits)
