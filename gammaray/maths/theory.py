"""What speculative decoding can gain: acceptance, tokens per cycle, speedup and the best gamma.

Notation. *alpha* is the probability that one tested token is accepted; *gamma* the number of proposed tokens;
*draft_cost* the time of one draft step, and *latency* the one-way network time, both in units of one target
  pass.
A speedup is over plain decoding by the same target. Laws are sequences of probabilities by token id.

References: arXiv 2211.17192 (rejection, expected tokens), 2408.07978 (coupling bounds), 2406.14066 (goodput).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

__all__ = [
    "acceptance_coupled",
    "acceptance_naive",
    "acceptance_rejection",
    "alpha_standard_error",
    "coupled_bounds",
    "expected_tokens",
    "expected_tokens_of",
    "goodput_speedup",
    "optimal_gamma",
    "optimal_gamma_closed_form",
    "optimal_goodput_gamma",
    "residual",
    "speedup",
    "total_variation",
    "tree_tokens",
]


def total_variation(target_probs: Sequence[float], draft_probs: Sequence[float]) -> float:
    """Return half the sum of absolute differences."""
    return 0.5 * math.fsum(abs(p - q) for p, q in zip(target_probs, draft_probs, strict=True))


def acceptance_rejection(target_probs: Sequence[float], draft_probs: Sequence[float]) -> float:
    """Return alpha of rejection verification, sum min(p, q) = 1 - total variation: the best of any method."""
    return math.fsum(min(p, q) for p, q in zip(target_probs, draft_probs, strict=True))


def acceptance_naive(target_probs: Sequence[float], draft_probs: Sequence[float]) -> float:
    """Return alpha of independent draws, sum p q."""
    return math.fsum(p * q for p, q in zip(target_probs, draft_probs, strict=True))


def acceptance_coupled(target_probs: Sequence[float], draft_probs: Sequence[float]) -> float:
    """Return alpha of coupled verification, sum over j of 1 / sum over i of max(p_i / p_j, q_i / q_j).

    Tokens sorted by p / q split the inner sum in two running sums, so it takes O(V log V).
    """
    pairs = [(p, q) for p, q in zip(target_probs, draft_probs, strict=True) if p > 0 or q > 0]
    pairs.sort(key=lambda pair: math.inf if pair[1] == 0 else pair[0] / pair[1])
    # Before token j in this order q_i / q_j is the larger ratio, from j on p_i / p_j is.
    draft_before, target_from = 0.0, math.fsum(p for p, _ in pairs)
    alpha = 0.0
    for p, q in pairs:
        if p > 0 and q > 0:
            alpha += 1.0 / (target_from / p + draft_before / q)
        draft_before, target_from = draft_before + q, target_from - p
    return alpha


def coupled_bounds(alpha_rejection: float) -> tuple[float, float]:
    """Return the bounds of coupled alpha, (1 - TV) / (1 + TV) and 1 - TV, given 1 - TV."""
    return alpha_rejection / (2.0 - alpha_rejection), alpha_rejection


def residual(target_probs: Sequence[float], draft_probs: Sequence[float]) -> list[float]:
    """Return the law of the correction under rejection, (p - q)+ normalised; p itself where p = q."""
    excess = [max(0.0, p - q) for p, q in zip(target_probs, draft_probs, strict=True)]
    total = math.fsum(excess)
    return [x / total for x in excess] if total > 0 else list(target_probs)


def expected_tokens(alpha: float, gamma: int) -> float:
    """Return tokens per cycle, correction or bonus included, when each test passes with probability alpha."""
    return expected_tokens_of([alpha**j for j in range(1, gamma + 1)])


def expected_tokens_of(survival: Sequence[float]) -> float:
    """Return tokens per cycle, given for j = 1 ... gamma the probability of at least j accepted tokens."""
    return 1.0 + math.fsum(survival)


def speedup(alpha: float, gamma: int, draft_cost: float, latency: float = 0.0) -> float:
    """Return the speedup of draft, send, verify and answer in sequence; gamma 0 is plain decoding."""
    if gamma == 0:
        return 1.0
    return expected_tokens(alpha, gamma) / (1.0 + gamma * draft_cost + 2.0 * latency)


def optimal_gamma(alpha: float, draft_cost: float, latency: float = 0.0, max_gamma: int = 64) -> int:
    """Return the gamma in [0, max_gamma] of the largest speedup, the smallest one on ties."""
    return max(range(max_gamma + 1), key=lambda gamma: speedup(alpha, gamma, draft_cost, latency))


def optimal_gamma_closed_form(alpha: float, draft_cost: float, latency: float = 0.0) -> float:
    """Return the real gamma at which the speedup is stationary, or 0 where speculation never pays.

    With l = -ln alpha and c = draft_cost / (1 + 2 latency) it is (w - 1 - l / c) / l, where w >= 1 solves
    w - ln w = 1 + l / c - l; that is, -w is the lower branch of Lambert's W at -exp(-1 - l / c + l).

    Args:
        alpha: In (0, 1).
        draft_cost: Positive.
        latency: Not negative.
    """
    rate, cost = -math.log(alpha), draft_cost / (1.0 + 2.0 * latency)
    right = 1.0 + rate / cost - rate
    if right <= 1.0:
        return 0.0
    w = right + math.log(right) + 1.0
    for _ in range(50):
        step = (w - math.log(w) - right) / (1.0 - 1.0 / w)
        w -= step
        if abs(step) < 1e-14 * w:
            break
    return max(0.0, (w - 1.0 - rate / cost) / rate)


def goodput_speedup(
    alpha: float, gamma: int, batch: int, draft_cost: float, saturation_tokens: int = 256
) -> float:
    """Return the throughput over plain decoding of `batch` sessions at once.

    Roofline model: a target pass takes 1 up to `saturation_tokens` tokens and grows linearly beyond; so
    does a draft step, from `draft_cost`.
    """

    def passes(tokens: int) -> float:
        return max(1.0, tokens / saturation_tokens)

    cycle = passes(batch * (gamma + 1)) + gamma * draft_cost * passes(batch)
    return expected_tokens(alpha, gamma) * passes(batch) / cycle


def optimal_goodput_gamma(
    alpha: float, batch: int, draft_cost: float, saturation_tokens: int = 256, max_gamma: int = 64
) -> int:
    """Return the gamma in [0, max_gamma] of the largest `goodput_speedup`, the smallest one on ties."""
    return max(
        range(max_gamma + 1),
        key=lambda gamma: goodput_speedup(alpha, gamma, batch, draft_cost, saturation_tokens),
    )


def alpha_standard_error(alpha: float, gamma: int, cycles: int) -> float:
    """Return the standard deviation of accepted / tested over cycles of depth gamma >= 1; alpha < 1."""
    return math.sqrt(alpha * (1.0 - alpha) ** 2 / (cycles * (1.0 - alpha**gamma)))


def tree_tokens(
    by_depth: Sequence[float], rescue: Sequence[float], max_nodes: int, least: float = 0.0
) -> list[float]:
    """Return tokens per cycle of the best trees of 1, 2, ... nodes, correction or bonus included.

    A tree's tokens are 1 plus the sum over its nodes of the probability that the target walks through them.
    That falls from parent to child and from sibling to sibling, so the best tree of n nodes is that of the n
    likeliest, and taking them one by one gives all sizes at once: the same values as the dynamic programme of
    arXiv 2402.12374.

    Args:
        by_depth: Probability that the first child is accepted, at each depth; as deep the trees may be.
        rescue: Probability that the second, third, ... child is, given that none before it was.
        max_nodes: Upper bound of nodes.
        least: Nodes that are reached less often are left out; the result then is shorter.
    """
    tokens: list[float] = []
    total = 1.0
    # (minus the probability of the node, its depth, its rank, the probability that its elder siblings fail)
    heap = [(-by_depth[0], 0, 0, 1.0)] if by_depth else []
    while heap and len(tokens) < max_nodes:
        reached, depth, rank, missed = heapq.heappop(heap)
        if -reached < least or reached == 0.0:
            break
        total -= reached
        tokens.append(total)
        if depth + 1 < len(by_depth):
            heapq.heappush(heap, (reached * by_depth[depth + 1], depth + 1, 0, -reached))
        if rank < len(rescue):
            missed += reached
            heapq.heappush(heap, (-missed * rescue[rank], depth, rank + 1, missed))
    return tokens
