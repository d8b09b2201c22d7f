"""What is counted about speculation, and what follows from the counts.

Definitions, over the cycles of a completion:

* *alpha* = accepted / tested tokens. Tokens behind a failed test are not tested and count nowhere in it.
  The mean over cycles of accepted / tested, and accepted / gamma, are different things: .635 and .538 where
  alpha is .8, gamma 5.
* *acceptance rate* = accepted / drafted tokens: the share of the draft's work that was of use.
* *tokens per cycle* = emitted tokens / cycles, correction or bonus included, and after the cut at the end.
* *survival* at j = probability that at least j tokens of a proposal of depth j or more are accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gammaray.theory import expected_tokens_of
from gammaray.types import SpeculationSummary

__all__ = ["AcceptanceEstimator", "SpeculationCounters"]


@dataclass
class SpeculationCounters:
    """Sums over the cycles of one completion.

    Attributes:
        cycles: Cycles observed.
        drafted: Proposed tokens.
        tested: Proposed tokens that were put to the test.
        accepted: Proposed tokens that passed.
        emitted: Tokens emitted.
        accepted_lengths: Entry j: cycles in which j tokens were accepted.
        draft_s: Seconds waited for proposals.
        verify_s: Seconds waited for verdicts.
    """

    cycles: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    verify_s: float = 0.0

    def observe(
        self, *, gamma: int, tested: int, accepted: int, emitted: int, draft_s: float, verify_s: float
    ) -> None:
        """Count one cycle.

        Args:
            gamma: Tokens proposed, 0 for plain decoding.
            tested: Of these, tested: the accepted ones, plus one when a test failed.
            accepted: Of these, accepted.
            emitted: Tokens emitted; fewer than accepted + 1 where the completion was cut.
            draft_s: Seconds waited for the proposal.
            verify_s: Seconds waited for the verdict.
        """
        self.cycles += 1
        self.drafted += gamma
        self.tested += tested
        self.accepted += accepted
        self.emitted += emitted
        self.draft_s += draft_s
        self.verify_s += verify_s
        self.accepted_lengths += [0] * (accepted + 1 - len(self.accepted_lengths))
        self.accepted_lengths[accepted] += 1

    @property
    def alpha(self) -> float | None:
        """Accepted over tested tokens; None when nothing was tested."""
        return self.accepted / self.tested if self.tested else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_cycle(self) -> float:
        """Emitted tokens per cycle; 0 before the first cycle."""
        return self.emitted / self.cycles if self.cycles else 0.0

    @property
    def gamma_mean(self) -> float:
        """Drafted tokens per cycle; 0 before the first cycle."""
        return self.drafted / self.cycles if self.cycles else 0.0

    def summary(self, total_s: float, plain_cycle_s: float | None = None) -> SpeculationSummary:
        """Return what the client is told.

        Args:
            total_s: Seconds from the first cycle's start to the last one's end.
            plain_cycle_s: Measured seconds of a cycle at gamma 0, or None when there was none.
        """
        estimate = None
        if plain_cycle_s is not None and total_s > 0:
            estimate = self.emitted * plain_cycle_s / total_s
        return SpeculationSummary(
            cycles=self.cycles,
            tokens_per_cycle=self.tokens_per_cycle,
            alpha=self.alpha,
            acceptance_rate=self.acceptance_rate,
            accepted_lengths=tuple(self.accepted_lengths),
            gamma_mean=self.gamma_mean,
            draft_ms=self.draft_s * 1e3,
            verify_ms=self.verify_s * 1e3,
            other_ms=max(0.0, total_s - self.draft_s - self.verify_s) * 1e3,
            total_ms=total_s * 1e3,
            speedup_estimate=estimate,
        )


class AcceptanceEstimator:
    """Probability that tokens are accepted, by their depth in the proposal, from recent cycles.

    Each depth has its own decayed counts, shrunk towards the alpha pooled over depths, which is itself shrunk
    towards the prior; depths that were never tested follow the pooled alpha. Acceptance varies with depth, so
    that one alpha for all depths mispredicts long proposals.

    Args:
        decay: Factor on all counts per cycle that tested something, in (0, 1]; 0.98 remembers some 50 cycles.
        prior_alpha: Alpha assumed before anything was seen, in (0, 1).
        prior_strength: Tested tokens that the prior is worth.
        depth_strength: Tested tokens that the pooled alpha is worth at each depth.
    """

    def __init__(
        self,
        decay: float = 0.98,
        prior_alpha: float = 0.7,
        prior_strength: float = 4.0,
        depth_strength: float = 8.0,
    ) -> None:
        self._decay, self._depth_strength = decay, depth_strength
        self._prior_accepted, self._prior_tested = prior_alpha * prior_strength, prior_strength
        self._accepted: list[float] = []
        self._tested: list[float] = []

    def observe(self, tested: int, accepted: int) -> None:
        """Count one cycle: `tested` tokens were tested and the first `accepted` of them passed.

        A cycle without a test changes nothing.
        """
        if tested == 0:
            return
        new_depths = max(0, tested - len(self._tested))
        self._accepted = [count * self._decay for count in self._accepted] + [0.0] * new_depths
        self._tested = [count * self._decay for count in self._tested] + [0.0] * new_depths
        for depth in range(tested):
            self._tested[depth] += 1.0
            self._accepted[depth] += depth < accepted

    @property
    def alpha(self) -> float:
        """Alpha pooled over depths."""
        accepted = self._prior_accepted + sum(self._accepted)
        return accepted / (self._prior_tested + sum(self._tested))

    def survival(self, gamma: int) -> list[float]:
        """Return for j = 1 ... gamma the probability that at least j tokens are accepted."""
        pooled, alive, survival = self.alpha, 1.0, []
        for depth in range(gamma):
            seen = depth < len(self._tested)
            accepted = (self._accepted[depth] if seen else 0.0) + self._depth_strength * pooled
            tested = (self._tested[depth] if seen else 0.0) + self._depth_strength
            alive *= accepted / tested
            survival.append(alive)
        return survival

    def expected_tokens(self, gamma: int) -> float:
        """Return the expected tokens of a cycle at `gamma`, correction or bonus included."""
        return expected_tokens_of(self.survival(gamma))
