"""The features that a target worker returns with its verdicts, for heads on draft workers.

Only positions that a block computes have hidden states, and only the newest of them are returned: features
are a cache, for which nothing is computed again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from torch import Tensor

from gammaray.blocks import MAX_FEATURE_BYTES, Features
from services.heads.features import to_features
from services.heads.fusion import FeatureFusion

__all__ = ["BlockFeatures", "FeatureSource"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class BlockFeatures:
    """The features of one block.

    Attributes:
        first: Features of earlier positions are not kept.
        parts: Consecutive features, in float8 from the start: many prompts may be read at once.
    """

    first: int
    parts: list[Features] = field(default_factory=list)


class FeatureSource:
    """Collects the features of blocks.

    Args:
        fusion: Makes features of the target's states.
        window: Upper bound of the rows of a block.

    Attributes:
        taps: The hidden states that are needed, by the ids of `Engine.tap`.
    """

    def __init__(self, fusion: FeatureFusion, window: int) -> None:
        self._fusion, self.taps = fusion, fusion.taps
        self._window = min(window, MAX_FEATURE_BYTES // (fusion.width + 4))

    def begin(self, base_position: int, features_from: int) -> BlockFeatures:
        """Return the features, none so far, of a block that asks for those from a position on."""
        return BlockFeatures(max(features_from, base_position - self._window))

    def take(self, block: BlockFeatures, start: int, states: Tensor) -> None:
        """Keep the features of committed positions; where that fails, the block has none.

        Args:
            block: The features of the block.
            start: Position of the first state.
            states: The target's states [positions, taps, hidden_size].
        """
        skipped = max(0, block.first - start)
        if skipped >= len(states):
            return
        start += skipped
        made = None
        try:
            made = to_features(start, self._fusion(states[skipped:]))
        except Exception:  # the verification goes on
            _log.exception("making features of %d hidden states failed", len(states) - skipped)
        parts = [part.before(start) for part in block.parts if part.start < start]
        if made is None or (parts and parts[-1].end != start):
            parts = []  # a gap: only what follows is of use
        block.parts = parts if made is None else [*parts, made]

    def finish(self, block: BlockFeatures, end: int) -> Features | None:
        """Return the features of a verified block.

        Args:
            block: The features of the block.
            end: Position after the last accepted one.

        Returns:
            The features up to there; None if there are none, or they are not finite.
        """
        if not block.parts or block.parts[-1].end != end:
            return None
        return Features.joined(block.parts).after(end - self._window)
