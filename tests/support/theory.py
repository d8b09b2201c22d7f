"""The formulas of docs/sizing.md (arXiv 2211.17192)."""

import math


def expected_tokens(alpha: float, gamma: int) -> float:
    """Return tokens per cycle, correction or bonus included, when each test passes with probability alpha."""
    return 1.0 + math.fsum(alpha**j for j in range(1, gamma + 1))


def speedup(alpha: float, gamma: int, draft_cost: float) -> float:
    """Return the speedup of drafting and verifying in sequence; a draft step costs `draft_cost` passes."""
    return expected_tokens(alpha, gamma) / (1.0 + gamma * draft_cost)
