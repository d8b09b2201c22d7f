"""Sizing of drafters and network for a target: the cost model of `theory` in milliseconds, extended by the
number of drafters and the network time.

A cycle of all sessions of one target is draft, send, verify, answer, in sequence; draft-ahead and interleaved
sessions can only be faster. The time of a pass is constant up to some number of tokens and grows linearly
beyond; sessions are spread evenly over the drafters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gammaray.checks import check_int, check_number
from gammaray.maths.theory import expected_tokens

__all__ = ["Choice", "Sizing"]

MAX_GAMMA = 16
MAX_MS = 1e6


@dataclass(frozen=True)
class Choice:
    """Predicted result of a number of drafters.

    Args:
        drafters: Draft workers per target worker.
        gamma: The best gamma; 0 is plain decoding.
        tokens_per_s: Tokens per second of all sessions together.
        speedup: Speedup over plain decoding of the same sessions.
        value: Tokens per cost, relative to a target without drafters.
    """

    drafters: int
    gamma: int
    tokens_per_s: float
    speedup: float
    value: float


@dataclass(frozen=True)
class Sizing:
    """One target worker, its drafters' speed, its network and its load.

    Args:
        alpha: Probability that one tested token is accepted, in [0, 1).
        target_ms: Time of one target pass over few tokens, in milliseconds.
        draft_ms: Time of one draft pass over few tokens, in milliseconds; 0 for look-ups in the text.
        rtt_ms: Network round trips of one proposal and one verification together, in milliseconds.
        sessions: Concurrent sessions on this target.
        target_tokens: Tokens per target pass up to which its time stays the same.
        draft_tokens: Tokens per draft pass up to which its time stays the same.
        draft_price: Price of a drafter relative to a target.
        block: Tokens that one draft pass proposes: 1 for a plain draft, which makes gamma passes of one token
            per session; more for a parallel draft, whose pass reads the tokens committed since the last
            cycle, and a mask per further proposed token (arXiv 2504.18583).

    Raises:
        InvalidArgumentError: One of them is out of bounds.
    """

    alpha: float
    target_ms: float
    draft_ms: float
    rtt_ms: float = 0.0
    sessions: int = 1
    target_tokens: int = 256
    draft_tokens: int = 256
    draft_price: float = 0.15
    block: int = 1

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha, 0.0, 0.9999)
        check_number("target_ms", self.target_ms, 0.0, MAX_MS, open_low=True)
        check_number("draft_ms", self.draft_ms, 0.0, MAX_MS)
        check_number("rtt_ms", self.rtt_ms, 0.0, MAX_MS)
        check_int("sessions", self.sessions, 1, 2**20)
        check_int("target_tokens", self.target_tokens, 1, 2**20)
        check_int("draft_tokens", self.draft_tokens, 1, 2**20)
        check_number("draft_price", self.draft_price, 0.0, 1000.0)
        check_int("block", self.block, 1, 1024)

    def cycle_ms(self, gamma: int, drafters: int) -> float:
        """Return the time of one cycle of all sessions; without drafters gamma must be 0."""
        verify = self.target_ms * max(1.0, self.sessions * (gamma + 1) / self.target_tokens)
        if gamma == 0:
            return verify
        rows = 1.0
        if self.block > 1:
            rows = expected_tokens(self.alpha, gamma) + min(gamma, self.block) - 1
        step = self.draft_ms * max(1.0, math.ceil(self.sessions / drafters) * rows / self.draft_tokens)
        return verify + math.ceil(gamma / self.block) * step + self.rtt_ms

    def choose(self, drafters: int) -> Choice:
        """Return the result of `drafters` draft workers at the best gamma."""
        gammas = range(MAX_GAMMA + 1 if drafters else 1)
        gamma = max(gammas, key=lambda gamma: self._rate(gamma, drafters))
        speedup = self._rate(gamma, drafters) / self._rate(0, 0)
        value = speedup / (1.0 + drafters * self.draft_price)
        return Choice(drafters, gamma, self._rate(gamma, drafters), speedup, value)

    def best(self, max_drafters: int = 16) -> Choice:
        """Return the choice with the most tokens per cost, the one with fewest drafters on ties."""
        return max(map(self.choose, range(max_drafters + 1)), key=lambda choice: choice.value)

    def break_even_rtt_ms(self, drafters: int) -> float:
        """Return the network time from which plain decoding is at least as fast; 0 if it always is."""
        plain = self.cycle_ms(0, 0)
        near = replace(self, rtt_ms=0.0)
        margins = (
            expected_tokens(self.alpha, gamma) * plain - near.cycle_ms(gamma, drafters)
            for gamma in range(1, MAX_GAMMA + 1)
        )
        return max(0.0, *margins)

    def _rate(self, gamma: int, drafters: int) -> float:
        """Return tokens per second of all sessions."""
        return 1000.0 * self.sessions * expected_tokens(self.alpha, gamma) / self.cycle_ms(gamma, drafters)
