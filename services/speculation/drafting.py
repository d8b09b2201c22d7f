"""The drafting loop, for draft models and heads, in draft workers and in target workers.

While `PendingProposal.advance` finds predictions to be missing, a forward feeds what `feed` returns, or `run`
makes several forwards in one call; then `take` applies the logits. A draft worker's scheduler makes one such
step for all blocks that fit into a forward, `services.speculation.local_drafter` repeats it to the end.
"""

from __future__ import annotations

from ctypes import c_int32

from torch import Tensor

from services.engine.core.batch import SequenceInput
from services.speculation.proposals import ProposalBuilder
from services.speculation.session import Speculation
from services.speculation.tree import Node


class PendingProposal:
    """A proposal being drafted.

    Args:
        max_nodes: Upper bound of nodes in one forward.
        num_beyond: Parallel draft: how many tokens after the proposal the forward predicts as well.

    Attributes:
        nodes: The open nodes that the next forward feeds; the root while committed tokens are missing.
        num_logits: How many of the last tokens of the feed need logits.
        num_tokens: Length of the session's cache after the feed.
        is_fed: Whether a forward returned logits.
        ran: The tokens fed by the last `run`, from the open node on; empty after a single forward.
    """

    def __init__(
        self, speculation: Speculation, reading: ProposalBuilder, max_nodes: int, num_beyond: int = 0
    ) -> None:
        self.speculation, self.reading = speculation, reading
        self._max_nodes, self._num_beyond = max_nodes, num_beyond
        self.nodes: list[Node] = []
        self._masks: list[int] = []
        self.num_logits = self.num_tokens = 0
        self.is_fed = False
        self.ran: list[int] = []
        if speculation.is_parallel and reading.root.prediction is not None and not reading.has_block:
            self.restart()  # a shorter block was prepared

    def restart(self) -> None:
        """Begin a new tree, for example after the session's cache was evicted."""
        self.speculation.begin()
        reading = self.speculation.read(self.speculation.tree.root, self.reading.shape)
        assert reading is not None
        self.reading = reading

    def advance(self) -> bool:
        """Read as far as there are predictions; return whether a forward is needed to read further."""
        speculation, reading = self.speculation, self.reading
        # A level that is wider than a forward is fed in several.
        self.nodes = reading.advance()[: self._max_nodes]
        if not self.nodes:
            speculation.sent, speculation.ahead = reading, None
        elif self.is_at_root:
            self._masks = speculation.masks(reading.root, reading.shape.depth - 1 + self._num_beyond)
            self.num_logits = 1 + len(self._masks)
            self.num_tokens = len(speculation.committed) + len(self._masks)
        else:
            self.num_logits = len(self.nodes)
            self.num_tokens = speculation.chain_length + len(self.nodes)
        return bool(self.nodes)

    @property
    def is_at_root(self) -> bool:
        """Whether the next forward feeds committed tokens."""
        return self.nodes[0] is self.speculation.tree.root

    def feed(self, start: int, size: int, features: Tensor | None = None) -> SequenceInput:
        """Return the feed of `size` committed tokens from `start`, or of the open nodes.

        Args:
            start: Position of the first one in the draft model's context.
            size: Their number; with the last one, the masks of a parallel draft are counted.
            features: Of a head: see `SequenceInput`.
        """
        speculation, end = self.speculation, start + size
        if not self.is_at_root:
            return speculation.feed(self.nodes)
        committed = speculation.committed
        token_ids = [*committed[start:end], *self._masks[: max(0, end - len(committed))]]
        num_logits = self.num_logits if end == self.num_tokens else 0
        return SequenceInput(speculation.session.session_id, start, token_ids, num_logits, features=features)

    @property
    def can_run(self) -> bool:
        """Whether `run` can take the next forwards: those of a chain, from the last committed token on."""
        return self.reading.run_length > 1 and self.speculation.can_run(self.nodes)

    def run(self, feed: SequenceInput, stop: c_int32 | None) -> Tensor:
        """Draft up to `reading.run_length` tokens after a feed with logits; `stop` as of `Engine.chain`."""
        self.ran, logits = self.speculation.run(feed, self.reading.run_length, stop=stop)
        return logits

    def take(self, logits: Tensor) -> None:
        """Apply the logits of the last forward, or of the last run."""
        if self.ran:
            self.speculation.open_run(self.nodes[0], self.ran, logits)
        else:
            self.speculation.open(self.nodes, logits)
        self.ran, self.is_fed = [], True
