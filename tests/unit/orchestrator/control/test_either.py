"""The choice between a draft worker and a head, in simulated worlds."""

import random

import pytest

from gammaray.blocks import Shape
from gammaray.types import DrafterKind
from orchestrator.control.adaptive import AdaptiveGamma
from orchestrator.control.costs import CostModel
from orchestrator.control.either import EitherModel
from orchestrator.cycle.types import Candidates
from tests.support.control_simulation import Lone, World

MODEL, HEAD = DrafterKind.MODEL, DrafterKind.HEAD
BOTH = Candidates((HEAD, MODEL))
GOOD_DRAFT, GOOD_HEAD = World(alpha=0.8, draft=0.1), World(alpha=0.6, draft=0.02, network=0.0)
BAD_DRAFT, BAD_HEAD = World(alpha=0.4, draft=0.4), World(alpha=0.2, draft=0.1, network=0.0)


class Session:
    """A session of a replica with both models."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.costs = {kind: CostModel(random.Random(seed)) for kind in (HEAD, MODEL)}
        self.controller = EitherModel(
            {kind: AdaptiveGamma(8, of_kind) for kind, of_kind in self.costs.items()}
        )
        self.lone = {kind: Lone(self.rng) for kind in self.costs}

    def play(self, worlds, num_cycles, candidates=BOTH):
        """Run cycles; return the kinds of the models that proposed, None for plain cycles."""
        kinds = []
        for _ in range(num_cycles):
            shape = self.controller.next_shape(candidates)
            cycle, _ = self.lone[shape.drafter].cycle(worlds[shape.drafter], shape)
            self.controller.observe(cycle)
            kinds.append(shape.drafter if shape.depth else None)
        return kinds


@pytest.mark.parametrize(
    ("draft", "head", "preferred"),
    [
        (GOOD_DRAFT, BAD_HEAD, MODEL),
        (BAD_DRAFT, GOOD_HEAD, HEAD),
        (World(alpha=0.05, draft=0.4), World(alpha=0.02, draft=0.3), None),
    ],
    ids=["the draft worker", "the head", "neither"],
)
def test_better_model_proposes(draft, head, preferred):
    kinds = Session(1).play({MODEL: draft, HEAD: head}, 600)
    assert {MODEL, HEAD} <= set(kinds), "each is tried"
    assert kinds[300:].count(preferred) > 0.9 * 300


@pytest.mark.parametrize("seed", range(10))
def test_both_are_tried_after_requests_of_gamma_0(seed):
    session, lone = Session(seed), Lone(random.Random(seed))
    for _ in range(200):
        cycle, _ = lone.cycle(GOOD_HEAD, Shape(0))
        session.costs[HEAD].observe(cycle, was_plain=True)
    assert session.play({MODEL: World(alpha=0.95, draft=0.02), HEAD: BAD_HEAD}, 40).count(HEAD) >= 2


def test_model_that_becomes_better_is_found():
    session = Session(2)
    session.play({MODEL: BAD_DRAFT, HEAD: GOOD_HEAD}, 400)
    kinds = session.play({MODEL: World(alpha=0.95, draft=0.05), HEAD: BAD_HEAD}, 800)
    assert kinds[-200:].count(MODEL) > 180


def test_cycles_of_one_model_teach_the_other_nothing_but_time():
    session = Session(3)
    worlds = {MODEL: BAD_DRAFT, HEAD: GOOD_HEAD}
    session.play(worlds, 60)
    costs = session.costs[MODEL]
    before, num_renewed = costs.mean, costs.num_renewed
    session.play(worlds, 30, Candidates((HEAD,)))
    assert costs.num_renewed > num_renewed, "a sample is not held for ever"
    assert costs.mean.fixed == before.fixed


def test_models_that_cannot_propose_are_left_out():
    session = Session(4)
    assert set(session.play({MODEL: GOOD_DRAFT, HEAD: BAD_HEAD}, 50, Candidates((HEAD,)))) <= {HEAD, None}
    assert session.controller.next_shape(Candidates(is_fallback=True)).is_fallback
