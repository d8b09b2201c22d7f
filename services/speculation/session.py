"""One session on the draft worker: the parameters it needs, its speculation tree, and how the tree is fed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from ctypes import c_int32
from dataclasses import replace
from typing import Any

from torch import Tensor

from gammaray.blocks import Shape
from gammaray.types import SamplingParams, VerificationMethod
from services.engine.core.batch import SequenceInput
from services.engine.core.drafter import DraftFormat
from services.engine.engine import Engine
from services.engine.sampling.edits import LogitEdits
from services.engine.sampling.logits import processed_log_probs
from services.scheduling.sessions import SessionCopy
from services.scheduling.tasks import SessionSpec
from services.speculation.calibration import Calibration
from services.speculation.outcomes import OutcomeSet
from services.speculation.predictions import Prediction, predictions
from services.speculation.proposals import ProposalBuilder
from services.speculation.tree import Node, SpeculationTree

_Paths = Callable[[], Iterable[Sequence[int]]]
"""Computes the tokens between the committed ones and each row."""


def _path(node: Node) -> list[int]:
    return [before.token_id for before in node.path()]


def draft_params(spec: SessionSpec) -> SamplingParams | None:
    """Parameters for processing the draft's logits; None when the plain logits give the same choice.

    At temperature 0 only the argmax counts; a temperature of 1 without filters keeps it and leaves a
    distribution from which the confidence can be read. Gumbel-max draws need no normalised distribution.
    """
    params = spec.params
    if params.temperature == 0:
        params = replace(params, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
    elif spec.method is not VerificationMethod.COUPLED:
        return params
    plain: Any = SamplingParams(seed=params.seed, sample_index=params.sample_index)
    return None if params == plain else params


def counts_tokens(params: SamplingParams) -> bool:
    """Whether the processed distribution depends on the preceding tokens."""
    return bool(
        params.grammar
        or params.min_tokens
        or params.repetition_penalty != 1
        or params.frequency_penalty
        or params.presence_penalty
    )


def edited_log_probs(
    logits: Tensor, params: SamplingParams, edits: LogitEdits, paths: Sequence[Sequence[int]]
) -> Tensor:
    """Return a draft's log-probabilities with a session's edits, also where these leave no token.

    Args:
        logits: [rows, vocab_size].
        params: As of `draft_params`.
        edits: Those by `params`, updated to the committed tokens.
        paths: For each row, the tokens between the committed ones and the row.
    """
    log_probs = processed_log_probs(logits, params, edits, paths)
    for row in edits.empty_rows:  # the target refuses whatever is proposed there
        log_probs[row] = -math.inf
        log_probs[row, 0] = 0.0
    return log_probs


MOST_CUT = 0.25
"""Share of runs that filters may cut short; a session above it drafts one forward at a time."""


class Speculation:
    """The speculation tree below a session's committed tokens.

    Args:
        session: The session; its tokens are the committed ones.
        max_context: Context length of the draft model.
        top_k: Rejection: largest support of a shipped distribution.
        bits: Rejection: its weights' sum is 2^bits.
        calibration: Of all sessions of the worker.
        mask_token: Mask token of a parallel draft model; None for an ordinary one.
        reduced: The tokens of the logits; None: the whole vocabulary.

    Attributes:
        tree: The tree.
        sent: The last proposal sent, below the tree's root; None before the first.
        ahead: The proposals prepared to follow it.
        is_continued: Whether the current request follows a proposal, so that it may have been prepared.
    """

    def __init__(
        self,
        session: SessionCopy,
        max_context: int,
        top_k: int,
        bits: int,
        calibration: Calibration,
        mask_token: int | None = None,
        reduced: DraftFormat | None = None,
    ) -> None:
        self._reduced = reduced
        self.session, self.mask_token = session, mask_token
        self._calibration = Calibration(calibration)
        self._tested: list[tuple[Prediction, int]] = []
        self._is_rejected = False
        self.is_continued = False
        self._max_context, self._top_k, self._bits = max_context, top_k, bits
        self._spec: SessionSpec | None = None
        self._cut_share = 0.0
        self.begin()

    def begin(self) -> None:
        """Begin a new tree at the end of the session's tokens."""
        session = self.session
        self.tree = SpeculationTree(Node(session.tokens[-1], len(session.tokens) - 1, None))
        self.sent: ProposalBuilder | None = None
        self.ahead: OutcomeSet | None = None
        if self._spec is not session.spec:
            self._spec = session.spec
            self._params = draft_params(session.spec)
            self._counts_tokens = self._params is not None and counts_tokens(self._params)
            session.edits = None

    @property
    def has_noise(self) -> bool:
        """Whether the session has the noise that its parameters need."""
        return self.session.noise is not None or self.session.spec.params.temperature == 0

    def is_held(self, engine: Engine) -> bool:
        """Whether the engine's cache still holds the tree's fed nodes."""
        tree, session_id = self.tree, self.session.session_id
        return (
            tree.root.place is not None
            and engine.length(session_id) == tree.chain_length
            and engine.num_nodes(session_id) == len(tree.off_chain)
        )

    def is_at_end(self, engine: Engine, depth: int) -> bool:
        """Whether the tree begins at the session's last token and predicts what a proposal of `depth` needs.

        The caller knows that the tokens before the last one are those of the tree.
        """
        root, tokens = self.tree.root, self.session.tokens
        is_last = self.tree.base == len(tokens) and root.token_id == tokens[-1]
        is_read = root.prediction is not None and self._spec is self.session.spec
        # A parallel draft feeds nothing after its block, any other one its nodes.
        can_go_on = len(root.block) >= depth - 1 if self.is_parallel else self.is_held(engine)
        return is_last and is_read and can_go_on

    def note_outcome(self) -> None:
        """Note how far the session's tokens match the draft's choices; call before the root moves."""
        self._learn()
        self.is_continued = self.sent is not None and len(self.session.tokens) > self.tree.base
        sent, tokens = self.sent, self.session.tokens
        if sent is None or self.session.changed_from < self.tree.base or not self._is_gumbel_max:
            return
        node, base = sent.root, sent.root.position + 1
        for token_id in tokens[base : base + sent.depth]:
            prediction = sent.prediction_after(node)
            if prediction is None:
                break
            self._tested.append((prediction, base))
            self._is_rejected = prediction.choose(base) != token_id
            if self._is_rejected:
                break
            node = node.child(token_id)

    def _learn(self) -> None:
        """Update the calibration with the noted outcome.

        It takes effect from the next proposal but one: a proposal prepared during verification must equal the
        one that would be drafted after it, or its content would depend on whether it was prepared.
        """
        if self._tested:
            confidences = [prediction.confidence(base) for prediction, base in self._tested]
            self._calibration.observe(confidences, is_rejected=self._is_rejected)
        self._tested, self._is_rejected = [], False

    def follow(self, engine: Engine) -> bool:
        """Move the root to the session's last token; False when the tree has no prediction there.

        Even then the cache keeps the fed part of the path.
        """
        session, tree = self.session, self.tree
        if self._spec is not session.spec or session.changed_from < tree.base or not self.is_held(engine):
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
                engine.keep_path(session.session_id, *moved)
        return reached

    def read(self, root: Node, shape: Shape) -> ProposalBuilder | None:
        """Begin to read the proposal below a node; None at the end of the draft's context."""
        depth = min(shape.depth, self._max_context - root.position - 1)
        if depth <= 0:
            return None
        if depth < shape.depth:
            shape = replace(shape, depth=depth)
        power = self._calibration.power if self._is_gumbel_max else 1.0
        eos_token_ids = self.session.spec.eos_token_ids
        return ProposalBuilder(root, shape, eos_token_ids, power, is_parallel=self.is_parallel)

    @property
    def is_parallel(self) -> bool:
        """Whether one forward drafts a whole proposal."""
        return self.mask_token is not None

    def masks(self, node: Node, depth: int) -> list[int]:
        """Return the masks after a node by which a parallel draft model predicts `depth` further tokens."""
        assert self.mask_token is not None
        return [self.mask_token] * min(depth, self._max_context - node.position - 1)

    @property
    def _is_gumbel_max(self) -> bool:
        """Whether the draft's choice is its prediction of the target's token, not an independent draw.

        Only then do the committed tokens show whether each choice was right, tested or not.
        """
        spec = self.session.spec
        return spec.method is VerificationMethod.COUPLED or spec.params.temperature == 0

    def read_outcome(self, root: Node) -> ProposalBuilder | None:
        """Begin to read the next proposal for the outcome ending at `root`; None if none is to be made."""
        if self.sent is None or root.token_id in self.session.spec.eos_token_ids:
            return None
        self._learn()
        reading = self.read(root, self.sent.shape)
        if self.is_parallel and root.place is not None and reading is not None and not reading.has_block:
            return None  # it was fed without masks, and nodes may follow it in the cache
        return reading

    def feed(self, nodes: Sequence[Node]) -> SequenceInput:
        """Return the feed of nodes whose parents were fed, or of a parallel draft's next block after one."""
        tree, session_id = self.tree, self.session.session_id
        if self.is_parallel:
            return self._feed_block(nodes[0])
        token_ids = [node.token_id for node in nodes]
        if tree.feeds_chain(nodes):
            return SequenceInput(session_id, tree.chain_length, token_ids, 1)
        parents = tree.parents_of(nodes)
        return SequenceInput(
            session_id, tree.chain_length, token_ids, len(nodes), parents, len(tree.off_chain)
        )

    def _feed_block(self, node: Node) -> SequenceInput:
        """Return the feed of a node after those before it that were not fed, with masks after it."""
        assert self.sent is not None
        tree, unfed = self.tree, self.unfed(node)
        masks = self.masks(node, self.sent.shape.depth)
        token_ids = [one.token_id for one in unfed] + masks
        parents, num_kept = None, len(tree.off_chain)
        if not tree.feeds_chain(unfed):
            parents = [*tree.parents_of(unfed[:1]), *range(num_kept, num_kept + len(token_ids) - 1)]
        return SequenceInput(
            self.session.session_id, tree.chain_length, token_ids, len(masks) + 1, parents, num_kept
        )

    def unfed(self, node: Node) -> list[Node]:
        """Return the nodes that are not in the engine's cache, from the root to this node."""
        return [one for one in node.path() if one.place is None]

    def can_run(self, engine: Engine, nodes: Sequence[Node]) -> bool:
        """Whether `run` can feed these open nodes: one, at the end of the engine's chain."""
        is_tip = nodes[0] is self.tree.root or self.tree.feeds_chain(nodes)
        has_largest = self._is_gumbel_max and not self._counts_tokens and self._cut_share <= MOST_CUT
        return is_tip and engine.can_chain and has_largest

    def run(
        self,
        engine: Engine,
        node: Node,
        count: int,
        *,
        stop: c_int32 | None = None,
        within: AbstractContextManager[object] | None = None,
    ) -> tuple[list[int], Tensor]:
        """Feed an open node, then each best-scoring next token, up to `count` in all: see `Engine.chain`."""
        session, scale = self.session, 1 / (self.session.spec.params.temperature or 1)
        noise = None if session.noise is None else session.noise.gumbel(node.position + 1, count)
        feed = SequenceInput(session.session_id, node.position, [node.token_id] * count, count)
        return engine.chain(feed, noise, scale=scale, stop=stop, within=within)

    def open_run(self, engine: Engine, node: Node, token_ids: Sequence[int], logits: Tensor) -> None:
        """Apply the result of `run` for a node, up to where a filter makes the draft choose another token."""
        nodes = [node]
        for token_id in token_ids[1:]:
            nodes.append(nodes[-1].child(token_id))
        self._predict_after(nodes, logits)
        self._cut_share *= 0.9
        for index, (before, fed) in enumerate(itertools.pairwise(nodes)):
            if before.prediction and before.prediction.choose(before.position + 1) != fed.token_id:
                for rejected in nodes[index + 1 :]:
                    rejected.prediction = None
                del nodes[index + 1 :]
                engine.truncate(self.session.session_id, fed.position)
                self._cut_share += 0.1
                break
        for fed in nodes:
            self._note_fed([fed])

    def open(self, engine: Engine, nodes: Sequence[Node], logits: Tensor) -> None:
        """Apply the logits of nodes just fed; the root is allowed only on its own.

        Args:
            engine: The draft model.
            nodes: The nodes; only one with a parallel draft model.
            logits: [nodes, vocab_size]; of a parallel draft those after the node and after each of its masks.
        """
        if not self.is_parallel:
            self._note_fed(nodes)
            self._predict_after(nodes, logits)
            return
        (node,) = nodes
        self._note_fed(nodes if node is self.tree.root else self.unfed(node))
        engine.truncate(self.session.session_id, self.tree.chain_length, len(self.tree.off_chain))
        node.prediction, *node.block = self._block(node, logits)

    def _block(self, node: Node, logits: Tensor) -> list[Prediction]:
        """Return a parallel draft's predictions from the logits after a node and after each of its masks."""
        positions = range(node.position + 1, node.position + 1 + len(logits))
        path = _path(node)
        if not self._counts_tokens:
            return self._predict(logits, positions, lambda: [path] * len(positions))
        made: list[Prediction] = []
        for row, position in zip(logits, positions, strict=True):
            made += self._predict(row[None], [position], lambda: [path])
            path.append(made[-1].choose(node.position + 1))  # the draft's own choices count, too
        return made

    def _note_fed(self, nodes: Sequence[Node]) -> None:
        if nodes[0] is self.tree.root:
            self.tree.root_fed()
        else:
            self.tree.fed(nodes)

    def _predict_after(self, nodes: Sequence[Node], logits: Tensor) -> None:
        made = self._predict(logits, [node.position + 1 for node in nodes], lambda: map(_path, nodes))
        for node, prediction in zip(nodes, made, strict=True):
            node.prediction = prediction

    def _predict(self, logits: Tensor, positions: Sequence[int], paths: _Paths) -> list[Prediction]:
        """Return the predictions of the tokens at `positions`, after these paths below the root."""
        session, token_ids = self.session, None
        if self._reduced is not None:
            if self._params is None and (session.noise is None or self._is_gumbel_max):
                token_ids = self._reduced.target_ids
            else:
                logits = self._reduced.with_all_tokens(logits)
        if self._params is not None:
            logits = self._processed(paths, logits, self._params)
        return predictions(
            session.spec.method,
            logits,
            session.noise,
            positions,
            temperature=session.spec.params.temperature,
            top_k=self._top_k,
            bits=self._bits,
            token_ids=token_ids,
        )

    def _processed(self, paths: _Paths, logits: Tensor, params: SamplingParams) -> Tensor:
        """The processed log-probabilities after paths, [paths, vocab_size]."""
        if not LogitEdits.needed(params):
            return processed_log_probs(logits, params)
        edits = self.session.edits_for(params, logits.shape[-1], logits.device)
        return edited_log_probs(logits, params, edits, list(paths()))
