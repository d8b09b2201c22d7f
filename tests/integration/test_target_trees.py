"""Targets that verify chains only, such as vLLM: they are neither asked for nor sent trees."""

import asyncio

import pytest

from gammaray.blocks import Shape
from gammaray.config import OrchestratorSettings
from gammaray.types import GammaPolicy, GenerationRequest, Proposal
from orchestrator.cycle.run import run_cycle
from orchestrator.drafting.factory import Drafting
from orchestrator.workers.session_client import session_spec
from tests.support.workers.fleet_helpers import clients, emitted, fleet_of
from tests.support.workers.scripted_workers import (
    PROMPT,
    VOCAB,
    Steady,
    continuation,
    make_session,
    next_token,
    scripted,
    until,
)

pytestmark = pytest.mark.integration

NUM_TOKENS = 40


class Trees(Steady):
    def next_shape(self) -> Shape:
        return Shape(self.gamma, 8)


class TreeDrafter:
    """Proposes the right chain beside wrong tokens, one before and one after each of its own."""

    def __init__(self, *, right_first: bool) -> None:
        self.right_first = right_first
        self.shapes: list[Shape] = []

    async def propose(self, session, shape: Shape) -> Proposal:
        self.shapes.append(shape)
        tokens, ids, parents, at = list(session.token_ids), [], [], -1
        for _ in range(shape.depth):
            right = next_token(tokens)
            wrong = (right + 1) % VOCAB
            pair = [right, wrong] if self.right_first else [wrong, right]
            pair = pair if shape.is_tree else [right]
            ids += pair
            parents += [at] * len(pair)
            at = len(ids) - len(pair) + pair.index(right)
            tokens.append(right)
        return Proposal(tuple(ids), tuple(parents) if shape.is_tree else None)


async def run(session, drafter, verifier, gamma=4):
    cycles = []
    while session.finish_reason is None:
        cycles.append(await run_cycle(session, drafter, verifier, Trees(gamma)))
    return cycles


def trees_sent(target):
    return [block for block in target.blocks if block.proposal.parents]


async def test_target_that_takes_trees_gets_them():
    async with scripted("target", takes_trees=True) as target, fleet_of(target) as fleet:
        session, drafter = make_session(max_tokens=NUM_TOKENS), TreeDrafter(right_first=False)
        cycles = await run(session, drafter, clients(fleet, session)[1])
    assert emitted(session) == continuation(PROMPT, NUM_TOKENS)
    assert len(cycles) == NUM_TOKENS / 5
    assert len(trees_sent(target)) == len(cycles)


@pytest.mark.parametrize("right_first", [True, False])
async def test_chain_target_gets_one_path_of_the_first_tree_and_no_later_one(right_first):
    """The session does not know its target before the first cycle."""
    async with scripted("target") as target, fleet_of(target) as fleet:
        session, drafter = make_session(max_tokens=NUM_TOKENS), TreeDrafter(right_first=right_first)
        cycles = await run(session, drafter, clients(fleet, session)[1])
    assert emitted(session) == continuation(PROMPT, NUM_TOKENS)
    assert trees_sent(target) == []
    assert [shape.is_tree for shape in drafter.shapes] == [True, *[False] * (len(cycles) - 1)]
    assert cycles[0].num_accepted == (4 if right_first else 0)
    assert all(cycle.num_accepted == 4 for cycle in cycles[1:-1])


async def test_failover_from_a_target_with_trees_to_one_without():
    async with scripted("target", takes_trees=True) as first, scripted("target") as second:
        async with fleet_of(first, second) as fleet:
            session, drafter = make_session(max_tokens=200), TreeDrafter(right_first=True)
            verifier = clients(fleet, session)[1]
            verifier.prefer(session, first.address)
            task = asyncio.create_task(run(session, drafter, verifier))
            await until(lambda: len(first.blocks) > 5)
            await first.stop()
            await task
    assert emitted(session) == continuation(PROMPT, 200)
    assert trees_sent(first)
    assert second.blocks
    assert trees_sent(second) == []
    assert not drafter.shapes[-1].is_tree


@pytest.mark.parametrize("takes_trees", [True, False])
async def test_draft_worker_is_asked_for_trees_only_where_a_target_takes_them(takes_trees):
    async with scripted("target", takes_trees=takes_trees) as target, scripted("draft") as draft:
        async with fleet_of(target, draft) as fleet:
            session = make_session(max_tokens=10)
            drafting = Drafting(OrchestratorSettings(), fleet.drafts, fleet.targets, VOCAB)
            request = GenerationRequest(prompt=PROMPT, gamma=GammaPolicy(fixed=3, max_nodes=8))
            spec = session_spec(session, frozenset(), shares_caches=True)
            drafter, choice = drafting.open(session, request, spec)
            verifier = clients(fleet, session)[1]
            while session.finish_reason is None:
                await run_cycle(session, drafter, verifier, choice)
    assert emitted(session) == continuation(PROMPT, 10)
    assert {block.max_nodes for block in draft.blocks} == ({8} if takes_trees else {0})
