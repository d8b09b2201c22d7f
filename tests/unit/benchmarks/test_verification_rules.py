"""Verification rules in exact arithmetic: whole outputs by enumeration, golden figures."""

import itertools
import math
import random
from collections import defaultdict
from fractions import Fraction

import pytest

from benchmarks.verification_rules import (
    specinfer,
    spectr,
    spectr_rho,
)

P4 = [Fraction(n, 10) for n in (5, 2, 1, 2)]
Q4 = [Fraction(n, 10) for n in (4, 3, 2, 1)]


class Model:
    """Random rational distributions by context, some of them with zeros."""

    def __init__(self, vocab_size, seed, zeros=0.2):
        self.vocab_size, self._seed, self._zeros = vocab_size, seed, zeros

    def __call__(self, context):
        rng = random.Random(f"{self._seed} {context}")
        keep = rng.randrange(self.vocab_size)
        weights = [
            0 if token != keep and rng.random() < self._zeros else rng.randint(1, 9)
            for token in range(self.vocab_size)
        ]
        return [Fraction(weight, sum(weights)) for weight in weights]


def with_replacement(q, count):
    for children in itertools.product([token for token, prob in enumerate(q) if prob], repeat=count):
        yield math.prod(q[child] for child in children), children


def without_replacement(q, count):
    for children in itertools.permutations([token for token, prob in enumerate(q) if prob], count):
        prob, left = Fraction(1), Fraction(1)
        for child in children:
            prob, left = prob * q[child] / left, left - q[child]
        yield prob, children


def specinfer_without(p, q, children):
    return specinfer(p, q, children, with_replacement=False)


RULES = {
    "specinfer": (specinfer, with_replacement),
    "specinfer_without_replacement": (specinfer_without, without_replacement),
    "spectr": (spectr, with_replacement),
}
LEAF = ()
SHAPES = {
    "chain": (((LEAF,),),),
    "two": (LEAF, LEAF),
    "three": (LEAF, LEAF, LEAF),
    "first_grows": ((LEAF, LEAF), LEAF),
    "second_grows": (LEAF, ((LEAF,),)),
    "binary": ((LEAF, LEAF), (LEAF, LEAF)),
}


def outputs(target, draft, rule, draws, shape, context=()):
    """Return the exact distribution of what a cycle with a tree of this shape emits."""
    p, q = target(context), draft(context)
    emitted = defaultdict(Fraction)
    if not shape:
        return {(token,): prob for token, prob in enumerate(p) if prob}
    width = min(len(shape), sum(prob > 0 for prob in q))
    for prob, children in draws(q, width):
        outcome = rule(p, q, children)
        assert min(outcome.accepted) >= 0
        for child, subtree, accepted in zip(children, shape, outcome.accepted, strict=False):
            if accepted:
                after = outputs(target, draft, rule, draws, subtree, (*context, child))
                for tokens, share in after.items():
                    emitted[(child, *tokens)] += prob * accepted * share
        for token, share in enumerate(outcome.correction):
            emitted[token,] += prob * (1 - sum(outcome.accepted)) * share
    return emitted


def completed(distribution, target, length):
    done, todo = defaultdict(Fraction), list(distribution.items())
    while todo:
        tokens, prob = todo.pop()
        if len(tokens) >= length:
            done[tokens[:length]] += prob
        elif prob:
            todo += [((*tokens, token), prob * p) for token, p in enumerate(target(tokens)) if p]
    return {tokens: prob for tokens, prob in done.items() if prob}


def depth_of(shape):
    return max((1 + depth_of(child) for child in shape), default=0)


def is_lossless(rule, draws, shape, seeds=range(4), vocab_size=3):
    for seed in seeds:
        target, draft = Model(vocab_size, seed), Model(vocab_size, seed + 100)
        length = depth_of(shape) + 1
        emitted = outputs(target, draft, rule, draws, shape)
        if completed(emitted, target, length) != completed({(): Fraction(1)}, target, length):
            return False
    return True


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("rule", "draws"), RULES.values(), ids=RULES)
def test_trees_are_lossless_in_exact_arithmetic(rule, draws, shape):
    assert is_lossless(rule, draws, shape)


@pytest.mark.parametrize(("rule", "draws"), RULES.values(), ids=RULES)
def test_nodes_with_equal_and_disjoint_distributions_are_lossless(rule, draws):
    halves = [Fraction(1, 2), Fraction(1, 2), Fraction(0)]
    for p, q in ((halves, halves), (halves, [Fraction(0), Fraction(0), Fraction(1)])):
        emitted = outputs(lambda _, p=p: p, lambda _, q=q: q, rule, draws, SHAPES["two"])
        assert completed(emitted, lambda _, p=p: p, 1) == {(0,): Fraction(1, 2), (1,): Fraction(1, 2)}


def acceptance(rule, draws, p, q, count):
    return sum(prob * sum(rule(p, q, children).accepted) for prob, children in draws(q, count))


def test_acceptance_of_several_children_is_golden():
    """p = (.5, .2, .1, .2), q = (.4, .3, .2, .1)."""
    for rule, draws in RULES.values():
        assert acceptance(rule, draws, P4, Q4, 1) == pytest.approx(0.8, abs=1e-9)
    assert acceptance(specinfer_without, without_replacement, P4, Q4, 2) == pytest.approx(0.926786, abs=5e-7)
    assert acceptance(specinfer_without, without_replacement, P4, Q4, 3) == pytest.approx(0.942381, abs=5e-7)
    assert spectr_rho(P4, Q4, 2) == pytest.approx(1.270156, abs=5e-7)
    assert acceptance(spectr, with_replacement, P4, Q4, 2) == pytest.approx(0.927016, abs=5e-7)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_spectr_accepts_at_least_the_bound_of_its_article(count):
    """Of the best verification of k draws, k-SEQ reaches at least 1 - (1 - 1/k)^k."""
    for seed in range(8):
        p, q = Model(4, seed)(()), Model(4, seed + 9)(())
        best = best_transport(p, q, count)
        assert (
            acceptance(spectr, with_replacement, p, q, count)
            >= (1 - (1 - Fraction(1, count)) ** count) * best
        )
        assert acceptance(spectr, with_replacement, p, q, count) <= best
        assert acceptance(specinfer, with_replacement, p, q, count) <= best


def best_transport(p, q, count):
    """Return the most that any verification of independent draws accepts: a minimum over sets of tokens."""
    sets = itertools.chain.from_iterable(itertools.combinations(range(len(p)), n) for n in range(len(p) + 1))
    return min(1 + sum(p[i] for i in one) - sum(q[i] for i in one) ** count for one in sets)
