"""Sessions go to targets with their adapter, weights and grammar's library; trees to those that take them."""

import asyncio
import dataclasses
from contextlib import AsyncExitStack

import pytest

from gammaray.blocks import Shape
from gammaray.config import OrchestratorSettings
from gammaray.errors import FailedPreconditionError, InvalidArgumentError, ModelChangedError, UnavailableError
from gammaray.grammar.matcher import grammar_identity
from gammaray.types import GammaPolicy, GenerationRequest, Proposal
from gammaray.v1 import target_service_pb2 as pb
from gammaray.v1 import types_pb2
from orchestrator.cycle.run import run_cycle
from orchestrator.drafting.factory import Drafting
from orchestrator.workers.session_client import session_spec
from orchestrator.workers.verifier import check_served
from services.streaming.messages import Model
from services.target_worker.worker import check_identity
from tests.support.workers.fleet_helpers import clients, emitted, fleet_of
from tests.support.workers.scripted_workers import (
    PROMPT,
    VOCAB,
    Steady,
    continuation,
    finish,
    make_session,
    next_token,
    scripted,
    until,
)

pytestmark = pytest.mark.integration

BASE = "a" * 64 + "/float32"
SQL, OTHER_SQL = f"{BASE}/lora/1", f"{BASE}/lora/2"
PLAIN = {"identity": BASE}
ADAPTED = {"identity": BASE, "adapters": {"sql": SQL}}
OWN = grammar_identity()
FOREIGN = "llguidance-1.9.1"
GRAMMAR = "start: /[a-z]*/"


def session_with(adapter="", identity="", grammar=""):
    session = make_session(max_tokens=12)
    params = dataclasses.replace(session.params, grammar=grammar)
    session = dataclasses.replace(session, params=params, adapter=adapter)
    session.model_identity = identity
    return session


@pytest.mark.parametrize(
    ("targets", "asked", "served"),
    [
        pytest.param([PLAIN, ADAPTED], {"adapter": "sql"}, (1, SQL), id="adapter"),
        pytest.param([ADAPTED], {}, (0, BASE), id="no adapter"),
        pytest.param(
            [{**PLAIN, "grammars": FOREIGN}, {"grammars": OWN}], {"grammar": GRAMMAR}, (1, ""), id="library"
        ),
        pytest.param([{"grammars": ""}], {"grammar": GRAMMAR}, (0, ""), id="unknown library"),
        pytest.param([{"grammars": FOREIGN}], {}, (0, ""), id="no grammar"),
    ],
)
async def test_session_goes_to_a_target_that_serves_it(targets, asked, served):
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(scripted("target", **given)) for given in targets]
        fleet = await stack.enter_async_context(fleet_of(*workers))
        session, (index, identity) = session_with(**asked), served
        drafter, verifier = clients(fleet, session)
        verifier.prefer(session, workers[0].address)
        fleet.targets.links[workers[-1].address].sessions |= {"x", "y"}  # least loaded is the other one
        await finish(session, drafter, verifier, 0)
        assert emitted(session) == continuation(PROMPT, 12)
        assert [bool(worker.blocks) for worker in workers] == [at == index for at in range(len(workers))]
        spec = workers[index].blocks[0].spec
        assert (spec.adapter, spec.model_identity) == (session.adapter, identity)
        assert session.model_identity == identity


@pytest.mark.parametrize(
    ("target", "asked", "error"),
    [
        (PLAIN, {"adapter": "sql"}, UnavailableError),
        ({**PLAIN, "adapters": {"sql": OTHER_SQL}}, {"adapter": "sql", "identity": SQL}, ModelChangedError),
        ({"grammars": FOREIGN}, {"grammar": GRAMMAR}, FailedPreconditionError),
    ],
    ids=["no adapter", "other weights", "other library"],
)
async def test_session_waits_for_a_target_that_serves_it(target, asked, error):
    async with scripted("target", **target) as worker, fleet_of(worker) as fleet:
        session = session_with(**asked)
        with pytest.raises(error) as caught:
            await finish(session, *clients(fleet, session, wait_s=0.3), 0)
        assert worker.blocks == []
        if error is ModelChangedError:
            with pytest.raises(ModelChangedError):
                await check_served(fleet.targets, "s", SQL, 0.1)
            await check_served(fleet.targets, "s", OTHER_SQL, 0.1)
        if error is FailedPreconditionError:
            assert FOREIGN in str(caught.value)
            assert OWN in str(caught.value)


@pytest.mark.parametrize(
    ("adapter", "identity", "error"),
    [
        ("", BASE, None),
        ("sql", SQL, None),
        ("sql", "", None),
        ("sql", BASE, ModelChangedError),
        ("", SQL, ModelChangedError),
        ("legal", SQL, ModelChangedError),
        ("legal", "", InvalidArgumentError),
    ],
)
def test_worker_compares_adapter_and_identity(adapter, identity, error):
    spec = types_pb2.SessionSpec(adapter=adapter, model_identity=identity)
    block = pb.VerifyBlock(session_id="s", spec=spec)
    model = Model("m", 97, 100, "", identity=BASE, adapters={"sql": SQL})
    if error is None:
        check_identity(block, model)
        return
    with pytest.raises(error):
        check_identity(block, model)
    with pytest.raises(InvalidArgumentError, match="allowed: none: this worker serves no adapter"):
        check_identity(
            pb.VerifyBlock(session_id="s", spec=types_pb2.SessionSpec(adapter="x")), Model("m", 97, 100, "")
        )


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


async def run_trees(session, drafter, verifier, gamma=4):
    cycles = []
    while session.finish_reason is None:
        cycles.append(await run_cycle(session, drafter, verifier, Trees(gamma)))
    return cycles


def trees_sent(target):
    return [block for block in target.blocks if block.proposal.parents]


async def test_target_that_takes_trees_gets_them():
    async with scripted("target", takes_trees=True) as target, fleet_of(target) as fleet:
        session, drafter = make_session(max_tokens=NUM_TOKENS), TreeDrafter(right_first=False)
        cycles = await run_trees(session, drafter, clients(fleet, session)[1])
    assert emitted(session) == continuation(PROMPT, NUM_TOKENS)
    assert len(cycles) == NUM_TOKENS / 5
    assert len(trees_sent(target)) == len(cycles)


@pytest.mark.parametrize("right_first", [True, False])
async def test_chain_target_gets_one_path_of_the_first_tree_and_no_later_one(right_first):
    """The session does not know its target before the first cycle."""
    async with scripted("target") as target, fleet_of(target) as fleet:
        session, drafter = make_session(max_tokens=NUM_TOKENS), TreeDrafter(right_first=right_first)
        cycles = await run_trees(session, drafter, clients(fleet, session)[1])
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
            task = asyncio.create_task(run_trees(session, drafter, verifier))
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
