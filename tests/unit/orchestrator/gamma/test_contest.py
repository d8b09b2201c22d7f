"""Drafting against plain decoding under load: who wins, and how often the loser is tried again."""

from __future__ import annotations

import random

import pytest

from benchmarks.simulation import Lone, crowd, drive, make_cycle
from benchmarks.worlds import World
from orchestrator.cycle.types import Shape
from orchestrator.gamma.adaptive import AdaptiveGamma, FixedGamma, Reason
from orchestrator.gamma.cost_model import CostModel
from orchestrator.gamma.load_switch import LEAST_CYCLES, Contest
from orchestrator.gamma.shapes import Family


class Load:
    """Sessions in step: all of them draft, or none, as the contest has it."""

    def __init__(
        self, contest: Contest, num_sessions: int, plain_s: float = 1.0, draft_s: float = 3.0
    ) -> None:
        self.contest, self.num_sessions = contest, num_sessions
        self.plain_s, self.draft_s = plain_s, draft_s
        self.now = 0.0
        self.played: list[bool] = []

    def play(self, num_cycles: int, *, num_accepted: int = 2) -> float:
        """Play so many cycles of each session; return the share of them that was plain."""
        played: list[bool] = []
        for _ in range(num_cycles):
            is_plain = self.contest.is_plain
            length = self.plain_s if is_plain else self.draft_s
            levels = () if is_plain else ((1, 0),) * num_accepted
            cycle = make_cycle(
                Shape(len(levels)), levels, len(levels), draft=0.0, verify=length, other=0.0, started=self.now
            )
            for _ in range(self.num_sessions):
                self.contest.observe(cycle)
            played.append(is_plain)
            self.now += length
        self.played += played
        return sum(played) / num_cycles


@pytest.mark.parametrize(
    ("draft_s", "is_plain_best"),
    [(2.0, False), (2.7, False), (3.3, True), (5.0, True)],
)
def test_contest_plays_what_gives_more_tokens_per_second(draft_s, is_plain_best):
    """A drafted cycle brings three tokens in the time of so many plain cycles."""
    load = Load(Contest(), 8, draft_s=draft_s)
    load.play(300)
    assert load.play(1000) == pytest.approx(float(is_plain_best), abs=0.12)


def test_contest_of_a_lone_session_never_takes_place():
    load = Load(Contest(), 1, draft_s=9.0)
    assert load.play(2000) == 0.0


def test_contest_tries_the_loser_again_and_finds_that_it_wins_by_now():
    load = Load(Contest(), 8, draft_s=5.0)
    load.play(1000)
    assert load.contest.is_plain
    load.draft_s = 1.0
    load.play(3000)
    assert load.play(500) < 0.1


def test_contest_loser_costs_the_less_time_the_more_it_loses():
    shares = []
    for draft_s in (2.5, 1.0):
        load = Load(Contest(), 8, draft_s=draft_s)
        load.play(300)
        shares.append(load.play(20_000))
    assert 0.0 < shares[1] < shares[0] < 0.1


def test_contest_is_fought_for_each_load():
    contest = Contest()
    load = Load(contest, 32, draft_s=5.0)
    load.play(500)
    assert contest.is_plain
    load.num_sessions, load.draft_s = 4, 1.5
    load.play(500)
    assert not contest.is_plain
    load.num_sessions, load.draft_s = 32, 5.0
    assert load.play(200) > 0.5, "what is known of the other load was forgotten"


def test_contest_ends_when_the_load_is_gone():
    load = Load(Contest(), 8, draft_s=5.0)
    load.play(500)
    assert load.contest.is_plain
    load.num_sessions = 1
    load.play(3 * LEAST_CYCLES)
    assert load.play(500) == 0.0


def test_contest_does_not_compare_across_a_pause():
    contest = Contest()
    load = Load(contest, 8, draft_s=5.0)
    for _ in range(50):
        load.play(20)
        load.now += 1000.0
    assert not contest.is_plain, "rounds with a pause in them say nothing of the speed under load"


@pytest.mark.parametrize("num_sessions", [2, 8, 32])
@pytest.mark.parametrize("strain", [0.0, 0.3, 0.6])
def test_adaptive_gamma_crowd_on_shared_cores_never_loses_to_plain_decoding(num_sessions, strain):
    """All steps are slower while sessions draft, which no session sees in its own proposals."""
    world, rng = World(alpha=0.75, per_token=0.03, draft=0.03, spikes=0.0, strain=strain), random.Random(1)
    worlds, costs = [world] * num_sessions, CostModel()
    controllers = [AdaptiveGamma(8, costs) for _ in worlds]
    before = crowd(controllers, worlds, 200, rng)
    runs = crowd(controllers, worlds, 300, rng, begins_at=before[0].units)
    speed = sum(run.tokens for run in runs) / runs[0].units
    fixed = [crowd([FixedGamma(g, CostModel())] * num_sessions, worlds, 1, rng) for g in range(9)]
    by_gamma = [sum(run.tokens for run in found) / found[0].units for found in fixed]
    assert speed >= 0.98 * by_gamma[0]
    assert speed >= 0.94 * max(by_gamma)
    if by_gamma[0] == max(by_gamma):
        reasons = {shape.reason for run in runs for shape in run.shapes}
        assert Reason.LOAD.value in reasons


def test_adaptive_gamma_probe_that_a_plain_round_cuts_off_goes_on_behind_it():
    world, costs = World(), CostModel()
    controller, session = AdaptiveGamma(8, costs), Lone(random.Random(3))
    drive(controller, world, 60, session)
    while "probe" not in (shape := controller.next_shape()).reason or shape.depth == 0:
        drive(controller, world, 1, session, is_new=False)
    concluded = [costs.probes.num_confirmed(kind) for kind in Family]
    costs.contest.is_plain = True
    run = drive(controller, world, 40, session, is_new=False)
    assert {shape.reason for shape in run.shapes} == {Reason.LOAD.value}
    costs.contest.is_plain = False
    assert [costs.probes.num_confirmed(kind) for kind in Family] == concluded
    again = controller.next_shape()
    assert (again, again.reason) == (shape, shape.reason)
