"""Means of waits that follow drifts and extrapolate to what was never tried."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Mean", "WaitTable"]

MEMORY = 32.0
"""Observations that a mean remembers: its last ones count 1 / 32 each."""

FADING = 400.0
"""Cycles in which the weight of what was seen falls to 1 / e: an old measurement yields to a new one."""

LEAST_WEIGHT = 0.1
"""Weight that a measurement keeps for ever, until it is contradicted."""

HICCUP = 3.0
"""A wait counts as at most this many times what was expected, or as what is usual: a hiccup is no trend."""

SURPRISES = 3
"""So many hiccups in a row, or five times as many waits below a third of what was expected, are a change."""

WELL_KNOWN, LEAP = 6.0, 2.0
"""Of a shape with less weight than this, what it takes in proportion to a smaller, well known one is believed
up to twice: stories of former slowness do not keep deeper proposals from being tried."""

STALE, DOUBT = 16.0, 0.1
"""After so many cycles a measurement is old; what a doubt leaves of its weight."""

QUIET = 0.1
"""Relative deviation of waits that counts as none."""

FIRST_SPREAD, SPREAD_RATE = 0.3, 0.05
"""Mean deviation of a wait from what was expected, as a share of it: at first, and how fast it follows."""

MAX_GAIN = 0.5
"""Upper bound of the share of one deviation that goes to the level."""

LEVEL_TRUST = 2.0
"""Observations of a shape after which half of the rate applies."""

FIRST_TRUSTED = 3
"""Observations of a table that are taken as they are."""

LINE_STRENGTH = 2.0
"""Observations that the line through all shapes is worth beside the mean of one shape."""

LEAST_SHARE = 0.25
"""Nothing is expected to take less than this share of the shortest mean wait."""

FIT_WEIGHT = 8.0
"""Upper bound of a shape's weight in that line, so that the usual shape does not drown the others."""

REFIT_PERIOD = 8
"""Observations between two fits of the line, once there are some."""

Key = tuple[int, int]


class Mean:
    """A mean that forgets; hiccups count as `HICCUP` times the mean.

    Args:
        memory: How many observations it remembers.
    """

    def __init__(self, memory: float = MEMORY) -> None:
        self._memory, self._weight = memory, 0.0
        self.value = 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything was observed."""
        return self._weight > 0

    def observe(self, value: float) -> None:
        """Take note of a value, not negative."""
        if self._weight >= 2:
            value = min(value, HICCUP * self.value + 1e-9)
        self._weight = min(self._weight + 1, self._memory)
        self.value += (value - self.value) / self._weight


@dataclass
class _Entry:
    mean: float
    weight: float
    seen_at: float
    spread: float

    def weight_at(self, now: float, spread: float) -> float:
        """Return what it is worth: less the older it is, and the more waits varied when it was seen.

        What is observed in quieter times takes that much weight from it for good.
        """
        quiet = min(1.0, (spread + QUIET) / (self.spread + QUIET))
        return max(LEAST_WEIGHT, self.weight * quiet * quiet * math.exp((self.seen_at - now) / FADING))


class WaitTable:
    """Seconds of a wait by shape: a mean per shape, shrunk towards a plane through all of them.

    A shape is two counts, each of which costs a constant per unit, plus something fixed. All shapes share a
    *level*, a factor that follows the last waits whatever their shape, so that shapes tried at different
    times are compared as if at the same one. Rare shapes are forgotten by age, not by the number of
    observations: a probe after a long time is worth what it says.

    Args:
        is_proportional: What to assume of the first count until different ones were seen: proportional
            (drafting, a forward per level), or nearly flat (a step of the target, one forward for all).
        strengths: Spread (weighted sum of squares) of each count that the assumption is worth.
        rate: Share of a deviation that goes to the level.
    """

    def __init__(self, *, is_proportional: bool, strengths: tuple[float, float], rate: float) -> None:
        self._is_proportional, self._strengths, self._rate = is_proportional, strengths, rate
        self._entries: dict[Key, _Entry] = {}
        self._plane, self._floor = (0.0, 0.0, 0.0), 0.0
        self._observed_since_fit = self._num_observed = 0
        self._level, self._run, self._seen_at = 1.0, 0, 0.0
        self._spread = FIRST_SPREAD
        self._rates: list[tuple[float, float]] = []

    def observe(self, key: Key, seconds: float, now: float, share: float = 1.0) -> None:
        """Take note of one wait in cycle `now`; `share` is its weight, less than 1 when several report it."""
        expected = self.estimate(key, now)
        entry = self._entries.get(key)
        self._num_observed += 1
        if expected and self._num_observed > FIRST_TRUSTED:
            self._doubt(entry, seconds / expected, now)
            bound = self._bound
            change = self._follow(entry, seconds / expected, now, share)
            seconds = min(seconds, bound * change * expected)
        seconds /= self._level
        if entry is None:
            self._entries[key] = _Entry(seconds, share, now, self._spread)
        else:
            entry.weight = min(entry.weight_at(now, self._spread) + share, MEMORY)
            entry.mean += (seconds - entry.mean) * share / entry.weight
            entry.spread += (self._spread - entry.spread) * share / entry.weight
            entry.seen_at = now
        self._seen_at = now
        self._observed_since_fit += 1
        if entry is None or entry.weight < REFIT_PERIOD or self._observed_since_fit >= REFIT_PERIOD:
            self._fit(now)

    def _doubt(self, entry: _Entry | None, ratio: float, now: float) -> None:
        """Take weight from all that is old when a shape that is tried again is far faster than thought."""
        if ratio <= 0.5 and (entry is None or now - entry.seen_at >= STALE):
            for other in self._entries.values():
                if now - other.seen_at >= STALE:
                    other.weight *= DOUBT

    def _follow(self, entry: _Entry | None, ratio: float, now: float, share: float) -> float:
        """Move the level by a wait that took `ratio` times as long as expected; return its relative change.

        The better a shape is known, the more its deviation says of all shapes. Many far off in a row are a
        change.
        """
        bound = self._bound
        off = min(abs(ratio - 1.0), FIRST_SPREAD + 3.0 * self._spread)
        self._spread += SPREAD_RATE * share * (off - self._spread)
        direction = (ratio >= bound) - (ratio <= 1.0 / bound)
        self._run = self._run + direction if direction * self._run > 0 else direction
        before = self._level
        if self._run in (SURPRISES, -5 * SURPRISES):
            self._run, change = 0, ratio
        else:
            weight = 0.0 if entry is None else entry.weight_at(now, self._spread)
            trust = self._gain(now) * share * weight / (weight + LEVEL_TRUST)
            change = 1.0 + trust * (min(ratio, bound) - 1.0)
        self._level *= change
        return self._level / before

    @property
    def _bound(self) -> float:
        """What counts as a hiccup: more where waits vary anyway, as draft-ahead makes them do."""
        return max(HICCUP, 1.0 + 4.0 * self._spread)

    def _gain(self, now: float) -> float:
        """Return the share of a deviation that goes to the level: the more the longer nothing was seen."""
        gain: float = 1.0 - (1.0 - self._rate) ** max(1.0, now - self._seen_at)
        return min(gain, MAX_GAIN)

    def estimate(self, key: Key, now: float) -> float | None:
        """Return the expected wait in seconds; None before the first observation."""
        if not self._entries:
            return None
        flat, first, second = self._plane
        plane = max(flat + first * key[0] + second * key[1], self._floor)
        entry = self._entries.get(key)
        weight, mean = (0.0, 0.0) if entry is None else (entry.weight_at(now, self._spread), entry.mean)
        relative = (weight * mean + LINE_STRENGTH * plane) / (weight + LINE_STRENGTH)
        if weight < WELL_KNOWN:
            relative = min(
                [relative, *(LEAP * _size(key) * rate for size, rate in self._rates if size < _size(key))]
            )
        return self._level * relative

    def trend(self, first: float, second: float) -> float | None:
        """Return what all shapes together say of one with these counts; None while unknown."""
        if not self._entries:
            return None
        flat, by_first, by_second = self._plane
        return self._level * max(flat + by_first * first + by_second * second, self._floor)

    @property
    def level(self) -> float:
        """Factor on all shapes, which follows the last waits."""
        return self._level

    def weight(self, key: Key, now: float) -> float:
        """Return how many fresh observations the mean of a shape is worth."""
        entry = self._entries.get(key)
        return 0.0 if entry is None else entry.weight_at(now, self._spread)

    def is_measured(self, key: Key) -> bool:
        """Whether this shape was ever observed."""
        return key in self._entries

    @property
    def num_shapes(self) -> int:
        """How many shapes were observed."""
        return len(self._entries)

    def _fit(self, now: float) -> None:
        """Fit the plane by weighted least squares, its slopes shrunk towards what is assumed of them."""
        self._observed_since_fit = 0
        rows = [
            (min(e.weight_at(now, self._spread), FIT_WEIGHT), *key, e.mean)
            for key, e in self._entries.items()
        ]
        total = math.fsum(w for w, *_ in rows)
        mean_x = math.fsum(w * x for w, x, _, _ in rows) / total
        mean_z = math.fsum(w * z for w, _, z, _ in rows) / total
        mean_y = math.fsum(w * y for w, _, _, y in rows) / total
        strength_x, strength_z = self._strengths
        xx = strength_x + math.fsum(w * (x - mean_x) ** 2 for w, x, _, _ in rows)
        zz = strength_z + math.fsum(w * (z - mean_z) ** 2 for w, _, z, _ in rows)
        xz = math.fsum(w * (x - mean_x) * (z - mean_z) for w, x, z, _ in rows)
        prior_x = mean_y / mean_x if self._is_proportional and mean_x > 0 else FLAT_SLOPE * mean_y
        prior_z = NODE_SHARE * prior_x
        xy = strength_x * prior_x + math.fsum(w * (x - mean_x) * (y - mean_y) for w, x, _, y in rows)
        zy = strength_z * prior_z + math.fsum(w * (z - mean_z) * (y - mean_y) for w, _, z, y in rows)
        determinant = xx * zz - xz * xz
        slope_x = max(0.0, (xy * zz - zy * xz) / determinant)
        slope_z = max(0.0, (zy * xx - xy * xz) / determinant)
        if self._is_proportional:
            well_known = [
                (k, e) for k, e in self._entries.items() if e.weight_at(now, self._spread) >= WELL_KNOWN
            ]
            self._rates = [(_size(key), entry.mean / _size(key)) for key, entry in well_known]
        self._floor = LEAST_SHARE * min(y for *_, y in rows)
        self._plane = (mean_y - slope_x * mean_x - slope_z * mean_z, slope_x, slope_z)


FLAT_SLOPE = 0.02
"""Share of a step that each token more is assumed to cost."""

NODE_SHARE = 0.05
"""Share of a level that each node beside the longest path is assumed to cost in drafting."""


def _size(key: Key) -> float:
    return key[0] + NODE_SHARE * key[1]
