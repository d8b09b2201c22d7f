"""Gamma controllers in simulation, against the oracle that knows acceptance and costs."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from gammaray.types import TokenOrigin
from orchestrator.costs import PLAIN_PERIOD, CostModel, WaitModel
from orchestrator.cycle import Cycle
from orchestrator.gamma import AdaptiveGamma, FixedGamma


@dataclass
class World:
    """What the controller does not know; times in milliseconds.

    Args:
        alpha: Probability that a tested token is accepted.
        draft: Draft wait per token; `network` comes once per proposal.
        verify: Verify wait, plus `per_node` for each proposed token.
        decay: Factor on alpha per depth.
        noise: Relative standard deviation of each wait.
        spikes: Share of waits that take ten times as long.
    """

    alpha: float = 0.8
    draft: float = 0.3
    network: float = 0.4
    verify: float = 4.0
    per_node: float = 0.1
    other: float = 0.5
    decay: float = 1.0
    noise: float = 0.15
    spikes: float = 0.01

    def waits(self, gamma: int) -> tuple[float, float]:
        draft = self.network + gamma * self.draft if gamma else 0.0
        return draft, self.verify + gamma * self.per_node

    def speed(self, gamma: int) -> float:
        """Expected tokens per millisecond at a fixed gamma."""
        tokens, alive = 1.0, 1.0
        for depth in range(gamma):
            alive *= self.alpha * self.decay**depth
            tokens += alive
        return tokens / (sum(self.waits(gamma)) + self.other)

    def best(self, max_gamma: int) -> float:
        return max(self.speed(gamma) for gamma in range(max_gamma + 1))

    def run(self, gamma: int, rng: random.Random, *, is_first: bool = False, fails: bool = False) -> Cycle:
        accepted = 0
        while accepted < gamma and rng.random() < self.alpha * self.decay**accepted:
            accepted += 1
        drafted = 0 if fails else gamma
        accepted = min(accepted, drafted)
        draft, verify = (self._noisy(wait, rng) for wait in self.waits(gamma))
        if is_first:
            verify *= 30
        emitted = accepted + 1
        return Cycle(
            gamma=gamma,
            num_drafted=drafted,
            num_tested=accepted + (accepted < drafted),
            num_accepted=accepted,
            token_ids=(0,) * emitted,
            origins=(TokenOrigin.ACCEPTED,) * accepted + (TokenOrigin.BONUS,),
            logprobs=(),
            text="",
            finish_reason=None,
            draft_s=draft / 1e3,
            verify_s=verify / 1e3,
            total_s=(draft + verify + self.other) / 1e3,
            is_first=is_first,
            draft_failed=fails,
        )

    def _noisy(self, wait: float, rng: random.Random) -> float:
        wait *= max(0.3, rng.gauss(1.0, self.noise))
        return wait * 10 if rng.random() < self.spikes else wait


def drive(controller, world: World, num_cycles: int, rng: random.Random) -> tuple[float, list[int]]:
    """Return the expected tokens per millisecond over the cycles, and the gammas that were chosen.

    Expected, not realised: the luck of single draws says nothing about the controller.
    """
    gammas, tokens, time_ms = [], 0.0, 0.0
    for index in range(num_cycles):
        gamma = controller.next_shape().depth
        controller.observe(world.run(gamma, rng, is_first=index == 0))
        wait_ms = sum(world.waits(gamma)) + world.other
        tokens += world.speed(gamma) * wait_ms
        time_ms += wait_ms
        gammas.append(gamma)
    return tokens / time_ms, gammas


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("world", "share"),
    [
        pytest.param(World(), 0.96, id="usual"),
        pytest.param(World(alpha=0.95), 0.96, id="easy-text"),
        pytest.param(World(alpha=0.5), 0.96, id="hard-text"),
        pytest.param(World(alpha=0.9, decay=0.9), 0.96, id="falling-acceptance"),
        pytest.param(World(draft=1.5), 0.96, id="slow-draft"),
        pytest.param(World(per_node=2.0), 0.94, id="verify-pays-per-node"),
        pytest.param(World(alpha=0.1, draft=1.0), 0.96, id="useless-draft"),
        pytest.param(World(alpha=0.8, draft=20.0), 0.96, id="terribly-slow-draft"),
        # Gamma 8 would be 10 % faster than plain decoding, which takes dear probes to find out.
        pytest.param(World(network=10.0), 0.89, id="slow-network"),
    ],
)
def test_adaptive_gamma_is_within_a_few_per_cent_of_the_oracle(world, share, seed):
    rng, costs = random.Random(seed), CostModel()
    drive(AdaptiveGamma(8, costs), world, 150, rng)  # the replica has served somebody before
    for _ in range(3):
        speed, gammas = drive(AdaptiveGamma(8, costs), world, 400, rng)
        assert speed >= share * world.best(8), sorted(gammas)


def test_adaptive_gamma_from_cold_loses_little():
    world, rng = World(), random.Random(3)
    speed, _ = drive(AdaptiveGamma(8, CostModel()), world, 200, rng)
    assert speed >= 0.93 * world.best(8)


def test_adaptive_gamma_goes_to_zero_when_drafting_stops_to_pay_and_comes_back():
    rng, costs = random.Random(5), CostModel()
    controller = AdaptiveGamma(8, costs)
    good, bad = World(alpha=0.85), World(alpha=0.05, draft=1.0)
    _, before = drive(controller, good, 300, rng)
    _, during = drive(controller, bad, 1500, rng)
    _, after = drive(controller, good, 1500, rng)
    assert sum(before[200:]) / 100 > 3
    assert during[-200:].count(0) >= 0.95 * 200
    assert sum(after[-200:]) / 200 > 3


def test_adaptive_gamma_slow_then_fast_drafter_comes_back():
    rng, controller = random.Random(6), AdaptiveGamma(8, CostModel())
    drive(controller, World(draft=30.0), 300, rng)
    _, gammas = drive(controller, World(), 6000, rng)
    assert sum(gammas[-200:]) / 200 > 3


def test_adaptive_gamma_plain_decoding_under_load_loses_at_most_the_cost_of_finding_out():
    # Many other sessions keep the target busy: each proposed token costs nearly a plain cycle.
    world, rng, costs = World(alpha=0.7, per_node=3.5, draft=0.5), random.Random(8), CostModel()
    drive(AdaptiveGamma(8, costs), world, 300, rng)
    speed, gammas = drive(AdaptiveGamma(8, costs), world, 1000, rng)
    assert speed >= 0.97 * world.speed(0)
    assert gammas.count(0) > 900


def test_adaptive_gamma_measures_plain_decoding_now_and_then():
    costs, rng = CostModel(), random.Random(1)
    _, gammas = drive(AdaptiveGamma(8, costs), World(alpha=0.95), 5 * PLAIN_PERIOD, rng)
    assert 4 <= gammas[PLAIN_PERIOD:].count(0) <= 6
    assert costs.plain_cycle_s == pytest.approx(4.5e-3, rel=0.25)


def test_adaptive_gamma_respects_its_bound():
    for bound in (0, 1, 3):
        _, gammas = drive(AdaptiveGamma(bound, CostModel()), World(alpha=0.99), 300, random.Random(2))
        assert max(gammas) == bound


def test_adaptive_gamma_new_session_starts_from_the_fleet():
    costs, rng = CostModel(), random.Random(4)
    drive(AdaptiveGamma(8, costs), World(alpha=0.95), 300, rng)
    assert AdaptiveGamma(8, costs).next_shape().depth >= 6


def test_adaptive_gamma_dead_drafter_is_no_cost_information():
    costs, rng, world = CostModel(), random.Random(4), World()
    controller = AdaptiveGamma(8, costs)
    drive(controller, world, 200, rng)
    before = costs.cycle_s(4)
    for _ in range(100):
        controller.observe(world.run(controller.next_shape().depth, rng, fails=True))
    assert costs.cycle_s(4) == pytest.approx(before, rel=0.3)


def test_fixed_gamma_never_moves_and_still_measures():
    costs, rng = CostModel(), random.Random(4)
    _, gammas = drive(FixedGamma(3, costs), World(alpha=0.01), 50, rng)
    assert set(gammas) == {3}
    assert costs.cycle_s(3) == pytest.approx(6.1e-3, rel=0.2)


def test_cost_model_plain_cycle_is_unknown_measured_or_extrapolated():
    rng, world = random.Random(9), World(noise=0.0, spikes=0.0)
    costs = CostModel()
    assert costs.plain_cycle_s is None
    drive(FixedGamma(4, costs), world, 100, rng)
    assert costs.plain_cycle_s is None, "one length tells no slope"
    drive(FixedGamma(2, costs), world, 100, rng)
    assert costs.plain_cycle_s == pytest.approx(4.5e-3, rel=0.05)
    drive(FixedGamma(0, costs), World(verify=5.0, noise=0.0, spikes=0.0), 50, rng)
    assert costs.plain_cycle_s == pytest.approx(5.5e-3, rel=0.02)


def test_cost_model_first_cycles_are_left_out():
    costs, world, rng = CostModel(), World(noise=0.0, spikes=0.0), random.Random(1)
    for _ in range(50):
        costs.observe(world.run(0, rng, is_first=True))
    assert costs.cycle_s(0) is None


@pytest.mark.parametrize("is_proportional", [True, False])
def test_wait_model_follows_a_line_and_forgets(is_proportional):
    model = WaitModel(is_proportional=is_proportional)
    assert model.estimate(3) is None
    for _ in range(60):
        for count in (1, 3, 6):
            model.observe(count, 1.0 + 0.5 * count)
    for count in (0, 2, 6, 8):
        assert model.estimate(count) == pytest.approx(1.0 + 0.5 * count, rel=0.06)
    for _ in range(1000):
        model.observe(3, 10.0)
    assert model.estimate(3) == pytest.approx(10.0, rel=0.05)


def test_wait_model_prior_slope_before_two_counts_were_seen():
    draft, verify = WaitModel(is_proportional=True), WaitModel(is_proportional=False)
    for _ in range(5):
        draft.observe(4, 2.0)
        verify.observe(4, 2.0)
    assert draft.estimate(8) == pytest.approx(4.0, rel=0.01)
    assert verify.estimate(8) == pytest.approx(2.0, rel=0.01)


def test_wait_model_one_hiccup_is_no_trend():
    model = WaitModel(is_proportional=False)
    for _ in range(100):
        model.observe(0, 1.0)
    model.observe(0, 1000.0)
    assert model.estimate(0) < 1.1
