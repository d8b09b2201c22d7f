"""A whole generation over table-driven logits: propose, verify, commit, by the real functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from scipy import stats
from torch import Tensor

from gammaray.types import Proposal, SamplingParams, SparseDistribution, VerificationMethod
from services.engine.sampling.noise import Noise
from services.speculation.predictions import predictions
from services.verification.rules import verify
from tests.support.maths_helpers import Context, paths_of
from tests.support.processing_helpers import processed

Drafter = Callable[["Speculator", Context], Proposal]


class TableModel:
    """Logits that depend on the last two tokens."""

    def __init__(self, vocab_size: int, seed: int, spread: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = spread * torch.randn(vocab_size, vocab_size, vocab_size, generator=generator)
        self.vocab_size = vocab_size

    def blurred(self, seed: int, noise: float) -> TableModel:
        """Return a draft for this model: the same logits, disturbed."""
        other = TableModel(self.vocab_size, seed, noise)
        other.table += self.table
        return other

    def logits(self, context: Context) -> Tensor:
        return self.table[context[-2], context[-1]]


@dataclass
class Speculator:
    """One session.

    `offset` is added to all positions, so that samples of one seed use disjoint noise. `bias` moves that
    much of the target's mass from its likeliest to its least likely token: a planted bug.
    """

    method: VerificationMethod
    target: TableModel
    draft: TableModel
    params: SamplingParams
    noise: Noise | None
    prompt: Context = (0, 1)
    eos: tuple[int, ...] = ()
    offset: int = 0
    bias: float = 0.0
    known: dict[object, Tensor] = field(default_factory=dict)

    def rows(self, model: TableModel, context: Context, proposal: Proposal) -> Tensor:
        """Return the processed rows of a model after `context` and the nodes of a proposal."""
        key = (model is self.target, context, proposal.token_ids, proposal.parents)
        if key not in self.known:
            logits = torch.stack([model.logits(path) for path in paths_of(context, proposal)])
            size = len(self.prompt)
            given = {"prompt": context[:size], "output": context[size:], "proposal": proposal}
            rows = processed(logits, self.params, **given, eos_token_ids=self.eos)
            self.known[key] = _moved(rows, self.bias) if model is self.target else rows
        return self.known[key]

    def propose(self, context: Context, gamma: int) -> Proposal:
        tokens, distributions, base = list[int](), [], self.offset + len(context)
        for index in range(gamma):
            row = self.rows(self.draft, (*context, *tokens), Proposal())[0]
            with patch("services.speculation.predictions.DRAFT_TOP_K", 4):  # distributions are cut
                token_id, distribution, _ = propose_token(self.method, row, self.noise, base, base + index)
            tokens.append(token_id)
            distributions.append(distribution)
        are_sampled = bool(distributions) and distributions[0] is not None
        return Proposal(tuple(tokens), None, tuple(distributions) if are_sampled else None)

    def cycle(self, context: Context, proposal: Proposal) -> Context:
        """Verify a proposal and return the emitted tokens."""
        rows = self.rows(self.target, context, proposal)
        base = self.offset + len(context)
        verdict = verify(self.method, rows, proposal, self.params, self.noise, base)
        return (*(proposal.token_ids[node] for node in verdict.accepted_path), verdict.next_token_id)

    def generate(self, length: int, drafter: Drafter) -> Context:
        context = self.prompt
        while len(context) < len(self.prompt) + length:
            context += self.cycle(context, drafter(self, context))
        return context[len(self.prompt) : len(self.prompt) + length]


def propose_token(
    method: VerificationMethod, log_probs_row: Tensor, noise: Noise | None, base: int, position: int
) -> tuple[int, SparseDistribution | None, float]:
    """Return the draft's token after one node, the distribution it was sampled from, and its confidence."""
    (prediction,) = predictions(method, log_probs_row[None], noise, [position], temperature=1.0)
    return prediction.choose(base), prediction.distribution, prediction.confidence(base)


def _moved(rows: Tensor, bias: float) -> Tensor:
    if not bias:
        return rows
    probs = rows.double().exp()
    most = probs.argmax(-1, keepdim=True)
    least = probs.masked_fill(probs == 0, math.inf).argmin(-1, keepdim=True)
    moved = torch.full_like(probs[..., :1], bias)
    return probs.scatter_add(-1, most, -moved).scatter_add(-1, least, moved).log()


def chain_of(gamma: int) -> Drafter:
    """Return the faithful drafter with a fixed gamma."""
    return lambda speculator, context: speculator.propose(context, gamma)


def exact_joint(speculator: Speculator) -> list[float]:
    """Return the target's distribution of the first two tokens, flattened, from plain rows."""
    distribution = list[float]()
    for first, prob in enumerate(_probs(speculator, speculator.prompt)):
        # An impossible first token has no rows after it; any distribution will do at weight 0.
        context = (*speculator.prompt, first) if prob else speculator.prompt
        distribution += [prob * other for other in _probs(speculator, context)]
    return distribution


def _probs(speculator: Speculator, context: Context) -> list[float]:
    probs = speculator.rows(speculator.target, context, Proposal())[0].double().exp().tolist()
    return [prob / math.fsum(probs) for prob in probs]


def g_test(counts: Sequence[int], distribution: Sequence[float]) -> float:
    """Return the p-value of the counts under a distribution; 0 if an impossible token occurred."""
    if any(count and not prob for count, prob in zip(counts, distribution, strict=True)):
        return 0.0
    total = sum(counts)
    # Cells below 5 expected are put together, as the test's approximation wants it.
    small = [index for index, prob in enumerate(distribution) if prob * total < 5]
    large = [index for index, prob in enumerate(distribution) if prob * total >= 5]
    observed = [counts[index] for index in large] + [sum(counts[index] for index in small)]
    expected = [distribution[index] * total for index in large]
    expected.append(sum(distribution[index] for index in small) * total)
    pairs = [(o, e) for o, e in zip(observed, expected, strict=True) if e > 0]
    g = 2 * math.fsum(o * math.log(o / e) for o, e in pairs if o)
    return float(stats.chi2.sf(g, len(pairs) - 1))
