"""Tests of the law of a server's tokens, from the probabilities that it reports itself.

At temperature 1 without truncation a generated token is a draw from the cells that its own `top_logprobs`
name: the listed tokens and, as one cell, all others. While that holds, the wealth of a gambler who is paid
q(cell) / p(cell) for a bet q, chosen before the draw, is a nonnegative martingale, and so is a mixture of
gamblers. By Ville's inequality (1939) it ever reaches 1 / alpha with probability at most alpha: the tests
may be looked at after every token and stopped at any time (arXiv 2210.01948). The gamblers' bets form grids
over the size of each fault, which costs the logarithm of the grid's length and adapts to the true size
(arXiv 2010.09686 discusses mixtures and other ways).

Which tokens are cells must not depend on the token that was drawn. Servers add that token to the list if it
is none of the most likely ones, or put it in the place of the last; so the lowest entries of each list belong
to the rest (`Position.read`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import TypeAlias

from gammaray.checks import check_int, check_number
from gammaray.errors import InvalidArgumentError

Cells: TypeAlias = Mapping[Hashable, float] | Iterable[tuple[Hashable, float]]
"""Natural log-probabilities by token: its id, its bytes or its text, by which it may be listed twice."""

_FLOAT32 = 1e-6
"""Error of a log-probability that was computed in float32."""

_EXCESS = 0.02
"""By how much the listed probabilities may exceed 1 together, rounded as coarsely as bfloat16 rounds them."""

_SMALLEST = math.log(1e-6)
"""Log-probability below which a token is not a cell of its own."""

_CERTAIN = 1 - 1e-4
"""Probability of a cell from which on a position says too little to be evaluated."""

_BELOW_LISTED = 2.0
"""How far the unlisted tokens' mean log-probability is assumed to lie below the least one that is a cell: a
bet, on which no validity depends."""

_POWER = 0.8416
"""The normal quantile of a power of 80 %."""

_COARSE = ((256.0, 2.0**-9), (2048.0, 2.0**-12))
"""Of bfloat16 and float16: what makes a mantissa in [0.5, 1) whole, and the largest relative error."""


@dataclass(frozen=True)
class Position:
    """The cells of one position.

    Attributes:
        index: Cell by token; other tokens are the rest, the last cell.
        probs: Probabilities of the cells, which sum to 1.
        scores: Log-probabilities of the cells, and an assumed mean one of the rest's tokens.
        errors: For each cell but the rest, by which factor its probability may be wrong, minus 1.
        cut: Log-probability above which tokens are cells of their own.
    """

    index: Mapping[Hashable, int]
    probs: Sequence[float]
    scores: Sequence[float]
    errors: Sequence[float]
    cut: float

    @classmethod
    def read(cls, cells: Cells, num_listed: int) -> Position | None:
        """Return the cells of a position; None if too few tokens are listed to know them.

        Cells are the tokens above the (n - 1 - n // 8)-th of the n most likely ones, which excludes the drawn
        token where a server added it or let it take the last place, even if probabilities tie or if a server
        loses entries of equal text. Texts with U+FFFD may stand for many tokens and belong to the rest.

        Raises:
            InvalidArgumentError: `cells` has a log-probability that is NaN or above 0, or a sum of
                probabilities above 1.
        """
        pairs = list(cells.items() if isinstance(cells, Mapping) else cells)
        for token, value in pairs:
            if not value <= _EXCESS:
                raise InvalidArgumentError(f"cells[{token!r}]", value, "a log-probability, at most 0")
        values = sorted((value for _, value in pairs), reverse=True)
        rank = num_listed - 1 - num_listed // 8
        cut = max(values[rank - 1], _SMALLEST) if len(values) >= rank else _SMALLEST
        error = _error_of([value for value in values if value > cut])
        merged: dict[Hashable, float] = {}
        wrong: dict[Hashable, float] = {}
        for token, value in pairs:
            if value > cut and not (isinstance(token, str) and "\ufffd" in token):
                prob = math.exp(value)
                merged[token] = merged.get(token, 0.0) + prob
                wrong[token] = max(wrong.get(token, 0.0), _FLOAT32 - error * min(0.0, value))
        total = math.fsum(merged.values())
        if total > 1 + _EXCESS:
            raise InvalidArgumentError(
                "cells", f"probabilities that sum to {total:.4f}", "a sum of at most 1"
            )
        rest = max(0.0, 1.0 - total)
        if len(values) < rank and rest > 1e-3:
            return None
        probs = [prob / max(1.0, total) for prob in merged.values()] + [rest]
        scores = [math.log(prob) for prob in probs[:-1]]
        scores.append(min(scores, default=0.0) - _BELOW_LISTED)
        return cls({token: cell for cell, token in enumerate(merged)}, probs, scores, [*wrong.values()], cut)

    def cell_of(self, token: Hashable, logprob: float | None = None) -> int:
        """Return the cell of a token.

        Args:
            token: Named as in the cells.
            logprob: The token's own log-probability, if it is reported. At or below the cut it tells an
                unlisted token from a listed one of equal text.
        """
        rest = len(self.probs) - 1
        return rest if logprob is not None and logprob <= self.cut else self.index.get(token, rest)

    @property
    def is_certain(self) -> bool:
        """Whether one cell has nearly all of the probability."""
        return max(self.probs) > _CERTAIN


def _error_of(values: Sequence[float]) -> float:
    """Return the relative error of log-probabilities that look rounded to bfloat16 or float16, else 0."""
    mantissas = [math.frexp(value)[0] for value in values]
    for scale, error in _COARSE:
        if all((mantissa * scale).is_integer() for mantissa in mantissas):
            return error
    return 0.0


@dataclass(frozen=True)
class _Direction:
    """A distribution into which the law may be mixed: q = (1 - size) p + size x p, or against it if size < 0.

    Attributes:
        name: For reports.
        sizes: The grid.
    """

    name: str
    sizes: tuple[float, ...]


_TEMPERED = tuple(sign * 0.01 * 2**step for step in range(6) for sign in (1, -1))
"""The grid of exponents of the probabilities, minus 1."""

_SHARES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
_CUTS = (0.5, 0.95)
_TOP_P = (0.8, 0.9, 0.95, 0.98)
_MIN_P = (0.02, 0.05, 0.1)

_SHARE_DIRECTIONS = (
    _Direction("top-1 share", (*_SHARES, *(-share for share in _SHARES))),
    _Direction("likely-token share", _SHARES),
)
_CUT_DIRECTIONS = (
    *(_Direction(f"top_p {p}", _CUTS) for p in _TOP_P),
    *(_Direction(f"min_p {p}", _CUTS) for p in _MIN_P),
    _Direction("unlisted tokens missing", (0.1, 0.25, 0.5, 0.95, -0.1, -0.25, -0.5, -1.0)),
)
_DRAFT_DIRECTIONS = (_Direction("draft share", (*_SHARES, 0.32, 0.64)),)
_DIRECTIONS = (*_SHARE_DIRECTIONS, *_CUT_DIRECTIONS, *_DRAFT_DIRECTIONS)


@dataclass
class _Bets:
    """The bets on one position.

    Attributes:
        position: Its cells.
        draft: Probabilities of a drafter by token, if known.
    """

    position: Position
    draft: Mapping[Hashable, float] | None = None
    _directions: list[list[float]] = field(init=False)
    _tempered: list[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        p = self.position.probs
        self._directions = [
            _top_one(p),
            _sharpened(p),
            *(_cut(p, _kept_by_top_p(p, top_p)) for top_p in _TOP_P),
            *(_cut(p, [float(x >= min_p * max(p)) for x in p[:-1]] + [1.0]) for min_p in _MIN_P),
            _cut(p, [1.0] * (len(p) - 1) + [0.0]),
            [1.0] * len(p) if self.draft is None else self._drafted(self.draft),
        ]
        self._tempered = [self._temper(size) for size in _TEMPERED]

    def log_factors(self, cell: int) -> list[float]:
        """Return the logarithm of what each alternative's bet is multiplied by after a draw of `cell`.

        The bets are reduced so that none grows in expectation for any probabilities within the errors.
        """
        found = [
            math.log(ratios[cell] / (1.0 + self._worst(ratios))) if ratios[cell] > 0 else -math.inf
            for ratios in self._tempered
        ]
        for direction, ratios in zip(_DIRECTIONS, self._directions, strict=True):
            gain, worst = ratios[cell] - 1.0, self._worst(ratios)
            lowest = -0.5 / max(0.5, max(ratios) - 1.0)
            for size in direction.sizes:
                used = max(size, lowest)
                found.append(math.log1p(used * gain) - math.log1p(abs(used) * worst))
        return found

    def informations(self) -> list[float]:
        """Return the Fisher information of one draw on the size of each family of alternatives."""
        p, scores = self.position.probs, self.position.scores
        mean = math.fsum(map(mul, p, scores))
        return [
            math.fsum(x * (score - mean) ** 2 for x, score in zip(p, scores, strict=True)),
            *(
                math.fsum(x * (ratio - 1.0) ** 2 for x, ratio in zip(p, ratios, strict=True))
                for ratios in self._directions
            ),
        ]

    def _temper(self, size: float) -> list[float]:
        weights = [math.exp(size * score) for score in self.position.scores]
        total = math.fsum(map(mul, weights, self.position.probs))
        return [weight / total for weight in weights]

    def _worst(self, ratios: Sequence[float]) -> float:
        """Return by how much the expected ratio may exceed 1 for probabilities within the errors."""
        rest = ratios[-1]
        sides = zip(self.position.errors, self.position.probs[:-1], ratios[:-1], strict=True)
        return math.fsum(error * x * abs(ratio - rest) for error, x, ratio in sides)

    def _drafted(self, draft: Mapping[Hashable, float]) -> list[float]:
        p = self.position.probs
        q = [max(0.0, draft.get(token, 0.0)) for token in self.position.index]
        q.append(max(0.0, 1.0 - math.fsum(q)))
        # A draft with mass where the target has none, or probabilities that exceed 1 together.
        total = math.fsum(y for x, y in zip(p, q, strict=True) if x > 0)
        return [y / (x * total) if x > 0 and total > 0 else 1.0 for x, y in zip(p, q, strict=True)]


def _top_one(p: Sequence[float]) -> list[float]:
    best = max(range(len(p) - 1), key=p.__getitem__)
    return [1.0 / x if cell == best else 0.0 for cell, x in enumerate(p)]


def _sharpened(p: Sequence[float]) -> list[float]:
    """Return the ratios of p cubed: near what a drafter prefers."""
    total = math.fsum(x**3 for x in p[:-1])
    return [x * x / total for x in p[:-1]] + [0.0]


def _cut(p: Sequence[float], kept: Sequence[float]) -> list[float]:
    """Return the ratios of the law of which only the share `kept` of each cell is left."""
    total = math.fsum(map(mul, p, kept))
    return [share / total for share in kept] if total > 0 else [1.0] * len(p)


def _kept_by_top_p(p: Sequence[float], top_p: float) -> list[float]:
    """Return which cells top_p keeps, and the share of the rest, up to the token that crosses top_p."""
    order = sorted(range(len(p) - 1), key=p.__getitem__, reverse=True)
    before = [0.0, *accumulate(p[cell] for cell in order)]
    kept = [0.0] * len(p)
    for cell, mass in zip(order, before, strict=False):
        kept[cell] = float(mass < top_p)
    kept[-1] = max(0.0, top_p - before[-1]) / p[-1] if p[-1] > 0 else 0.0
    return kept


def _grid() -> tuple[list[str], list[float]]:
    """Return the names of all alternatives, and the logarithms of their stakes."""
    names = [f"temperature {1 / (1 + size):.2g}" for size in _TEMPERED]
    groups = [len(_TEMPERED)]
    for directions in (_SHARE_DIRECTIONS, _CUT_DIRECTIONS, _DRAFT_DIRECTIONS):
        found = [f"{direction.name} {size:+g}" for direction in directions for size in direction.sizes]
        names += found
        groups.append(len(found))
    return names, [-math.log(len(groups) * size) for size in groups for _ in range(size)]


_NAMES, _STAKES = _grid()


class _Wealth:
    """The wealth of a mixture of gamblers, all that two tests share.

    Args:
        alpha: Probability with which an honest server may be rejected.
        names: Of the alternatives.
        stakes: Logarithms of their shares of the first wealth.
    """

    def __init__(self, alpha: float, names: Sequence[str], stakes: Sequence[float]) -> None:
        check_number("alpha", alpha, 0.0, 0.5, open_low=True)
        self.threshold = -math.log(alpha)
        self.num_tokens = 0
        self.log_e_value = 0.0
        self.largest_log_e_value = 0.0
        self.num_tokens_until_rejected: int | None = None
        self._names, self._wealth = names, list(stakes)

    @property
    def rejected(self) -> bool:
        """Whether the e-value has ever reached 1 / alpha."""
        return self.num_tokens_until_rejected is not None

    def strongest(self) -> str:
        """Return the name of the alternative with the most wealth."""
        return self._names[max(range(len(self._wealth)), key=self._wealth.__getitem__)]

    def _multiply(self, log_factors: Sequence[float]) -> None:
        self._wealth = [wealth + gain for wealth, gain in zip(self._wealth, log_factors, strict=True)]
        most = max(self._wealth)
        self.log_e_value = most + math.log(math.fsum(math.exp(wealth - most) for wealth in self._wealth))
        self.largest_log_e_value = max(self.largest_log_e_value, self.log_e_value)
        if not self.rejected and self.log_e_value >= self.threshold:
            self.num_tokens_until_rejected = self.num_tokens


class LawTest(_Wealth):
    """Tests whether tokens are draws from the probabilities that the server reports for them.

    Args:
        alpha: Probability with which an honest server may be rejected.
        num_listed: How many `top_logprobs` the server lists for each token, not counting the drawn one where
            it is added to them; at least 4.

    Attributes:
        num_tokens: Tokens observed.
        num_unreadable: Those of them that were left out as their positions list fewer tokens.
        log_e_value: Logarithm of the evidence against the server now.
        largest_log_e_value: The largest so far.
        num_tokens_until_rejected: Tokens after which the evidence first reached 1 / alpha.
    """

    def __init__(self, alpha: float, num_listed: int = 20) -> None:
        super().__init__(alpha, _NAMES, _STAKES)
        check_int("num_listed", num_listed, 4, 2**20)
        self.num_unreadable = 0
        self._num_listed = num_listed
        self._informations = [0.0] * (1 + len(_DIRECTIONS))

    def observe(
        self,
        token: Hashable,
        cells: Cells,
        logprob: float | None = None,
        draft: Mapping[Hashable, float] | None = None,
    ) -> None:
        """Count a token.

        Args:
            token: What was generated, named as in the cells.
            cells: The `top_logprobs` of its position.
            logprob: Its own log-probability, if the server reports it.
            draft: Probabilities of a reference drafter by token, to bet on a share of its draws.

        Raises:
            InvalidArgumentError: `cells` are no log-probabilities of a distribution.
        """
        position = Position.read(cells, self._num_listed)
        self.num_tokens += 1
        if position is None:
            self.num_unreadable += 1
        elif not position.is_certain:
            bets = _Bets(position, draft)
            self._informations = [
                sum(pair) for pair in zip(self._informations, bets.informations(), strict=True)
            ]
            self._multiply(bets.log_factors(position.cell_of(token, logprob)))

    def smallest_detectable(self) -> dict[str, float]:
        """Return per family of faults the smallest one that these tokens would have shown with 80 % power.

        Temperatures are given as such; a draft or top-1 share as the share of replaced tokens; `top_p`,
        `min_p` and the unlisted tokens as the share of the cut-off probability that is missing. Infinite:
        none.

        At size s a bet's log-wealth has mean s² I / 2 and variance s² I for small s, with I the Fisher
        information of all tokens, known without the draws; it must exceed the threshold and the stake's
        logarithm.
        """
        needed = self.threshold - min(_STAKES)
        root = _POWER + math.sqrt(_POWER**2 + 2 * needed)
        sizes = [root / math.sqrt(found) if found > 0 else math.inf for found in self._informations]
        tempered, shares = sizes[0], sizes[1:]
        found = {
            "temperature below 1": 1 / (1 + tempered),
            "temperature above 1": 1 / (1 - tempered) if tempered < 1 else math.inf,
        }
        for direction, size in zip(_DIRECTIONS, shares, strict=True):
            found[direction.name] = size if size <= 1 else math.inf
        return found


_RECYCLED = (0.02, 0.05, 0.1, 0.25, 0.5, 0.9)
_ALTERNATING = (0.1, 0.25, 0.5)


class IndependenceTest(_Wealth):
    """Tests whether the tokens of two choices, or of two seeds, are drawn independently of each other.

    Under an alternative a share of the pairs comes from one random number: the tokens agree as often as their
    probabilities allow (a maximal coupling; with equal contexts they are equal). Other bets are on too few
    pairs that are both the most likely token. Each bet is fair given either token alone: choice k may be
    compared with choice k - 1, for every k, within one test.

    Args:
        alpha: Probability with which an honest server may be rejected.
        num_listed: As for `LawTest`.

    Attributes:
        num_tokens: Pairs of tokens observed.
        log_e_value: Logarithm of the evidence against the server now.
        largest_log_e_value: The largest so far.
        num_tokens_until_rejected: Pairs after which the evidence first reached 1 / alpha.
    """

    def __init__(self, alpha: float, num_listed: int = 20) -> None:
        names = [f"recycled randomness {share:g}" for share in _RECYCLED]
        names += [f"alternating randomness {share:g}" for share in _ALTERNATING]
        super().__init__(alpha, names, [-math.log(len(names))] * len(names))
        check_int("num_listed", num_listed, 4, 2**20)
        self._num_listed = num_listed

    def observe(
        self,
        token: Hashable,
        cells: Cells,
        other: Hashable,
        other_cells: Cells,
        logprob: float | None = None,
        other_logprob: float | None = None,
    ) -> None:
        """Count a pair of tokens, at the same place of two choices; their contexts may differ.

        Args:
            token: What was generated.
            cells: The `top_logprobs` of its position.
            other: What was generated at the same place of the other choice.
            other_cells: The `top_logprobs` there.
            logprob: The token's own log-probability, if the server reports it.
            other_logprob: That of the other one.

        Raises:
            InvalidArgumentError: Cells are no log-probabilities of a distribution.
        """
        here, there = (Position.read(listed, self._num_listed) for listed in (cells, other_cells))
        self.num_tokens += 1
        if here is None or there is None or here.is_certain or there.is_certain:
            return
        first, second = here.cell_of(token, logprob), there.cell_of(other, other_logprob)
        coupled = _coupled_ratio(here, there, first, second)
        doubt = max(here.errors) * (1.0 + _coupled_ratio(here, there, len(here.probs) - 1, second))
        gains = [math.log1p(share * (coupled - 1.0)) - math.log1p(share * doubt) for share in _RECYCLED]
        both = _surprise(here, first) * _surprise(there, second)
        doubt = 2 * max(here.errors)
        gains += [math.log1p(-share * both) - math.log1p(share * doubt) for share in _ALTERNATING]
        self._multiply(gains)


def _surprise(position: Position, cell: int) -> float:
    """Return whether the likeliest token was drawn, minus its probability, scaled to at most 1."""
    p = max(position.probs[:-1])
    return (float(cell == position.probs.index(p)) - p) / max(p, 1.0 - p)


def _coupled_ratio(here: Position, there: Position, first: int, second: int) -> float:
    """Return the probability of a pair of cells under the maximal coupling, over that of independent draws.

    The coupling draws a token that both may share, with min(p, q), else each from what is left of its law.
    """
    p, q = here.probs[first], there.probs[second]
    ours, theirs = len(here.probs) - 1, len(there.probs) - 1
    pairs = [(cell, there.index[token]) for token, cell in here.index.items() if token in there.index]
    pairs.append((ours, theirs))
    shared = {i: min(here.probs[i], there.probs[j]) for i, j in pairs}
    partners = dict(pairs)
    mass = math.fsum(x - shared.get(cell, 0.0) for cell, x in enumerate(here.probs))
    left = p - shared.get(first, 0.0)
    found = shared[first] if partners.get(first) == second else 0.0
    from_there = q - next((shared[i] for i, j in pairs if j == second), 0.0)
    if mass > 0:
        found += left * from_there / mass
    return found / (p * q) if p > 0 and q > 0 else 1.0
