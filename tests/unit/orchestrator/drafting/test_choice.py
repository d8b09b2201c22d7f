"""The choice between the draft model and matches in known text, in a simulated world."""

import random
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from gammaray.blocks import Shape
from gammaray.errors import UnavailableError
from gammaray.types import DrafterKind, Proposal
from orchestrator.control.adaptive import AdaptiveGamma
from orchestrator.control.costs import CostModel
from orchestrator.control.fixed import FixedGamma
from orchestrator.control.row_costs import RowCosts
from orchestrator.cycle.types import Candidates, Match
from orchestrator.drafting.head import TargetHead
from orchestrator.drafting.session_drafter import DrafterChoice, SessionDrafter
from orchestrator.workers.drafter import Readiness
from tests.support.control_simulation import Lone, World, make_cycle
from tests.support.cycle_helpers import make_session

MODEL, PREDICTION, SUFFIX = DrafterKind.MODEL, DrafterKind.PREDICTION, DrafterKind.SUFFIX
TEXT_DEPTH = 8


class Finds:
    def __init__(self, kind=SUFFIX, length=8, num_tokens=TEXT_DEPTH, first=0):
        self.kind, self.num_tokens = kind, num_tokens
        self.match = Match(kind, tuple(range(first, first + num_tokens)), length, (1.0,) * num_tokens)

    def look_up(self, session, depth):
        return replace(self.match, token_ids=self.match.token_ids[:depth])


def models_of(readiness):
    """Return a draft worker that is in one state and proposes nothing."""
    propose = AsyncMock(side_effect=UnavailableError("it has gone"))
    return {MODEL: SimpleNamespace(address="a:1", prepare=lambda session: readiness, propose=propose)}


def choice_of(texts, readiness=Readiness.READY, allowed=MODEL, seed=1, costs=None, temperature=0.0):
    costs, session = costs or CostModel(random.Random(seed)), make_session()
    drafter = SessionDrafter(models_of(readiness) if allowed is MODEL else {}, texts, TEXT_DEPTH)
    controller = AdaptiveGamma(8, costs, max_match=TEXT_DEPTH, temperature=temperature)
    return DrafterChoice(session, drafter, controller)


FALSE, OTHER = 100, 1000
"""First token of a prediction beside a suffix match, and one that no drafter proposes."""


def play(choice, num_cycles, *, model_alpha=0.0, text_alpha=0.0, prediction_alpha=0.0, world=None, seed=1):
    """Run cycles; a match takes no draft. Return the shapes.

    Of the text, a token is that of a match with `text_alpha`, else that of the other with `prediction_alpha`.
    """
    rng, world, shapes = random.Random(seed), world or World(spikes=0.0, noise=0.1), []
    for index in range(num_cycles):
        shape = choice.next_shape()
        is_text, levels, text = shape.drafter is not MODEL, [], []
        first = FALSE if shape.drafter is PREDICTION and prediction_alpha else 0
        while len(text) <= TEXT_DEPTH:
            number, drawn = len(text), rng.random()
            text.append(number if drawn < text_alpha else OTHER)
            if text[-1] == OTHER and rng.random() < prediction_alpha:
                text[-1] = FALSE + number
        for number in range(shape.depth):
            is_accepted = text[number] == first + number if is_text else rng.random() < model_alpha
            levels.append((1, 0 if is_accepted else -1))
            if not is_accepted:
                break
        draft = 0.0 if is_text or shape.depth == 0 else world.draft_s(shape)
        step = world.step_s(1 + shape.depth) * max(0.5, rng.gauss(1.0, 0.1))
        cycle = make_cycle(
            shape, levels, shape.depth, draft=draft, verify=step, other=world.other, is_first=index == 0
        )
        drafter = shape.drafter if shape.depth else DrafterKind.NONE
        choice.observe(replace(cycle, drafter=drafter, token_ids=tuple(text[: len(cycle.token_ids)])))
        shapes.append(shape)
    return shapes


def share(shapes, kind):
    return sum(shape.depth > 0 and shape.drafter is kind for shape in shapes) / len(shapes)


DEAR = World(spikes=0.0, per_token=0.2, draft=0.3)


@pytest.mark.parametrize(
    ("model_alpha", "text_alpha", "world", "preferred"),
    [(0.7, 0.9, None, {SUFFIX}), (0.9, 0.05, None, {MODEL}), (0.05, 0.02, DEAR, set())],
    ids=["matches", "the model", "nothing"],
)
def test_drafter_that_is_accepted_at_less_cost_is_preferred(model_alpha, text_alpha, world, preferred):
    choice = choice_of([Finds()])
    shapes = play(choice, 600, model_alpha=model_alpha, text_alpha=text_alpha, world=world)[300:]
    assert {kind for kind in (MODEL, SUFFIX) if share(shapes, kind) > 0.8} == preferred
    assert preferred or share(shapes, MODEL) + share(shapes, SUFFIX) < 0.2
    assert preferred != {SUFFIX} or max(shape.depth for shape in shapes) == TEXT_DEPTH


def test_matches_are_learned_from_what_the_model_emits():
    costs, world = CostModel(random.Random(1)), World(spikes=0.0, noise=0.1, draft=0.01, network=0.0)
    without, with_matches = choice_of([], costs=costs), choice_of([Finds(length=2)], costs=costs)
    play(without, 300, model_alpha=0.9, world=world)
    shapes = play(with_matches, 60, model_alpha=0.9, text_alpha=1.0, world=world)
    assert share(shapes[:1], MODEL) == 1.0, "by their prior, matches promise less"
    assert share(shapes[-20:], SUFFIX) == 1.0


def test_matches_end_where_further_rows_cost_more():
    world = World(spikes=0.0, draft=0.01, network=0.0, per_token=0.03, further=0.17)
    costs = CostModel(random.Random(1))
    costs.rows = RowCosts(world.forward_s)
    session, controller = Lone(random.Random(1)), AdaptiveGamma(0, costs, max_match=TEXT_DEPTH)
    found = Candidates(matches=[Finds().match])
    for index in range(600):  # short proposals of the draft model, and now and then a long match
        kind, depth = (SUFFIX, TEXT_DEPTH) if index % 10 == 9 else (MODEL, 1 + index % 3)
        walked = replace(world, alpha=0.8 if kind is SUFFIX else 0.4)
        cycle, _ = session.cycle(walked, Shape(depth, drafter=kind), is_first=index == 0)
        if kind is SUFFIX:
            controller.next_shape(found)
            controller.observe(cycle)
        else:
            costs.observe(cycle, was_plain=False)
    depths = []
    for _ in range(50):
        costs.renew()
        depths.append(controller.next_shape(found).depth)
    assert sum(depths) / len(depths) < 4.5


@pytest.mark.parametrize(("catch_up", "least", "most"), [(0.0, 0.6, 1.0), (2.0, 0.0, 0.2)])
def test_match_takes_the_time_in_which_the_model_catches_up(catch_up, least, most):
    world, rng, was_model = World(spikes=0.0, noise=0.1, catch_up=catch_up), random.Random(1), False
    controller = AdaptiveGamma(4, CostModel(random.Random(1)), max_match=4)
    matched = []
    for index in range(900):
        matches = [Finds(num_tokens=4).match] if index % 3 == 2 else []
        shape = controller.next_shape(Candidates((MODEL,), matches))
        is_model = shape.drafter is MODEL and shape.depth > 0
        draft = world.draft_s(shape) + (0.0 if was_model else catch_up) if is_model else 0.0
        levels = replace(world, alpha=0.7 if is_model else 0.85).walk(shape, rng)
        step = world.step_s(1 + shape.depth) * max(0.5, rng.gauss(1.0, 0.1))
        cycle = make_cycle(
            shape, levels, shape.depth, draft=draft, verify=step, other=world.other, is_first=index == 0
        )
        controller.observe(replace(cycle, token_ids=tuple(range(len(cycle.token_ids)))))
        was_model = is_model
        if matches and index >= 300:
            matched.append(shape.drafter is SUFFIX)
    assert least <= sum(matched) / len(matched) <= most


@pytest.mark.parametrize(("others", "least", "most"), [(0.0, 0.0, 0.2), (1.0, 0.8, 1.0)])
def test_acceptance_at_another_temperature_is_no_evidence(others, least, most):
    costs, world = CostModel(random.Random(1)), World(spikes=0.0, noise=0.1, per_token=0.6)
    rejected = choice_of([Finds()], Readiness.ABSENT, costs=costs, temperature=1.0)
    play(rejected, 300, model_alpha=0.0, text_alpha=0.0, world=world)
    for seed in range(4):
        accepted = choice_of([Finds()], Readiness.ABSENT, costs=costs, temperature=others)
        play(accepted, 200, model_alpha=0.0, text_alpha=0.95, world=world, seed=seed)
    first_shapes = []
    for _ in range(20):
        costs.renew()
        fresh = choice_of([Finds()], Readiness.ABSENT, costs=costs, temperature=1.0)
        first_shapes.append(fresh.next_shape())
    assert least <= share(first_shapes, SUFFIX) <= most


@pytest.mark.parametrize(
    ("kind", "length", "least", "most"),
    [(SUFFIX, 1, 0.0, 0.3), (SUFFIX, 9, 0.8, 1.0), (DrafterKind.PREDICTION, 1, 0.8, 1.0)],
)
def test_short_matches_are_not_expected_to_be_accepted_but_predictions_are(kind, length, least, most):
    costs, world = CostModel(random.Random(1)), World(spikes=0.0, noise=0.1, per_token=0.7)
    known = choice_of([Finds(PREDICTION, length=20)], Readiness.ABSENT, costs=costs)
    play(known, 200, model_alpha=0.0, text_alpha=0.6, world=world)
    first_shapes = []
    for _ in range(20):
        costs.renew()
        first_shapes.append(choice_of([Finds(kind, length)], Readiness.ABSENT, costs=costs).next_shape())
    assert least <= share(first_shapes, kind) <= most


def test_of_two_text_drafters_the_one_that_is_accepted_is_used():
    choice = choice_of([Finds(PREDICTION, length=2, first=FALSE), Finds(length=20)], Readiness.ABSENT)
    shapes = play(choice, 300, text_alpha=0.9, prediction_alpha=0.05)
    assert share(shapes[100:], SUFFIX) > 0.9
    assert all(shape.is_fallback for shape in shapes), "no draft worker is there"


def test_first_match_is_the_longest_while_no_costs_are_known():
    choice = choice_of(
        [Finds(PREDICTION, length=2), Finds(SUFFIX, length=9, num_tokens=5)], Readiness.READING
    )
    shape = choice.next_shape()
    assert (shape.drafter, shape.depth, shape.is_fallback) == (SUFFIX, 5, False)


def test_without_draft_worker_and_match_nothing_is_proposed():
    shape = choice_of([], Readiness.ABSENT).next_shape()
    assert (shape.depth, shape.is_fallback) == (0, True)
    assert choice_of([], Readiness.ABSENT, allowed=SUFFIX).next_shape().is_fallback is False


def test_fixed_gamma_prefers_prediction_then_model_then_the_longest_match():
    def shape_of(texts, readiness):
        session, drafter = make_session(), SessionDrafter(models_of(readiness), texts, TEXT_DEPTH, fixed=3)
        return DrafterChoice(session, drafter, FixedGamma(3, CostModel(), 6)).next_shape()

    prediction = Finds(DrafterKind.PREDICTION, length=0)
    assert shape_of([prediction, Finds()], Readiness.READY).drafter is DrafterKind.PREDICTION
    by_model = shape_of([Finds()], Readiness.READY)
    assert (by_model.drafter, by_model.depth, by_model.max_nodes) == (MODEL, 3, 6)
    by_text = shape_of([Finds()], Readiness.ABSENT)
    assert (by_text.drafter, by_text.depth, by_text.max_nodes, by_text.is_fallback) == (SUFFIX, 3, 0, True)


async def test_failed_draft_worker_is_replaced_by_the_longest_match_of_the_same_cycle():
    session = make_session()
    drafter = SessionDrafter(models_of(Readiness.READY), [Finds(PREDICTION, 2), Finds(SUFFIX, 9)], TEXT_DEPTH)
    proposal = await drafter.propose(session, Shape(3))
    assert proposal == Proposal((0, 1, 2))
    assert (proposal.drafter, proposal.is_fallback) == (SUFFIX, True)
    nothing = SessionDrafter(models_of(Readiness.READY), [], TEXT_DEPTH)
    assert (await nothing.propose(session, Shape(3))) == Proposal()


@pytest.mark.parametrize("kind", [PREDICTION, SUFFIX])
async def test_proposal_is_that_of_the_named_drafter_within_the_depth(kind):
    session = make_session()
    drafter = SessionDrafter({}, [Finds(PREDICTION, 2, 4), Finds(SUFFIX, 9, 6)], TEXT_DEPTH)
    proposal = await drafter.propose(session, Shape(2, drafter=kind))
    assert (proposal.token_ids, proposal.drafter, proposal.is_fallback) == ((0, 1), kind, False)
    assert await drafter.propose(session, Shape(2, drafter=DrafterKind.GRAMMAR)) == Proposal()


def test_head_drafts_once_the_target_has_read_the_prompt():
    session, head = make_session(), TargetHead()
    assert head.prepare(session) is Readiness.ABSENT
    session.has_head = True
    assert head.prepare(session) is Readiness.READING
    session.token_ids.append(1)
    drafter = SessionDrafter({DrafterKind.HEAD: head}, [Finds()], TEXT_DEPTH, fixed=3)
    fixed = DrafterChoice(session, drafter, FixedGamma(3, CostModel()))
    assert (fixed.next_shape().depth, fixed.next_shape().drafter) == (3, DrafterKind.HEAD)
    session.has_head = False  # the session has moved to a worker without one
    assert fixed.next_shape().drafter is SUFFIX
    assert fixed.next_shape().is_fallback
