"""Counters of speculation, and estimates derived from them.

Definitions, over the cycles of a completion:

* *alpha* = accepted / tested tokens. Tokens after a rejected one are not tested and do not count in it.
  The mean over cycles of accepted / tested, and accepted / gamma, are different quantities: .635 and .538 at
  alpha .8 and gamma 5.
* *acceptance rate* = accepted / drafted tokens: the share of the drafted tokens that was used.
* *tokens per cycle* = emitted tokens / cycles, including correction or bonus, after truncation at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from gammaray.types import DrafterKind, SpeculationSummary, TokenOrigin

_DEPTH_STRENGTH = 8.0
"""Weight of the pooled alpha at each depth, in tested tokens."""


@dataclass
class SpeculationCounters:
    """Sums over the cycles of one completion."""

    cycles: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_lengths: list[int] = field(default_factory=list)  # [j]: cycles in which j tokens were accepted
    draft_s: float = 0.0  # seconds waited for proposals
    verify_s: float = 0.0  # seconds waited for verdicts
    decode_s: float = 0.0  # seconds of the cycles after the first
    plain_s: float = 0.0  # seconds that their tokens would have taken with plain decoding
    # Entry NONE: cycles in which nothing was proposed.
    cycles_by_drafter: Counter[DrafterKind] = field(default_factory=Counter)
    prediction_drafted: int = 0  # proposed tokens of the request's prediction
    prediction_accepted: int = 0  # those of them that were accepted
    fallbacks: int = 0  # cycles in which the drafter that the request allows could not propose
    draft_workers: set[str] = field(default_factory=set)  # addresses of the draft workers that proposed

    def observe(
        self,
        *,
        gamma: int,
        tested: int,
        accepted: int,
        emitted: int,
        draft_s: float,
        verify_s: float,
        cycle_s: float = 0.0,
        plain_cycle_s: float | None = None,
        drafter: DrafterKind = DrafterKind.MODEL,
        draft_worker: str = "",
        is_fallback: bool = False,
    ) -> None:
        """Count one cycle.

        The `tested` tokens are the accepted ones, plus one if a token was rejected; `emitted` are fewer than
        accepted + 1 if the completion was truncated. `plain_cycle_s` is the current time of a cycle at gamma
        0, None if unknown.
        """
        if self.cycles > 0 and plain_cycle_s is not None:
            self.decode_s += cycle_s
            self.plain_s += emitted * plain_cycle_s
        self.cycles += 1
        self.drafted += gamma
        self.tested += tested
        self.accepted += accepted
        self.emitted += emitted
        self.draft_s += draft_s
        self.verify_s += verify_s
        self.accepted_lengths += [0] * (accepted + 1 - len(self.accepted_lengths))
        self.accepted_lengths[accepted] += 1
        self.cycles_by_drafter[drafter if gamma > 0 else DrafterKind.NONE] += 1
        if drafter is DrafterKind.PREDICTION:
            self.prediction_drafted += gamma
            self.prediction_accepted += accepted
        self.fallbacks += is_fallback
        if gamma > 0 and draft_worker:
            self.draft_workers.add(draft_worker)

    def catch_up(self, origins: Sequence[TokenOrigin]) -> None:
        """Count tokens of cycles that were not observed, from the origins of all tokens emitted so far.

        Which drafter proposed them is unknown: they do not count as tokens of the prediction.
        """
        self.emitted = len(origins)
        missed = max(0, sum(origin is TokenOrigin.ACCEPTED for origin in origins) - self.accepted)
        self.accepted += missed
        self.tested += missed
        self.drafted += missed

    def summary(self, total_s: float) -> SpeculationSummary:
        """Return the summary for the client; `total_s` is the time of all cycles.

        Both sides of the estimated speedup exclude the first cycle, which contains the prefill. Each cycle is
        compared with the plain cycle time of that moment, so that load on the cluster affects both sides.
        """
        by_drafter = {kind: self.cycles_by_drafter[kind] for kind in DrafterKind}
        plain = by_drafter.pop(DrafterKind.NONE)
        return SpeculationSummary(
            cycles=self.cycles,
            tokens_per_cycle=self.emitted / self.cycles if self.cycles else 0.0,
            alpha=self.accepted / self.tested if self.tested else None,
            acceptance_rate=self.accepted / self.drafted if self.drafted else None,
            accepted_lengths=tuple(self.accepted_lengths),
            gamma_mean=self.drafted / self.cycles if self.cycles else 0.0,
            draft_ms=self.draft_s * 1e3,
            verify_ms=self.verify_s * 1e3,
            other_ms=max(0.0, total_s - self.draft_s - self.verify_s) * 1e3,
            total_ms=total_s * 1e3,
            speedup_estimate=self.plain_s / self.decode_s if self.decode_s > 0 else None,
            plain_cycles=plain,
            fallback_cycles=self.fallbacks,
            draft_workers=len(self.draft_workers),
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
            **{f"{kind.value}_cycles": count for kind, count in by_drafter.items()},
        )


class AcceptanceEstimator:
    """Estimates acceptance probabilities by depth in the proposal, from recent cycles.

    Each depth has its own decayed counts, shrunk towards the alpha pooled over depths, which is itself shrunk
    towards the prior; depths that were never tested use the pooled alpha. Acceptance varies with depth, so a
    single alpha mispredicts long proposals.

    Args:
        decay: Factor on all counts per cycle with tested tokens, in (0, 1]; 0.98 remembers about 50 cycles.
        prior_alpha: Alpha assumed before the first observation, in (0, 1).
        prior_strength: Weight of the prior, in tested tokens.
        fleet: Estimator whose current alpha and variation over depth serve as prior instead.
    """

    def __init__(
        self,
        decay: float = 0.98,
        prior_alpha: float = 0.7,
        prior_strength: float = 4.0,
        fleet: AcceptanceEstimator | None = None,
    ) -> None:
        self._decay = decay
        self._prior_alpha, self._prior_strength, self._fleet = prior_alpha, prior_strength, fleet
        self._accepted: list[float] = []
        self._tested: list[float] = []

    def observe(self, tested: int, accepted: int) -> None:
        """Count one cycle: `tested` tokens were tested and the first `accepted` of them were accepted."""
        if tested == 0:
            return
        self.fade(self._decay)
        new_depths = max(0, tested - len(self._tested))
        self._accepted += [0.0] * new_depths
        self._tested += [0.0] * new_depths
        for depth in range(tested):
            self._tested[depth] += 1.0
            self._accepted[depth] += depth < accepted

    def fade(self, factor: float) -> None:
        """Multiply all counts by a factor in [0, 1], so that old observations count less than the prior."""
        self._accepted = [count * factor for count in self._accepted]
        self._tested = [count * factor for count in self._tested]

    @property
    def num_tested(self) -> float:
        """Tested tokens over all depths, decayed."""
        return sum(self._tested)

    @property
    def alpha(self) -> float:
        """Alpha pooled over depths."""
        prior = self._prior_alpha if self._fleet is None else self._fleet.alpha
        accepted = self._prior_strength * prior + sum(self._accepted)
        return accepted / (self._prior_strength + sum(self._tested))

    def by_depth(self, gamma: int) -> list[float]:
        """Return the probability that a tested token is accepted, for each depth up to `gamma`."""
        pooled = self.alpha
        priors = [pooled] * gamma
        if self._fleet is not None and self._fleet.alpha > 0:
            ratio = pooled / self._fleet.alpha
            priors = [min(1.0, ratio * accepted) for accepted in self._fleet.by_depth(gamma)]
        rates = []
        for depth, prior in enumerate(priors):
            seen = depth < len(self._tested)
            accepted = (self._accepted[depth] if seen else 0.0) + _DEPTH_STRENGTH * prior
            tested = (self._tested[depth] if seen else 0.0) + _DEPTH_STRENGTH
            rates.append(accepted / tested)
        return rates
