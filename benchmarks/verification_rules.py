"""Verification rules of the literature, as functions of the distributions alone.

With a target distribution p and a draft distribution q at each position of a chain:

* coupled (arXiv 2408.07978), the default; rejection (arXiv 2211.17192); block (arXiv 2403.10444).

With several children of one node of a tree, drawn independently from q:

* SpecInfer (arXiv 2305.09781): the children are tested in turn by rejection, each against what the earlier
  ones left of p. They are drawn with replacement, as in the article, or without (as in arXiv 2402.12374).
* SpecTr (arXiv 2310.15141), k-sequential selection: the children, drawn with replacement, are tested in turn
  by min(1, p / (rho q)), with one rho for all of them.

SpecInfer and SpecTr are not served, only compared: docs/how-it-works.md says what they would need and gain.

Numbers are floats, or `fractions.Fraction` for exact results. A distribution is a sequence with one number
per token. Except in `coupled_acceptance`, all tokens that q cannot draw may be put together into one, as no
rule tells them apart.

Verification emits tokens of law p, whatever the method. So means over cycles can be taken over texts of the
*target*: a token of such a text is accepted, given the text, with the probability that it is accepted divided
by p of it. Recorded texts of the target then suffice to compare methods, without drawing proposals.
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


def rejection_survival(probs: Sequence[tuple[Number, Number]]) -> list[Number]:
    """Return the probability that the first 1, 2, ... tokens of a text of the target are accepted.

    Args:
        probs: Of each token of the text p, above 0, and q, given the tokens before it.
    """
    survival = list[Number]()
    left: Number = 1
    for p, q in probs:
        left *= min(1, q / p)
        survival.append(left)
    return survival


def block_survival(probs: Sequence[tuple[Number, Number]]) -> list[Number]:
    """Return the probability that the first 1, 2, ... tokens of a text of the target are accepted.

    Block verification keeps a drafted text with its carried probability c = min(1, c p / q), token by token.
    The text is drafted with the product Q of the q, so given that the target writes it, it is accepted with
    probability Q c / P: the smallest Q / P of its beginnings, at most 1. What is drafted after it does not
    matter.

    Args:
        probs: Of each token of the text p, above 0, and q, given the tokens before it.
    """
    survival = list[Number]()
    ratio: Number = 1
    least: Number = 1
    for p, q in probs:
        ratio = ratio * q / p
        least = min(least, ratio)
        survival.append(least)
    return survival


def coupled_acceptance(p: Distribution, q: Distribution, token: int) -> Number:
    """Return the probability that coupled verification accepts `token`, given that the target draws it.

    Target and draft take the argmax of log-probability + the same Gumbel noise, and agree on j with
    probability 1 / sum_i max(p_i / p_j, q_i / q_j).

    Args:
        p: The target's distribution.
        q: The draft's. Its tokens must not be put together.
        token: A token with p above 0.
    """
    if q[token] == 0:
        return 0
    return q[token] / sum(max(a * q[token], b * p[token]) for a, b in zip(p, q, strict=True))


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


def specinfer_ranks(
    p: Distribution, q: Distribution, token: int, count: int, drawn: Sequence[int] | None = None
) -> list[Number]:
    """Return the probability that SpecInfer accepts `token` as the first, second, ... of `count` children.

    Args:
        p: The target's distribution.
        q: The draft's.
        token: A token.
        count: Number of children.
        drawn: None: children are drawn with replacement. Else `count` - 1 earlier children that were drawn
            without replacement: the result is for them, and its mean over such draws is the probability.
    """
    ranks, left = list[Number](), _one(p)
    earlier = [token] * (count - 1) if drawn is None else drawn
    rounds = _rounds(p, q, earlier, with_replacement=drawn is None)
    for rank, (rest, draft) in enumerate(rounds):
        ranks.append(left * min(rest[token], draft[token]))
        if rank == count - 1 or left == 0:
            break
        if drawn is None:
            left *= 1 - _overlap(rest, draft)
        else:
            child = drawn[rank]
            left *= 1 - min(1, rest[child] / draft[child])
    return ranks + [0] * (count - len(ranks))


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


def spectr_ranks(p: Distribution, q: Distribution, token: int, count: int) -> list[Number]:
    """Return the probability that SpecTr accepts `token` as the first, second, ... of `count` children."""
    rho = spectr_rho(p, q, count)
    beta = _overlap([a / rho for a in p], q)
    accepted = min(p[token] / rho, q[token])
    return [accepted * (1 - beta) ** rank for rank in range(count)]


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
