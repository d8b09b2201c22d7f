"""Theory of speculative decoding: tokens per cycle, speedup and the best gamma.

Notation. *alpha* is the probability that one tested token is accepted; *gamma* the number of proposed tokens;
*draft_cost* the time of one draft step, and *latency* the one-way network time, both in units of one
target pass.
A speedup is over plain decoding by the same target.

References: arXiv 2211.17192 (expected tokens), 2402.12374 (trees).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def expected_tokens(alpha: float, gamma: int) -> float:
    """Return tokens per cycle, correction or bonus included, when each test passes with probability alpha."""
    return 1.0 + math.fsum(alpha**j for j in range(1, gamma + 1))


def speedup(alpha: float, gamma: int, draft_cost: float, latency: float = 0.0) -> float:
    """Return the speedup of draft, send, verify and answer in sequence; gamma 0 is plain decoding."""
    if gamma == 0:
        return 1.0
    return expected_tokens(alpha, gamma) / (1.0 + gamma * draft_cost + 2.0 * latency)


def optimal_gamma(alpha: float, draft_cost: float, latency: float = 0.0, max_gamma: int = 64) -> int:
    """Return the gamma in [0, max_gamma] of the largest speedup, the smallest one on ties."""
    return max(range(max_gamma + 1), key=lambda gamma: speedup(alpha, gamma, draft_cost, latency))


def tree_tokens(
    by_depth: Sequence[float], rescue: Sequence[float], max_nodes: int, least: float = 0.0
) -> list[float]:
    """Return tokens per cycle of the best trees of 1, 2, ... nodes, correction or bonus included.

    The expected tokens of a tree are 1 plus the sum over its nodes of the probability that the node is
    accepted. This decreases from parent to child and from sibling to sibling, so the best tree of n nodes
    consists of the n most probable ones. Adding nodes greedily gives all sizes in one pass, with the same
    values as the dynamic programme of arXiv 2402.12374.

    Args:
        by_depth: Probability that the first child is accepted, at each depth; its length bounds the depth.
        rescue: Probability that the second, third, ... child is accepted, given that no earlier sibling was.
        max_nodes: Upper bound of nodes.
        least: Nodes with a lower probability are left out; the result then is shorter.
    """
    tokens: list[float] = []
    total = 1.0
    # (negated probability of the node, depth, rank, probability that its earlier siblings are rejected)
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
