"""Predictions of the draft: the next token of its proposal, and the tokens that the target may emit."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from gammaray.types import SparseDistribution, VerificationMethod
from services.engine.native.library import top_k_tokens
from services.engine.sampling.draws import best_tokens
from services.engine.sampling.noise import Noise

ENTROPY_FACTOR = 0.05
"""Factor of the entropy in AdaEDL's estimate 1 - sqrt(factor * H) of acceptance (arXiv 2410.18351).

The paper's .2 is a lower bound of acceptance; .05 fits the demo pair's mean (.64 estimated, .69 true)."""

DRAFT_TOP_K = 64
"""Largest support of a distribution that a draft worker sends for rejection or block verification: at most
320 bytes a token with weights of `WEIGHT_BITS`."""

WEIGHT_BITS = 12
"""Bits of its quantised weights' sum: a weight takes at most two bytes, and is within 1/4096 of its share."""

NUM_GUESSES = 6
"""Tokens kept per node; at .8 overlap the target's token is among the first four in 98 % of cases."""

_NAIVE_BITS = 32

Guess = tuple[int, float]
"""A token and the probability that the target emits it."""


def quantise(probs: Tensor, top_k: int, bits: int, token_ids: Tensor | None = None) -> SparseDistribution:
    """Return the `top_k` most likely tokens with integer weights by largest remainder, ties to the lower id.

    Args:
        probs: [vocab_size], need not be normalised; at least one positive.
        top_k: Largest support, at least 1.
        bits: The weights' sum is 2^bits, in [1, 24].
        token_ids: The tokens of `probs`, int64, ascending; None: all tokens.
    """
    columns, probs_kept = _most_likely(probs, min(top_k, probs.shape[-1]))
    tokens = _tokens(columns, token_ids)
    scale = (1 << bits) / math.fsum(probs_kept)
    shares = [prob * scale for prob in probs_kept]
    weights = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: weights[i] - shares[i])
    for index in by_remainder[: (1 << bits) - sum(weights)]:
        weights[index] += 1
    kept = [index for index, weight in enumerate(weights) if weight > 0]
    return SparseDistribution(
        tuple(tokens[index] for index in kept), tuple(weights[index] for index in kept), bits
    )


def _tokens(columns: list[int], token_ids: Tensor | None) -> list[int]:
    """Return the tokens of columns; `token_ids` are those of all columns, None if they are the same."""
    return columns if token_ids is None else token_ids[columns].tolist()


def sample_sparse(distribution: SparseDistribution, draft_bits: int) -> int:
    """Return the first token whose cumulative weight exceeds `draft_bits`, which is below 2^weight_bits."""
    return distribution.token_ids[bisect_right(list(accumulate(distribution.weights)), draft_bits)]


def _most_likely(probs: Tensor, size: int) -> tuple[list[int], list[float]]:
    """Return the ids, ascending, and probabilities of the `size` most likely tokens, ties to the lower id."""
    last = probs.topk(size).values[-1]
    token_ids = (probs >= last).nonzero().flatten()
    if len(token_ids) > size:
        tied = (probs[token_ids] == last).nonzero().flatten()
        dropped = tied[size - len(token_ids) :]
        token_ids = token_ids[~torch.isin(torch.arange(len(token_ids), device=probs.device), dropped)]
    return token_ids.tolist(), probs[token_ids].tolist()


def sample_dense(log_probs_row: Tensor, draft_bits: int, bits: int) -> int:
    """Draw from [vocab_size] log-probabilities with `draft_bits`, a uniform integer below 2^bits."""
    cumulative = log_probs_row.double().exp().cumsum(dim=-1)
    threshold = (draft_bits + 0.5) * 2.0**-bits * cumulative[-1]
    return int((cumulative <= threshold).sum())


def entropy_estimate(distribution: SparseDistribution) -> float:
    """Return AdaEDL's estimate of acceptance, a function of the distribution alone."""
    total = 1 << distribution.weight_bits
    entropy = math.log(total) - sum(w * math.log(w) for w in distribution.weights) / total
    return max(0.0, 1.0 - math.sqrt(ENTROPY_FACTOR * max(0.0, entropy)))


class Prediction:
    """The draft's prediction of the token after one node; the base class predicts none."""

    __slots__ = ()

    distribution: SparseDistribution | None = None
    """Distribution that `choose` draws from, where verification needs it."""

    def choose(self, base: int) -> int:
        """Return the next token of the proposal of the cycle at `base`."""
        raise ValueError("there is no token to choose")

    def confidence(self, base: int) -> float:
        """Return the draft's estimate of the probability that `choose(base)` is accepted."""
        return 0.0

    def guesses(self, base: int | None) -> Sequence[Guess]:
        """Return the target's likely tokens, best first, if `choose(base)` is tested; base None: no test."""
        return ()


NOTHING = Prediction()
"""The prediction where the draft model has no token that the sampling parameters allow: a proposal ends."""


def draw_temperature(temperature: float) -> float:
    """Return the softmax temperature that turns Gumbel-max scores into probabilities of the target's draw.

    The draft's logits are off by some scale, and the Gumbel-max draw divides them by the temperature. Maximum
    likelihood on a draft of two blocks for the demo pair's target: 1.2, .9, .65 and .6 at temperatures .5,
    .7, 1 and 1.2, where .84, .77, .66 and .57 match, and .4 for the argmax of plain logits, where .91 do.
    More similar pairs need less; `services.speculation.calibration` learns the remaining difference.
    """
    return 0.4 / temperature + 0.25 if temperature > 0 else 0.4


def predictions(
    method: VerificationMethod,
    log_probs: Tensor,
    noise: Noise | None,
    positions: Sequence[int],
    *,
    temperature: float,
    bits: int = WEIGHT_BITS,
    token_ids: Tensor | None = None,
) -> list[Prediction]:
    """Return the predictions after several nodes.

    Args:
        log_probs: [nodes, tokens] processed log-probabilities of the draft. Where only the order counts,
            coupled and greedy, they need not be normalised.
        noise: The session's noise, of all tokens or of those of the columns; None at temperature 0.
        positions: Absolute positions of the tokens that follow the nodes.
        bits: Rejection, block: the weights' sum is 2^bits.
        token_ids: The tokens of the columns, int64, ascending; None: all tokens.
    """
    if noise is None:
        rows = _GumbelBatch(log_probs, best_tokens(log_probs), draw_temperature(0.0), token_ids)
    elif method.uses_draft_distributions:
        probs = log_probs.double().exp()
        return [
            _RejectionPrediction(quantise(row, DRAFT_TOP_K, bits, token_ids), noise, position)
            for row, position in zip(probs, positions, strict=True)
        ]
    elif method is VerificationMethod.NAIVE:
        return [
            _NaivePrediction(row, noise, position, token_ids)
            for row, position in zip(log_probs, positions, strict=True)
        ]
    else:
        temperature = draw_temperature(temperature)
        if token_ids is None:
            winners, scores = noise.draw(log_probs, positions)
        else:
            gumbel = noise.at(positions)
            scores = log_probs + (gumbel[:, token_ids] if gumbel.shape[-1] > len(token_ids) else gumbel)
            winners = best_tokens(scores)
        rows = _GumbelBatch(scores, winners, temperature, token_ids)
    return [_CoupledPrediction(rows, index) for index in range(len(positions))]


class _GumbelBatch:
    """The draws after several nodes; other guesses than these are computed on demand."""

    __slots__ = ("_columns", "_guesses", "_scores", "_temperature", "_token_ids", "winners")

    def __init__(
        self, scores: Tensor, columns: list[int | None], temperature: float, token_ids: Tensor | None
    ) -> None:
        self._scores, self._temperature, self._token_ids = scores, temperature, token_ids
        self._guesses: dict[int, list[Guess]] = {}
        # Logits that are no numbers propose any token, which verification refuses.
        self._columns = [column or 0 for column in columns]
        self.winners = _tokens(self._columns, token_ids)

    def guesses(self, index: int) -> list[Guess]:
        guesses = self._guesses.get(index)
        if guesses is None:
            best = top_k_tokens(self._scores[index], NUM_GUESSES, self._temperature)
            # The scores are less exact than the draw: of two nearly equal ones the drawn one is first.
            best.sort(key=lambda guess: guess[0] != self._columns[index])
            tokens = _tokens([column for column, _ in best], self._token_ids)
            guesses = [(token, share) for token, (_, share) in zip(tokens, best, strict=True)]
            self._guesses[index] = guesses
        return guesses


class _CoupledPrediction(Prediction):
    """Coupled and greedy: the choice is the best guess and does not depend on the base."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: _GumbelBatch, index: int) -> None:
        self._batch, self._index = batch, index

    def choose(self, base: int) -> int:
        return self._batch.winners[self._index]

    def confidence(self, base: int) -> float:
        return min(1.0, self._batch.guesses(self._index)[0][1])

    def guesses(self, base: int | None) -> Sequence[Guess]:
        return self._batch.guesses(self._index)


class _RejectionPrediction(Prediction):
    """Rejection and block: a draw from the shipped distribution, independent for each base."""

    __slots__ = ("_choice", "_draft", "_noise", "_position", "distribution")

    def __init__(self, distribution: SparseDistribution, noise: Noise, position: int) -> None:
        self.distribution: SparseDistribution | None = distribution
        self._draft, self._noise, self._position = distribution, noise, position
        self._choice: tuple[int, int] = (-1, -1)

    def choose(self, base: int) -> int:
        if self._choice[0] != base:
            bits = self._noise.draft_bits(base, self._position, self._draft.weight_bits)
            self._choice = base, sample_sparse(self._draft, bits)
        return self._choice[1]

    def confidence(self, base: int) -> float:
        return entropy_estimate(self._draft)

    def guesses(self, base: int | None) -> Sequence[Guess]:
        """A bonus is drawn from p, which q estimates; a correction from (p - q)+: any other token."""
        weights, token_ids, scale = self._draft.weights, self._draft.token_ids, 2.0**-self._draft.weight_bits
        likely = heapq.nlargest(NUM_GUESSES, zip(weights, token_ids, strict=True))
        if base is None:
            return [(token_id, weight * scale) for weight, token_id in likely]
        chosen, accepted = self.choose(base), self.confidence(base)
        others = [(token_id, weight * scale) for weight, token_id in likely if token_id != chosen]
        rest = 1.0 - scale * weights[token_ids.index(chosen)]
        scaled = [(token_id, (1.0 - accepted) * prob / rest) for token_id, prob in others] if rest > 0 else []
        return sorted([(chosen, accepted), *scaled], key=lambda guess: guess[1], reverse=True)


class _NaivePrediction(Prediction):
    """Naive: a draw with noise unknown to the target, independent for each base."""

    __slots__ = ("_choice", "_log_probs", "_noise", "_position", "_token_ids")

    def __init__(self, log_probs: Tensor, noise: Noise, position: int, token_ids: Tensor | None) -> None:
        self._log_probs, self._noise, self._position = log_probs, noise, position
        self._token_ids = token_ids
        self._choice: tuple[int, int] = (-1, -1)

    def choose(self, base: int) -> int:
        return _tokens([self._column(base)], self._token_ids)[0]

    def confidence(self, base: int) -> float:
        return min(1.0, math.exp(float(self._log_probs[self._column(base)])))

    def guesses(self, base: int | None) -> Sequence[Guess]:
        likely = self._log_probs.topk(min(NUM_GUESSES, self._log_probs.shape[-1]))
        tokens = _tokens(likely.indices.tolist(), self._token_ids)
        return list(zip(tokens, likely.values.exp().tolist(), strict=True))

    def _column(self, base: int) -> int:
        if self._choice[0] != base:
            bits = self._noise.draft_bits(base, self._position, _NAIVE_BITS)
            self._choice = base, sample_dense(self._log_probs, bits, _NAIVE_BITS)
        return self._choice[1]
