"""Chains of a draft model with another vocabulary than the target's, of the tokens that both have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gammaray.blocks import Shape
from gammaray.types import Proposal, SparseDistribution
from services.engine.sampling.edits import LogitEdits
from services.engine.sampling.logits import processed_log_probs
from services.engine.sampling.noise import Noise
from services.scheduling.sessions import SessionCopy
from services.speculation.predictions import Guess, Prediction, predictions
from services.speculation.proposals import ProposalBuilder
from services.speculation.session import draft_params
from services.speculation.tree import Node
from services.vocabulary.intersection import Intersection


class SharedLogits:
    """The draft's logits of the tokens that it shares with the target, in order of the target's ids.

    Args:
        common: The shared tokens.
        device: Device of the logits.

    Attributes:
        target_ids: The target's id of each column.
        on_device: The same as a tensor.
        draft_id_of: Draft token that is fed for a target token.
        target_size: Number of token ids of the target.
    """

    def __init__(self, common: Intersection, device: torch.device | str) -> None:
        self.target_ids, self.on_device = common.target_ids, torch.tensor(common.target_ids, device=device)
        self.draft_id_of = dict(zip(common.target_ids, common.draft_ids, strict=True))
        self.target_size = common.target_size
        self._columns = torch.tensor(common.draft_ids, device=device)
        self._rounds = [torch.tensor(pairs, device=device).T for pairs in common.duplicates]

    def of(self, logits: Tensor) -> Tensor:
        """Return [rows, shared tokens]; probabilities of draft tokens with the same bytes are added."""
        shared = logits[:, self._columns]
        for indexes, draft_ids in self._rounds:
            shared[:, indexes] = torch.logaddexp(shared[:, indexes], logits[:, draft_ids])
        return shared

    def edited(self, shared: Tensor, edits: LogitEdits, path: Sequence[int]) -> Tensor:
        """Return a row [1, shared tokens] after masks, bias and penalties of the target's ids."""
        row = torch.full((1, self.target_size), -torch.inf, device=shared.device)
        row[:, self.on_device] = shared.float()
        return edits.apply(row, [path])[:, self.on_device]


class TokenChain:
    """A chain of shared tokens, each drawn from the draft's distribution over them (TLI).

    The tokens are those that the target would draw with the same distribution: noise, masks, bias and
    penalties are those of the target's ids and positions.

    Args:
        session: The session, in the target's tokens.
        shared: The shared tokens.
        noise: Noise of the shared tokens; None at temperature 0.
        shape: Bounds of the proposal.
        top_k: Rejection: largest support of a shipped distribution.
        bits: Rejection: its weights' sum is 2^bits.
    """

    def __init__(
        self,
        session: SessionCopy,
        shared: SharedLogits,
        noise: Noise | None,
        shape: Shape,
        *,
        top_k: int,
        bits: int,
    ) -> None:
        self._session, self._shared, self._noise = session, shared, noise
        self._top_k, self._bits = top_k, bits
        self._params = draft_params(session.spec)
        self._root = self._tip = Node(session.tokens[-1], len(session.tokens) - 1, None)
        shape = replace(shape, max_nodes=0)
        self._builder = ProposalBuilder(self._root, shape, session.spec.eos_token_ids)

    def take(self, logits: Tensor) -> int | None:
        """Draw the next token from the draft's logits [1, vocab_size]; return the draft token to feed.

        None: the proposal is complete.
        """
        scores = self._processed(self._shared.of(logits))
        if not bool((scores > -torch.inf).any()):
            return None  # the sampling parameters allow none of the shared tokens
        spec, tip = self._session.spec, self._tip
        (prediction,) = predictions(
            spec.method,
            scores,
            self._noise,
            [tip.position + 1],
            temperature=spec.params.temperature,
            top_k=self._top_k,
            bits=self._bits,
        )
        tip.prediction = _Mapped(prediction, self._shared.target_ids)
        following = self._builder.go_on()
        if not following:
            return None
        (self._tip,) = following
        return self._shared.draft_id_of[self._tip.token_id]

    def finish(self) -> Proposal:
        """Return the proposal, in the target's token ids."""
        proposal = self._builder.proposal()
        for node in [self._root, *self._root.below()]:
            node.clear()  # break the reference cycles, so that the memory is freed at once
        return proposal

    def _processed(self, shared: Tensor) -> Tensor:
        params = self._params
        if params is None:
            return shared
        if LogitEdits.needed(params):
            path = [node.token_id for node in self._tip.path()]
            edits = self._session.edits_for(params, self._shared.target_size, shared.device)
            shared = self._shared.edited(shared, edits, path)
        if not bool((shared > -torch.inf).any()):
            return shared
        return processed_log_probs(shared, params)


class _Mapped:
    """A prediction over the shared tokens, in the target's ids."""

    __slots__ = ("_prediction", "_target_ids", "distribution")

    def __init__(self, prediction: Prediction, target_ids: Sequence[int]) -> None:
        self._prediction, self._target_ids = prediction, target_ids
        of_draft = prediction.distribution
        self.distribution: SparseDistribution | None = None
        if of_draft is not None:
            token_ids = tuple(target_ids[index] for index in of_draft.token_ids)
            self.distribution = SparseDistribution(token_ids, of_draft.weights, of_draft.weight_bits)

    def choose(self, base: int) -> int:
        return self._target_ids[self._prediction.choose(base)]

    def confidence(self, base: int) -> float:
        return self._prediction.confidence(base)

    def guesses(self, base: int | None) -> Sequence[Guess]:
        return [(self._target_ids[index], share) for index, share in self._prediction.guesses(base)]
