"""SpecInfer and SpecTr, which verify several children of a node, as functions of the distributions alone.

With a target distribution p and children drawn independently from a draft distribution q:

* SpecInfer (arXiv 2305.09781): the children are tested in turn by rejection, each against what the earlier
  ones left of p. They are drawn with replacement, as in the article, or without (as in arXiv 2402.12374).
* SpecTr (arXiv 2310.15141), k-sequential selection: the children, drawn with replacement, are tested in turn
  by min(1, p / (rho q)), with one rho for all of them.

They are not served: docs/how-it-works.md says what they would need and gain.

Numbers are floats, or `fractions.Fraction` for exact results. A distribution is a sequence with one number
per token; all tokens that q cannot draw may be put together into one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

Number: TypeAlias = float | Fraction
Distribution: TypeAlias = Sequence[Number]

_HALVINGS = 50


@dataclass(frozen=True)
class NodeOutcome:
    """What verification does at a node of which the children are known.

    Attributes:
        accepted: Probability that each child is accepted; at most one is.
        correction: Distribution of the target's token if none is.
    """

    accepted: tuple[Number, ...]
    correction: tuple[Number, ...]


def specinfer(
    p: Distribution, q: Distribution, children: Sequence[int], *, with_replacement: bool = True
) -> NodeOutcome:
    """Return what SpecInfer does at a node.

    Args:
        p: The target's distribution.
        q: The distribution from which the first child was drawn.
        children: The children in the order of the draws, which q allows.
        with_replacement: Whether a child was drawn from q even if an earlier one is equal; else from what the
            earlier ones left of q.
    """
    rounds = list(_rounds(p, q, children, with_replacement=with_replacement))
    accepted, left = list[Number](), _one(p)
    for child, (rest, draft) in zip(children, rounds, strict=False):
        test = min(1, rest[child] / draft[child])
        accepted.append(left * test)
        left *= 1 - test
    return NodeOutcome(tuple(accepted), tuple(rounds[-1][0]))


def spectr(p: Distribution, q: Distribution, children: Sequence[int]) -> NodeOutcome:
    """Return what SpecTr's k-sequential selection does at a node.

    Args:
        p: The target's distribution.
        q: The distribution from which each child was drawn, with replacement.
        children: At least one, which q allows.
    """
    rho = spectr_rho(p, q, len(children))
    accepted, left = list[Number](), _one(p)
    for child in children:
        test = min(1, p[child] / (rho * q[child]))
        accepted.append(left * test)
        left *= 1 - test
    beta = _overlap([a / rho for a in p], q)
    share = _draws(beta, len(children))
    rest = _normalised([max(0, a - min(a / rho, b) * share) for a, b in zip(p, q, strict=True)], p)
    return NodeOutcome(tuple(accepted), tuple(rest))


def spectr_rho(p: Distribution, q: Distribution, count: int) -> Number:
    """Return the smallest factor with which k-sequential selection of `count` children is exact.

    A child equal to x is accepted with probability at most p(x) if (1 - (1 - beta)^k) / beta <= rho, where
    beta = sum min(p / rho, q). The result satisfies this, also in exact arithmetic; it is found by bisection
    in [1, k].
    """
    low, high = _one(p), count * _one(p)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _draws(_overlap([a / middle for a in p], q), count) <= middle:
            high = middle
        else:
            low = middle
    return high


def _draws(beta: Number, count: int) -> Number:
    """Return the mean number of draws until one of `count` is accepted, each with probability beta."""
    total, left = 0 * beta, 1 + 0 * beta
    for _ in range(count):
        total += left
        left *= 1 - beta
    return total


def _rounds(
    p: Distribution, q: Distribution, children: Sequence[int], *, with_replacement: bool
) -> Iterator[tuple[Distribution, Distribution]]:
    """Yield what is left of p and the draft's distribution, before each child is drawn and after the last."""
    rest, draft = p, q
    for child in children:
        yield rest, draft
        # Empty if p = q: then the child is accepted, and what follows has probability 0.
        rest = _normalised([max(0, a - b) for a, b in zip(rest, draft, strict=True)], rest)
        if not with_replacement:
            draft = _normalised([0 if i == child else b for i, b in enumerate(draft)], [0] * len(draft))
    yield rest, draft


def _overlap(p: Distribution, q: Distribution) -> Number:
    return sum(min(a, b) for a, b in zip(p, q, strict=True))


def _normalised(weights: Distribution, otherwise: Distribution) -> Distribution:
    total = sum(weights)
    return [weight / total for weight in weights] if total else otherwise


def _one(p: Distribution) -> Number:
    """1 of the type of a distribution's numbers."""
    return 1 + 0 * p[0]
