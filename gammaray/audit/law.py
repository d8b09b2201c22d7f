"""Tests of the law of a server's tokens, from the probabilities that it reports itself.

At temperature 1 without truncation a generated token is a draw from the cells that its own `top_logprobs`
name: the listed tokens and, as one cell, the rest. While that holds, the wealth of a gambler who is paid
q(cell) / p(cell) for a bet q, chosen before the draw, is a nonnegative martingale, and so is a mixture of
gamblers. By Ville's inequality (1939) it ever reaches 1 / alpha with probability at most alpha: the tests
may be looked at after every token and stopped at any time (arXiv 2210.01948). The gamblers bet on faults of
many kinds and sizes: their mixture loses at most the logarithm of their number to the one who is right
(arXiv 2010.09686 compares mixtures with other ways to bet).

What is a cell must not depend on the token that was drawn. Servers add that token to the list if it is none
of the most likely ones, or put it in the place of the last; so the lowest entries of each list belong to the
rest (`Position.read`).
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import mul
from typing import TypeAlias

from gammaray.checks import check_int, check_number
from gammaray.errors import InvalidArgumentError

Cells: TypeAlias = Mapping[Hashable, float] | Iterable[tuple[Hashable, float]]
"""Natural log-probabilities by token: its id, its bytes or its text, by which it may be listed twice."""

_FLOAT32 = 1e-6
"""Error of a log-probability that was computed in float32."""

_ROUNDED = ((2.0**8, 2.0**-8), (2.0**11, 2.0**-11))
"""Of bfloat16 and float16: what makes a mantissa in [0.5, 1) whole, and the largest relative error."""

_EXCESS = 1e-4
"""By how much probabilities may exceed 1, beside what their rounding explains."""

_SMALLEST = math.log(1e-6)
"""Log-probability from which down a token is no cell of its own."""

_CERTAIN = 1 - 1e-4
"""Probability of a cell above which a position says too little to be evaluated."""

_BELOW_CELLS = 2.0
"""How far the rest's mean log-probability of a token is assumed to lie below that of the least likely cell. A
guess for the bets on temperatures, which are fair whether or not it is right."""

_LEAST_REST = 1e-4
"""Probability of the rest above which it is bet to be drawn more often: below, it is nearly unknown, as it is
what float32 leaves of 1."""

_SHARPNESS = 5
"""Power of p that stands for what a drafter likes best."""

_SHARE = 0.02
"""Share of replaced tokens at which a law's power is evaluated."""

_POWER_80 = 0.8416
"""Quantile of the normal distribution at 0.8."""

EXACT = (_FLOAT32, 0.0)
"""`rounding` of log-probabilities in float32."""

_STEPS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
_SMALL_STEPS = (0.00125, 0.0025, *_STEPS[:4])
_MISSING = (0.5, 0.95)
_TOP_P = (0.8, 0.9, 0.95, 0.98)
_MIN_P = (0.02, 0.05, 0.1)

_RECYCLED = (0.02, 0.05, 0.1, 0.25, 0.5, 0.9)
_ALTERNATING = (0.1, 0.25, 0.5)


@dataclass(frozen=True)
class Position:
    """The cells of one position."""

    index: Mapping[Hashable, int]  # cell by token; all other tokens are the rest, the last cell
    probs: Sequence[float]  # probabilities of the cells, which sum to 1
    scores: Sequence[float]  # log-probabilities of the cells, and an assumed mean one of the rest's tokens
    errors: Sequence[float]  # by which share of itself the probability of each cell but the rest may be wrong
    cut: float  # log-probability above which tokens are cells of their own

    @classmethod
    def read(cls, cells: Cells, num_listed: int, hidden: Container[Hashable] = ()) -> Position | None:
        """Return the cells of a position; None if too few tokens are listed to know them.

        Cells are the tokens above the (n - 1 - n // 8)-th of the n = `num_listed` most likely ones. This
        excludes a drawn token that was added or took the last place, even if probabilities tie or a few
        entries of equal text are lost. Texts with U+FFFD may stand for many tokens and belong to the rest.
        Probabilities are those given that no token of `hidden` is drawn, which are not reported then, such as
        an end of sequence. InvalidArgumentError if a log-probability is NaN or above 0, or the probabilities
        exceed 1 together.
        """
        pairs = list(cells.items() if isinstance(cells, Mapping) else cells)
        for token, value in pairs:
            if not value <= _EXCESS:
                raise InvalidArgumentError(f"cells[{token!r}]", value, "a log-probability, at most 0")
        values = sorted((value for _, value in pairs), reverse=True)
        rank = num_listed - 1 - num_listed // 8
        is_short = len(values) < rank
        cut = _SMALLEST if is_short else max(values[rank - 1], _SMALLEST)
        absolute, relative = rounding([value for value in values if value > cut])
        found: dict[Hashable, float] = {}
        errors: dict[Hashable, float] = {}
        for token, value in pairs:
            if value > cut and not (isinstance(token, str) and "\ufffd" in token):
                found[token] = found.get(token, 0.0) + math.exp(value)
                errors[token] = max(errors.get(token, 0.0), math.expm1(absolute + relative * abs(value)))
        total = math.fsum(found.values())
        if total > 1 + _EXCESS + 2 * absolute + 4 * relative:
            raise InvalidArgumentError("cells", f"probabilities of {total:.4f} together", "at most 1")
        seen = max(1.0, total) - math.fsum(found.pop(token) for token in [*found] if token in hidden)
        if (is_short and total < 1 - 1e-3) or seen < 0.1:
            return None
        probs = [prob / seen for prob in found.values()]
        probs.append(max(0.0, 1.0 - math.fsum(probs)))
        scores = [math.log(prob) for prob in probs[:-1]]
        scores.append(min(scores, default=0.0) - _BELOW_CELLS)
        index = {token: cell for cell, token in enumerate(found)}
        excess = max(0.0, total - 1.0)
        return cls(index, probs, scores, [excess + errors[token] / seen for token in found], cut)

    def cell_of(self, token: Hashable, logprob: float | None = None) -> int:
        """Return the cell of a token; `logprob` tells one of the rest from a listed one of equal text."""
        rest = len(self.probs) - 1
        return rest if logprob is not None and logprob <= self.cut else self.index.get(token, rest)

    @property
    def is_certain(self) -> bool:
        """Whether one cell has nearly all of the probability."""
        return max(self.probs) > _CERTAIN

    def doubt(self, ratios: Sequence[float]) -> float:
        """Return by how much the errors may raise the mean of `ratios` over the cells."""
        rest = ratios[-1]
        sides = zip(self.errors, self.probs, ratios, strict=False)
        return math.fsum([error * prob * abs(ratio - rest) for error, prob, ratio in sides])


def rounding(values: Sequence[float]) -> tuple[float, float]:
    """Return the absolute and the relative error of log-probabilities, by how all of them look rounded."""
    mantissas = [math.frexp(value)[0] for value in values]
    for scale, relative in _ROUNDED:
        if all((mantissa * scale).is_integer() for mantissa in mantissas):
            return _FLOAT32, relative
    for digits in range(1, 5):
        if all(round(value, digits) == value for value in values):
            return _FLOAT32 + 0.5 * 10.0**-digits, 0.0
    return EXACT


@dataclass(frozen=True)
class Family:
    """Alternatives of one kind."""

    name: str  # for reports
    # One alternative each. Of temperatures the exponent of the probabilities, minus 1; else the share of the
    # law that another one replaces: q = p + size * (other - p).
    sizes: tuple[float, ...]

    @property
    def labels(self) -> list[str]:
        if self is TEMPERATURES:
            return [f"temperature {1 / (1 + size):.3g}" for size in self.sizes]
        return [f"{self.name}: {size:g}" for size in self.sizes]


TEMPERATURES = Family("temperature", tuple(2 * sign * size for size in _STEPS for sign in (1, -1)))
_SHARES = (
    Family("top-1 share", (*_STEPS, *(-size for size in _STEPS))),
    Family("likely-token share", _STEPS),
)
_STRAYS = (Family("unlisted-token share", _SMALL_STEPS), Family("any-token share", _SMALL_STEPS))
_CUTS = (
    *(Family(f"cut by top_p {top_p:g}", _MISSING) for top_p in _TOP_P),
    *(Family(f"cut by min_p {min_p:g}", _MISSING) for min_p in _MIN_P),
    Family("unlisted tokens missing", (0.1, 0.25, *_MISSING, -0.1, -0.25, -0.5)),
)
_DRAFTS = (Family("draft share", (*_STEPS, 0.32, 0.64)),)
_MIXED = (*_SHARES, *_STRAYS, *_CUTS, *_DRAFTS)
_GROUPS = ((TEMPERATURES,), _SHARES, _STRAYS, _CUTS, _DRAFTS)

FAMILIES = (TEMPERATURES, *_MIXED)
"""All alternatives, in the order of `Bets.log_factors`."""

ALTERNATIVES = tuple(label for family in FAMILIES for label in family.labels)
"""Their names."""

LOG_STAKES = tuple(
    -math.log(len(_GROUPS) * number)
    for number in (sum(len(family.sizes) for family in group) for group in _GROUPS)
    for _ in range(number)
)
"""Logarithms of the shares of the first wealth: equal by group, and within a group."""


class Bets:
    """The bets of all alternatives on one position; the reference drafter, if known, proposes `drafted`."""

    def __init__(self, position: Position, drafted: int | None = None) -> None:
        self._position, p = position, position.probs
        self._tempered = [self._temper(size) for size in TEMPERATURES.sizes]
        top, stray = max(p[:-1]), float(p[-1] > _LEAST_REST)
        self._mixed = [
            _likely(p, [float(cell == p.index(top)) for cell in range(len(p))]),
            _likely(p, [prob**_SHARPNESS for prob in p[:-1]] + [0.0]),
            _likely(p, [0.0] * (len(p) - 1) + [stray]),
            _likely(p, [1.0] * (len(p) - 1) + [stray]),
            *(_cut(p, _kept_by_top_p(p, top_p)) for top_p in _TOP_P),
            *(_cut(p, [float(prob >= min_p * top) for prob in p[:-1]] + [1.0]) for min_p in _MIN_P),
            _cut(p, [1.0] * (len(p) - 1) + [0.0]),
            [1.0] * len(p) if drafted is None else _likely(p, [float(c == drafted) for c in range(len(p))]),
        ]
        self._doubts = [position.doubt(ratios) for ratios in chain(self._tempered, self._mixed)]

    def log_factors(self, cell: int) -> list[float]:
        """Return by what the wealth of each alternative is multiplied after a draw of `cell`, as a logarithm.

        It is q / p, reduced so that its mean is at most 1 for all probabilities within their errors.
        """
        doubts = iter(self._doubts)
        found = [math.log(ratios[cell] / (1.0 + next(doubts))) for ratios in self._tempered]
        for family, ratios, doubt in zip(_MIXED, self._mixed, doubts, strict=True):
            gain = ratios[cell] - 1.0
            lowest = -0.5 / max(0.5, max(ratios) - 1.0)  # against a law: no probability falls below a half
            for size in family.sizes:
                used = max(size, lowest)
                found.append(math.log((1.0 + used * gain) / (1.0 + abs(used) * doubt)))
        return found

    def informations(self) -> list[float]:
        """Return per family the Fisher information of one draw on the size: at 0.02, on temperatures at 0.

        At a share of 0 a few flat positions, which seldom show one, could outweigh all others.
        """
        p, scores = self._position.probs, self._position.scores
        mean = math.fsum(map(mul, p, scores))
        found = [math.fsum([prob * (score - mean) ** 2 for prob, score in zip(p, scores, strict=True)])]
        for ratios in self._mixed:
            gains = [(prob, ratio - 1.0) for prob, ratio in zip(p, ratios, strict=True)]
            found.append(math.fsum([prob * gain**2 / (1.0 + _SHARE * gain) for prob, gain in gains]))
        return found

    def losses(self) -> list[float]:
        """Return per family what the errors of the probabilities cost a bet, over its size."""
        return [self._position.doubt(self._position.scores), *self._doubts[len(self._tempered) :]]

    def _temper(self, size: float) -> list[float]:
        weights = [math.exp(size * score) for score in self._position.scores]
        total = math.fsum(map(mul, weights, self._position.probs))
        return [weight / total for weight in weights]


def _likely(p: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return q / p for q proportional to `weights` where p is positive."""
    total = math.fsum(weight for prob, weight in zip(p, weights, strict=True) if prob > 0)
    if total <= 0:
        return [1.0] * len(p)
    return [weight / total / prob if prob > 0 else 1.0 for prob, weight in zip(p, weights, strict=True)]


def _cut(p: Sequence[float], kept: Sequence[float]) -> list[float]:
    """Return q / p for q of which the share `kept` of each cell is left."""
    total = math.fsum(map(mul, p, kept))
    return [share / total for share in kept] if total > 0 else [1.0] * len(p)


def _kept_by_top_p(p: Sequence[float], top_p: float) -> list[float]:
    """Return the share that top_p keeps of each cell: 1 up to the one that crosses it; part of the rest."""
    order = sorted(range(len(p) - 1), key=p.__getitem__, reverse=True)
    masses = [0.0, *accumulate(p[cell] for cell in order)]
    kept = [0.0] * len(p)
    for cell, before in zip(order, masses, strict=False):
        kept[cell] = float(before < top_p)
    kept[-1] = max(0.0, top_p - masses[-1]) / p[-1] if p[-1] > 0 else 0.0
    return kept


class Wealth:
    """The wealth of gamblers, one per alternative.

    Args:
        alpha: Probability with which an honest server may be rejected.
        num_listed: How many `top_logprobs` the server lists for each token, not counting the drawn one where
            it is added to them; at least 4.
        hidden: Tokens that the server does not report when they are drawn, such as an end-of-sequence token.
        alternatives: Names of the alternatives, and logarithms of the gamblers' shares of the first wealth.
    """

    def __init__(
        self, alpha: float, num_listed: int, hidden: Container[Hashable], alternatives: Mapping[str, float]
    ) -> None:
        check_number("alpha", alpha, 0.0, 0.5, open_low=True)
        check_int("num_listed", num_listed, 4, 2**20)
        self.alpha = alpha
        # Tokens or pairs, without hidden ones, and those of them that are left out, as too few are listed.
        self.num_tokens = self.num_unreadable = 0
        self.log_e_value = self.largest_log_e_value = 0.0  # evidence against the server now, and its maximum
        self.num_tokens_until_rejected: int | None = None  # until the evidence first reached 1 / alpha
        self._num_listed, self._hidden = num_listed, hidden
        self._alternatives, self._wealth = [*alternatives], [*alternatives.values()]

    @property
    def rejected(self) -> bool:
        """Whether the e-value has ever reached 1 / alpha."""
        return self.num_tokens_until_rejected is not None

    def strongest(self) -> str:
        """Return the name of the alternative with the most wealth."""
        return self._alternatives[self._wealth.index(max(self._wealth))]

    def _read(self, cells: Cells) -> Position | None:
        return Position.read(cells, self._num_listed, self._hidden)

    def _multiply(self, log_factors: Sequence[float]) -> None:
        self._wealth = [wealth + gain for wealth, gain in zip(self._wealth, log_factors, strict=True)]
        most = max(self._wealth)
        self.log_e_value = most + math.log(math.fsum([math.exp(wealth - most) for wealth in self._wealth]))
        self.largest_log_e_value = max(self.largest_log_e_value, self.log_e_value)
        if not self.rejected and self.log_e_value >= -math.log(self.alpha):
            self.num_tokens_until_rejected = self.num_tokens


class LawTest(Wealth):
    """Tests whether tokens are draws from the probabilities that the server reports for them.

    A pair of prompt and seed may be observed once only: its repetition is no new draw.
    """

    def __init__(self, alpha: float, num_listed: int = 20, hidden: Container[Hashable] = ()) -> None:
        super().__init__(alpha, num_listed, hidden, dict(zip(ALTERNATIVES, LOG_STAKES, strict=True)))
        self._informations = [0.0] * len(FAMILIES)
        self._losses = [0.0] * len(FAMILIES)

    def observe(
        self,
        token: Hashable,
        cells: Cells,
        logprob: float | None = None,
        drafted: Hashable | None = None,
    ) -> Position | None:
        """Count a token, and return the cells of its position; None if it is hidden or they are not known.

        `cells` are the `top_logprobs` of its position; InvalidArgumentError if they are of no distribution.
        `drafted` is what a reference drafter proposes there, to bet on a share of its tokens; it must follow
        from the tokens before alone.
        """
        if token in self._hidden:
            return None
        position = self._read(cells)
        self.num_tokens += 1
        self.num_unreadable += position is None
        if position is None or position.is_certain:
            return position
        bets = Bets(position, None if drafted is None else position.cell_of(drafted))
        self._informations = [*map(sum, zip(self._informations, bets.informations(), strict=True))]
        self._losses = [*map(sum, zip(self._losses, bets.losses(), strict=True))]
        self._multiply(bets.log_factors(position.cell_of(token, logprob)))
        return position

    def smallest_detectable(self) -> dict[str, float]:
        """Return by family of faults the smallest one that so many tokens show with a probability of 80 %.

        Temperatures are given as such, below and above 1; for cuts and unlisted tokens, which share of the
        probability that would be cut off is missing; else which share of the tokens is replaced. `inf`: none.

        It follows from the cells, not from the draws: for small sizes the logarithm of a bet's wealth is
        normal with mean size^2 I / 2 - size * losses and variance size^2 I, where I is the Fisher information
        of all positions on the size. This has to exceed log(1 / alpha) and the logarithm of the stake.
        """
        needed = -math.log(self.alpha) - min(LOG_STAKES)
        sizes = {family.name: math.inf for family in FAMILIES}
        for family, information, loss in zip(FAMILIES, self._informations, self._losses, strict=True):
            deviation = math.sqrt(information)
            if deviation > 0:
                slack = _POWER_80 + loss / deviation
                sizes[family.name] = (slack + math.sqrt(slack**2 + 2 * needed)) / deviation
        tempered = sizes.pop(TEMPERATURES.name)
        found = {
            "temperature below 1": 1 / (1 + tempered),
            "temperature above 1": 1 / (1 - tempered) if tempered < 1 else math.inf,
        }
        return found | {name: size if size <= 1 else math.inf for name, size in sizes.items()}


class IndependenceTest(Wealth):
    """Tests whether the tokens of two choices, or of two seeds, are drawn independently of each other.

    Under an alternative one random number decides both tokens at a share of the places: they agree as often
    as their probabilities allow (a maximal coupling), always if their contexts are equal. Other gamblers bet
    that too few pairs are two most likely tokens. Each bet is fair given either of its tokens, so that one
    test may compare choice 1 with 0, 2 with 1, and so on.
    """

    def __init__(self, alpha: float, num_listed: int = 20, hidden: Container[Hashable] = ()) -> None:
        names = [f"recycled randomness {share:g}" for share in _RECYCLED]
        names += [f"alternating randomness {share:g}" for share in _ALTERNATING]
        super().__init__(alpha, num_listed, hidden, dict.fromkeys(names, -math.log(len(names))))

    def observe(
        self,
        token: Hashable,
        cells: Cells,
        other: Hashable,
        other_cells: Cells,
        logprob: float | None = None,
        other_logprob: float | None = None,
    ) -> None:
        """Count two tokens at one place of two choices, whose contexts may differ; see `LawTest.observe`."""
        if token in self._hidden or other in self._hidden:
            return
        here, there = self._read(cells), self._read(other_cells)
        self.num_tokens += 1
        self.num_unreadable += here is None or there is None
        if here is None or there is None or here.is_certain or there.is_certain:
            return
        self._multiply(
            pair_log_factors(here, there, here.cell_of(token, logprob), there.cell_of(other, other_logprob))
        )


def pair_log_factors(here: Position, there: Position, first: int, second: int) -> list[float]:
    """Return by what the wealth of each alternative of `IndependenceTest` is multiplied, as logarithms."""
    gain = _coupled_ratio(here, there, first, second) - 1.0
    rests = (
        _coupled_ratio(here, there, len(here.probs) - 1, second),
        _coupled_ratio(here, there, first, len(there.probs) - 1),
    )
    error = max(*here.errors, *there.errors)
    doubt = error * (1.0 + max(rests))
    found = [math.log((1.0 + share * gain) / (1.0 + share * doubt)) for share in _RECYCLED]
    both = _surprise(here, first) * _surprise(there, second)
    return found + [math.log((1.0 - share * both) / (1.0 + share * error)) for share in _ALTERNATING]


def _surprise(position: Position, cell: int) -> float:
    """Return whether the most likely token was drawn, minus its probability, scaled to [-1, 1]."""
    top = max(position.probs[:-1])
    return (float(cell == position.probs.index(top)) - top) / max(top, 1.0 - top)


def _coupled_ratio(here: Position, there: Position, first: int, second: int) -> float:
    """Return the probability of a pair under the maximal coupling, over that of two independent draws.

    The coupling draws one token for both from the minimum of their laws, else two from what is left of each.
    """
    partners = {cell: there.index[token] for token, cell in here.index.items() if token in there.index}
    partners[len(here.probs) - 1] = len(there.probs) - 1
    shared = {cell: min(here.probs[cell], there.probs[partner]) for cell, partner in partners.items()}
    p, q = here.probs[first], there.probs[second]
    if p <= 0 or q <= 0:
        return 1.0
    left = [prob - shared.get(cell, 0.0) for cell, prob in enumerate(here.probs)]
    left_there = q - math.fsum(shared[cell] for cell, partner in partners.items() if partner == second)
    found = shared[first] if partners.get(first) == second else 0.0
    return (found + (left[first] * left_there / mass if (mass := math.fsum(left)) > 0 else 0.0)) / (p * q)
