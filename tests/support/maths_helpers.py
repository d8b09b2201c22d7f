"""Small language models with exact distributions, and exact integration of draft and verify over their noise.

`rejection_distribution`, `block_distribution`, `matched_distribution` compute the exact distribution of one
cycle by probing the real functions as black boxes: acceptance thresholds are checked on both sides of the
claimed value, draws are checked by the noise at which the winner changes. So a total variation of 1e-12 is a
statement about the code, not about the formulas of the test.
"""

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gammaray.types import Proposal, SamplingParams, SparseDistribution, TokenOrigin, VerificationMethod
from services.engine.sampling.draws import best_tokens
from services.speculation.predictions import quantise, sample_sparse
from services.verification.rules import verify

SAMPLED = SamplingParams()
GREEDY = SamplingParams(temperature=0.0)
Distribution = Mapping[tuple[int, ...], float]
Context = tuple[int, ...]
DrafterDistribution = Callable[[Context], SparseDistribution]


class TinyModel:
    """A language model with random distributions per context; `zeros` is the chance of a zero probability."""

    def __init__(self, vocab_size: int, seed: int, zeros: float = 0.0, spread: float = 1.0) -> None:
        self.vocab_size, self._seed, self._zeros, self._spread = vocab_size, seed, zeros, spread
        self._distributions: dict[Context, list[float]] = {}

    def distribution(self, context: Sequence[int]) -> list[float]:
        context = tuple(context)
        if context not in self._distributions:
            rng = random.Random(f"{self._seed} {context}")
            weights = [math.exp(self._spread * rng.gauss(0, 1)) for _ in range(self.vocab_size)]
            keep = rng.randrange(self.vocab_size)
            weights = [0.0 if i != keep and rng.random() < self._zeros else w for i, w in enumerate(weights)]
            self._distributions[context] = [w / math.fsum(weights) for w in weights]
        return self._distributions[context]

    def log_probs(self, contexts: Sequence[Context]) -> Tensor:
        return torch.tensor([self.distribution(context) for context in contexts], dtype=torch.float64).log()


@dataclass
class ScriptedNoise:
    """Noise whose every number is written down."""

    accept: Mapping[int, float] = field(default_factory=dict)
    residual: Tensor | None = None
    shared: Tensor | None = None
    independent: Tensor | None = None

    def accept_uniform(self, position: int, base: int = 0) -> float:
        return self.accept[position]

    def residual_gumbel(self, position: int) -> Tensor:
        assert self.residual is not None
        return self.residual

    def draw(self, logits: Tensor, positions: Sequence[int]) -> tuple[list[int | None], Tensor]:
        assert self.shared is not None
        scores = logits + self.shared[list(positions)]
        return best_tokens(scores), scores

    def gumbel(self, start: int, count: int) -> Tensor:
        assert self.shared is not None
        return self.shared[start : start + count]

    def independent_gumbel(self, start: int, count: int) -> Tensor:
        assert self.independent is not None
        return self.independent[start : start + count]


def paths_of(context: Context, proposal: Proposal) -> list[Context]:
    """Return the tokens up to the root and each node of a proposal."""
    paths = [context]
    for node, token_id in enumerate(proposal.token_ids):
        parent = node - 1 if proposal.parents is None else proposal.parents[node]
        paths.append((*paths[parent + 1], token_id))
    return paths


def rows_of(model: TinyModel, context: Context, proposal: Proposal) -> Tensor:
    """Return the model's log-probabilities for verify, [len(proposal) + 1, vocab_size] float64."""
    return model.log_probs(paths_of(context, proposal))


def assert_draws_from(draw: Callable[[Tensor], int], weights: Sequence[float]) -> None:
    """Assert that argmax(log weights + noise) is what `draw` computes, to a relative 1e-12 of each weight."""
    vocab_size = len(weights)
    support = [v for v, weight in enumerate(weights) if weight > 0]
    for v in range(vocab_size):
        if v not in support:
            noise = torch.zeros(vocab_size, dtype=torch.float64)
            noise[v] = 1e6
            assert draw(noise) != v, f"token {v} must not be drawn"
    for v, other in itertools.pairwise(support):
        even = math.log(weights[other]) - math.log(weights[v])
        for winner, nudge in ((v, 1e-12), (other, -1e-12)):
            noise = torch.full((vocab_size,), -1e6, dtype=torch.float64)
            noise[other] = 0.0
            noise[v] = even + nudge
            assert draw(noise) == winner, f"weights of {v} and {other} are not as {weights}"


def quantised_drafter(model: TinyModel, top_k: int, bits: int) -> DrafterDistribution:
    """Return the sent distribution per context, by the real quantisation."""

    def distribution(context: Context) -> SparseDistribution:
        return quantise(torch.tensor(model.distribution(context), dtype=torch.float64), top_k, bits)

    return distribution


def drawn_tokens(distribution: SparseDistribution) -> dict[int, float]:
    """Return the exact distribution of `sample_sparse`, over all its integers."""
    total = 1 << distribution.weight_bits
    drawn: dict[int, float] = defaultdict(float)
    for bits in range(total):
        drawn[sample_sparse(distribution, bits)] += 1 / total
    return dict(drawn)


def chain_proposals(
    shipped: DrafterDistribution, context: Context, gamma: int
) -> Iterator[tuple[float, Proposal]]:
    """Yield every chain a faithful sampling drafter can propose, with its probability."""
    if gamma == 0:
        yield 1.0, Proposal()
        return
    distribution = shipped(context)
    for token_id, prob in drawn_tokens(distribution).items():
        for rest_prob, rest in chain_proposals(shipped, (*context, token_id), gamma - 1):
            distributions = (distribution, *(rest.draft_distributions or ()))
            yield prob * rest_prob, Proposal((token_id, *rest.token_ids), None, distributions)


def rejection_distribution(target: TinyModel, context: Context, proposal: Proposal) -> Distribution:
    """Return the exact distribution of the tokens that rejection verification emits for a proposal."""
    rows = rows_of(target, context, proposal)
    distribution: dict[tuple[int, ...], float] = defaultdict(float)
    alive, uniforms = 1.0, dict[int, float]()
    for node in range(len(proposal) + 1):
        target_distribution = target.distribution(context + proposal.token_ids[:node])
        is_bonus = node == len(proposal)
        accept, after = (0.0, target_distribution) if is_bonus else _test(target_distribution, proposal, node)
        if accept < 1:
            uniforms[node] = _grid(accept, above=True)
            _assert_stops_at(node, after, rows, proposal, uniforms)
            total = math.fsum(after)
            for token_id, weight in enumerate(after):
                distribution[(*proposal.token_ids[:node], token_id)] += alive * (1 - accept) * weight / total
        if accept == 0:
            break
        uniforms[node] = _grid(accept, above=False)
        alive *= accept
    return distribution


def block_distribution(target: TinyModel, context: Context, proposal: Proposal) -> Distribution:
    """Return the exact distribution of the tokens that block verification emits for a proposal."""
    rows = rows_of(target, context, proposal)
    targets = [target.distribution(context + proposal.token_ids[:node]) for node in range(len(proposal) + 1)]
    drafts = []
    for node, token_id in enumerate(proposal.token_ids):
        draft = _draft_of(proposal, node, target.vocab_size)
        if draft[token_id] == 0:
            break  # not drawn from its distribution: the chain ends before it
        drafts.append(draft)
    carried, passing = [1.0], [1.0]
    for node, draft in enumerate(drafts):
        token_id = proposal.token_ids[node]
        carried.append(min(1.0, carried[-1] * targets[node][token_id] / draft[token_id]))
        excess = carried[-1]
        if node + 1 < len(drafts):
            mass = math.fsum(_residual(targets[node + 1], drafts[node + 1], carried[-1]))
            rest = mass + 1 - carried[-1]
            excess = mass / rest if rest > 0 else 1.0
        passing.append(excess)
        if carried[-1] == 0:
            break
    distribution: dict[tuple[int, ...], float] = defaultdict(float)
    alive = 1.0
    for kept in reversed(range(len(passing))):
        after = _residual(targets[kept], drafts[kept], carried[kept]) if kept < len(drafts) else targets[kept]
        mass = alive * passing[kept]
        if mass > 1e-15:  # else perhaps nothing but rounding
            failing = {node: _grid(passing[node + 1], above=True) for node in range(len(passing) - 1)}
            if kept > 0:
                failing[kept - 1] = _grid(passing[kept], above=False)
            _assert_stops_at(kept, after, rows, proposal, failing, VerificationMethod.BLOCK)
            for token_id, weight in enumerate(after):
                tokens = (*proposal.token_ids[:kept], token_id)
                distribution[tokens] += mass * weight / math.fsum(after)
        alive *= 1 - passing[kept]
        if alive <= 0:
            break
    return distribution


def matched_distribution(
    method: VerificationMethod, target: TinyModel, context: Context, proposal: Proposal
) -> Distribution:
    """Return the exact distribution of the tokens that coupled or naive verification emits for a proposal."""
    rows = rows_of(target, context, proposal)
    vocab_size = target.vocab_size
    distribution: dict[tuple[int, ...], float] = defaultdict(float)

    def explore(tokens: Context, alive: float) -> None:
        forced = torch.zeros(proposal.depth + 1, vocab_size, dtype=torch.float64)
        for depth, token_id in enumerate(tokens):
            forced[depth, token_id] = 1e9
        entered = set[int]()

        def draw(noise: Tensor) -> int:
            forced[len(tokens)] = noise
            is_coupled = method is VerificationMethod.COUPLED
            scripted = ScriptedNoise(shared=forced) if is_coupled else ScriptedNoise(independent=forced)
            verdict = verify(method, rows, proposal, SAMPLED, scripted, 0)
            path = [proposal.token_ids[node] for node in verdict.accepted_path]
            assert tuple(path[: len(tokens)]) == tokens
            if len(path) > len(tokens):
                entered.add(path[len(tokens)])
                return path[len(tokens)]
            return verdict.next_token_id

        target_distribution = target.distribution(context + tokens)
        assert_draws_from(draw, target_distribution)
        for token_id, prob in enumerate(target_distribution):
            if token_id in entered:
                explore((*tokens, token_id), alive * prob)
            else:
                distribution[(*tokens, token_id)] += alive * prob

    explore((), 1.0)
    return distribution


def _test(target_distribution: Sequence[float], proposal: Proposal, node: int) -> tuple[float, list[float]]:
    """Return the textbook acceptance probability of a node and the distribution of the correction."""
    draft = _draft_of(proposal, node, len(target_distribution))
    token_id = proposal.token_ids[node]
    if draft[token_id] == 0:
        return 0.0, list(target_distribution)
    accept = min(1.0, target_distribution[token_id] / draft[token_id])
    return accept, _residual(target_distribution, draft)


def _draft_of(proposal: Proposal, node: int, vocab_size: int) -> list[float]:
    """Return the distribution that a node's token was drawn from, over the whole vocabulary."""
    draft = [0.0] * vocab_size
    if proposal.draft_distributions is None:
        draft[proposal.token_ids[node]] = 1.0
        return draft
    shipped = proposal.draft_distributions[node]
    for token_id, weight in zip(shipped.token_ids, shipped.weights, strict=True):
        draft[token_id] = weight / 2**shipped.weight_bits
    return draft


def _residual(target: Sequence[float], draft: Sequence[float], scale: float = 1.0) -> list[float]:
    return [max(0.0, scale * p - q) for p, q in zip(target, draft, strict=True)]


def _grid(accept: float, *, above: bool) -> float:
    """Return the uniform next to a threshold: the smallest that fails or the largest that passes."""
    if accept == 0:
        return 0.0  # Not drawn by our generator, but a strict test must fail it.
    word = math.ceil(accept * 2**32 - 0.5)
    return (word + (0.5 if above else -0.5)) / 2**32


def _assert_stops_at(
    node: int,
    after: Sequence[float],
    rows: Tensor,
    proposal: Proposal,
    uniforms: Mapping[int, float],
    method: VerificationMethod = VerificationMethod.REJECTION,
) -> None:
    def draw(noise: Tensor) -> int:
        scripted = ScriptedNoise(uniforms, noise)
        verdict = verify(method, rows, proposal, SAMPLED, scripted, 0)
        is_bonus = node == len(proposal)
        assert verdict.accepted_path == tuple(range(node)), (verdict, node, uniforms)
        assert verdict.next_origin is (TokenOrigin.BONUS if is_bonus else TokenOrigin.CORRECTION)
        assert verdict.num_tested == node + (not is_bonus)
        return verdict.next_token_id

    assert_draws_from(draw, after)


def completed(distribution: Distribution, target: TinyModel, context: Context, length: int) -> Distribution:
    """Return the distribution of the first `length` tokens if the target continues alone."""
    done: dict[tuple[int, ...], float] = defaultdict(float)
    todo = list(distribution.items())
    while todo:
        tokens, prob = todo.pop()
        if len(tokens) >= length:
            done[tokens[:length]] += prob
            continue
        todo += [((*tokens, v), prob * p) for v, p in enumerate(target.distribution(context + tokens)) if p]
    return done


def plain_distribution(target: TinyModel, context: Context, length: int) -> Distribution:
    return completed({(): 1.0}, target, context, length)


def mixed(parts: Iterator[tuple[float, Distribution]]) -> Distribution:
    distribution: dict[tuple[int, ...], float] = defaultdict(float)
    for weight, part in parts:
        for tokens, prob in part.items():
            distribution[tokens] += weight * prob
    return distribution


def distance(left: Distribution, right: Distribution) -> float:
    return 0.5 * math.fsum(abs(left.get(k, 0.0) - right.get(k, 0.0)) for k in {*left, *right})
