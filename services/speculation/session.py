"""One session's speculation tree: how it follows the committed tokens, and how its nodes are fed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from ctypes import c_int32
from dataclasses import replace

from torch import Tensor

from gammaray.blocks import Shape
from gammaray.types import VerificationMethod
from services.engine.core.batch import SequenceInput
from services.scheduling.sessions import SessionCopy
from services.scheduling.tasks import SessionSpec
from services.speculation.calibration import Calibration
from services.speculation.outcomes import OutcomeSet
from services.speculation.predictions import Prediction
from services.speculation.predictor import DraftModel, Predictor
from services.speculation.proposals import ProposalBuilder
from services.speculation.tree import Node, SpeculationTree


class Speculation:
    """The speculation tree below a session's committed tokens.

    Attributes:
        sent: The last proposal sent, below the tree's root; None before the first.
        ahead: The proposals prepared to follow it.
        is_continued: Whether the current request follows a proposal, so that it may have been prepared.
    """

    def __init__(self, model: DraftModel, session: SessionCopy) -> None:
        self._model, self._engine, self.session = model, model.engine, session
        self._max_context, self._mask_token = model.engine.max_context, model.engine.mask_token
        translation = model.translation
        self._context = None if translation is None else translation.context(self._max_context)
        self._calibration = Calibration(model.calibration)
        self._tested: list[tuple[Prediction, int]] = []
        self._is_rejected = False
        self.is_continued = False
        self._spec: SessionSpec | None = None
        self.begin()

    def begin(self) -> None:
        """Begin a new tree at the end of the session's tokens."""
        session = self.session
        if self._spec is not None:
            self.tree.clear()
        self.tree: SpeculationTree = SpeculationTree(Node(session.tokens[-1], len(session.tokens) - 1, None))
        self.sent: ProposalBuilder | None = None
        self.ahead: OutcomeSet | None = None
        self._num_further = len(self.committed) - len(session.tokens)
        if self._spec is not session.spec:
            self._spec = session.spec
            self._predictor = Predictor(self._model, session)

    @property
    def committed(self) -> Sequence[int]:
        """The draft model's tokens of the committed text."""
        return self.session.tokens if self._context is None else self._context.tokens

    @property
    def chain_length(self) -> int:
        """Length of the session's chain in the engine's cache, once the committed tokens are fed."""
        return self.tree.chain_length + self._num_further

    @property
    def has_noise(self) -> bool:
        """Whether the session has the noise that its parameters need."""
        return self.session.noise is not None or self.session.spec.params.temperature == 0

    @property
    def is_parallel(self) -> bool:
        """Whether one forward drafts a whole proposal."""
        return self._mask_token is not None

    @property
    def is_held(self) -> bool:
        """Whether the engine's cache still holds the tree's fed nodes."""
        tree, session_id = self.tree, self.session.session_id
        return (
            tree.root.place is not None
            and self._engine.length(session_id) == self.chain_length
            and self._engine.num_nodes(session_id) == len(tree.off_chain)
        )

    @property
    def is_at_end(self) -> bool:
        """Whether the tree begins at the session's last token, with a prediction of the next one.

        The caller knows that the tokens before the last one are those of the tree.
        """
        root, tokens = self.tree.root, self.session.tokens
        is_last = self.tree.base == len(tokens) and root.token_id == tokens[-1]
        is_read = root.prediction is not None and self._spec is self.session.spec
        return is_last and is_read and self.is_held

    def note_outcome(self) -> None:
        """Note how far the session's tokens match the draft's choices; call before the root moves."""
        self._learn()
        sent, tokens = self.sent, self.session.tokens
        self.is_continued = sent is not None and len(tokens) > self.tree.base
        is_known = self._context is None and self.session.changed_from >= self.tree.base
        if sent is not None and is_known and self._predictor.is_gumbel_max:
            self._tested, self._is_rejected = sent.tested(tokens)

    def _learn(self) -> None:
        # It counts from the next proposal but one: a proposal prepared during verification must equal the one
        # that would be drafted after it, or its content would depend on whether it was prepared.
        if self._tested:
            confidences = [prediction.confidence(base) for prediction, base in self._tested]
            self._calibration.observe(confidences, is_rejected=self._is_rejected)
        self._tested, self._is_rejected = [], False

    def translate(self) -> int:
        """Translate the session's tokens; return how many of `committed` are certainly unchanged."""
        session = self.session
        if self._context is None:
            return session.changed_from
        return self._context.follow(session.tokens, session.changed_from)

    def follow(self) -> bool:
        """Move the root to the session's last token; False when the tree has no prediction there.

        Even then the cache keeps the fed part of the path.
        """
        session, tree = self.session, self.tree
        is_other = self._context is not None or self._spec is not session.spec
        if is_other or session.changed_from < tree.base or not self.is_held:
            return False
        node = tree.find(session.tokens[tree.base :])
        reached = node.position + 1 == len(session.tokens) and node.prediction is not None
        while node.place is None:
            assert node.parent is not None
            node = node.parent
        if node is not tree.root:
            self.sent = self.ahead = None
            moved = tree.move_root(node)
            if moved is not None:
                self._engine.keep_path(session.session_id, *moved)
        return reached

    def read(self, root: Node, shape: Shape) -> ProposalBuilder | None:
        """Begin to read the proposal below a node; None at the end of the draft's context."""
        depth = min(shape.depth, self._max_context - self._num_further - root.position - 1)
        if depth <= 0 or not self.committed:
            return None
        shape = shape.clipped(depth)
        if self._context is not None or self.session.spec.method is not VerificationMethod.COUPLED:
            shape = shape.chain.whole  # only coupled verification supports trees, and any length
        power = self._calibration.power if self._predictor.is_gumbel_max else 1.0
        eos_token_ids = self.session.spec.eos_token_ids
        return ProposalBuilder(root, shape, eos_token_ids, power, is_parallel=self.is_parallel)

    def read_outcome(self, root: Node) -> ProposalBuilder | None:
        """Begin to read the next proposal for the outcome ending at `root`; None if none is to be made."""
        if self.sent is None or root.token_id in self.session.spec.eos_token_ids:
            return None
        self._learn()
        reading = self.read(root, self.sent.shape.whole)
        if self.is_parallel and root.place is not None and reading is not None and not reading.has_block:
            return None  # it was fed without masks, and nodes may follow it in the cache
        return reading

    def masks(self, node: Node, depth: int) -> list[int]:
        """Return the masks after a node by which a parallel draft model predicts `depth` further tokens."""
        if self._mask_token is None:
            return []
        return [self._mask_token] * min(depth, self._max_context - node.position - 1)

    def feed(self, nodes: Sequence[Node]) -> SequenceInput:
        """Return the feed of nodes whose parents were fed, or of a parallel draft's next block after one."""
        tree, session_id, shared = self.tree, self.session.session_id, self._model.shared
        if self.is_parallel:
            return self._feed_block(nodes[0])
        token_ids = [node.token_id for node in nodes]
        if shared is not None:
            token_ids = [shared.draft_id_of[token_id] for token_id in token_ids]
        if tree.feeds_chain(nodes):
            return SequenceInput(session_id, self.chain_length, token_ids, 1)
        parents, num_kept = tree.parents_of(nodes), len(tree.off_chain)
        return SequenceInput(session_id, tree.chain_length, token_ids, len(nodes), parents, num_kept)

    def _feed_block(self, node: Node) -> SequenceInput:
        """Return the feed of a node after those before it that were not fed, with masks after it."""
        assert self.sent is not None
        tree, unfed = self.tree, self._unfed(node)
        masks = self.masks(node, self.sent.shape.depth)
        token_ids = [before.token_id for before in unfed] + masks
        parents, num_kept = None, len(tree.off_chain)
        if not tree.feeds_chain(unfed):
            parents = [*tree.parents_of(unfed[:1]), *range(num_kept, num_kept + len(token_ids) - 1)]
        session_id, num_logits = self.session.session_id, len(masks) + 1
        return SequenceInput(session_id, tree.chain_length, token_ids, num_logits, parents, num_kept)

    def _unfed(self, node: Node) -> list[Node]:
        """Return the nodes that are not in the engine's cache, from the root to this node."""
        return [before for before in node.path() if before.place is None]

    def can_run(self, nodes: Sequence[Node]) -> bool:
        """Whether `run` can feed these open nodes: one, at the end of the engine's chain."""
        engine, predictor = self._engine, self._predictor
        is_tip = nodes[0] is self.tree.root or self.tree.feeds_chain(nodes)
        has_largest = predictor.is_gumbel_max and not predictor.counts_tokens and self._context is None
        return is_tip and engine.can_chain and has_largest

    def run(
        self, feed: SequenceInput, count: int, *, stop: c_int32 | None = None, is_idle: bool = False
    ) -> tuple[list[int], Tensor]:
        """Feed an open node, then each best-scoring next token, in up to `count` forwards.

        Args:
            feed: As of `step`, with logits of its last token only: the open node.
            count: Forwards at most.
            stop, is_idle: As of `Engine.chain`.

        Returns:
            The tokens that were fed from the open node on, and the logits [tokens, vocab_size] after them.
        """
        session, scale = self.session, 1 / (self.session.spec.params.temperature or 1)
        num_before, last = len(feed.token_ids) - 1, feed.token_ids[-1]
        next_position = feed.start + num_before + 1
        noise = None if session.noise is None else session.noise.gumbel(next_position, count)
        feed = replace(feed, token_ids=[*feed.token_ids, *[last] * (count - 1)], num_logits=count)
        token_ids, logits = self._engine.chain(feed, noise, scale=scale, stop=stop, is_idle=is_idle)
        return token_ids[num_before:], logits

    def open_run(self, node: Node, token_ids: Sequence[int], logits: Tensor) -> None:
        """Apply the result of `run` for a node, up to where a filter makes the draft choose another token."""
        nodes = [node]
        for token_id in token_ids[1:]:
            nodes.append(nodes[-1].child(token_id))
        self._predict_after(nodes, logits)
        for index, (before, fed) in enumerate(itertools.pairwise(nodes)):
            if before.prediction and before.prediction.choose(before.position + 1) != fed.token_id:
                for rejected in nodes[index + 1 :]:
                    rejected.prediction = None
                del nodes[index + 1 :]
                self._engine.truncate(self.session.session_id, fed.position)
                break
        for fed in nodes:
            self.tree.fed([fed])

    def open(self, nodes: Sequence[Node], logits: Tensor) -> None:
        """Apply the logits of nodes just fed; the root is allowed only on its own.

        Args:
            nodes: The nodes; only one with a parallel draft model.
            logits: [nodes, vocab_size]; of a parallel draft those after the node and after each of its masks.
        """
        if not self.is_parallel:
            self.tree.fed(nodes)
            self._predict_after(nodes, logits)
            return
        (node,) = nodes
        self.tree.fed(nodes if node is self.tree.root else self._unfed(node))
        self._engine.truncate(self.session.session_id, self.tree.chain_length, len(self.tree.off_chain))
        node.prediction, *node.block = self._block(node, logits)

    def _block(self, node: Node, logits: Tensor) -> list[Prediction]:
        """Return a parallel draft's predictions from the logits after a node and after each of its masks."""
        positions = range(node.position + 1, node.position + 1 + len(logits))
        path = _path(node)
        if not self._predictor.counts_tokens:
            return self._predictor.predict(logits, positions, lambda: [path] * len(positions))
        predictions: list[Prediction] = []
        for row, position in zip(logits, positions, strict=True):
            predictions += self._predictor.predict(row[None], [position], lambda: [path])
            path.append(predictions[-1].choose(node.position + 1))  # the draft's own choices count, too
        return predictions

    def _predict_after(self, nodes: Sequence[Node], logits: Tensor) -> None:
        positions = [node.position + 1 for node in nodes]
        predictions = self._predictor.predict(logits, positions, lambda: map(_path, nodes))
        for node, prediction in zip(nodes, predictions, strict=True):
            node.prediction = prediction


def _path(node: Node) -> list[int]:
    return [before.token_id for before in node.path()]
