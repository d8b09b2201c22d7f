"""Sessions on scripted workers: feeding, refusals; which target serves them, and which take trees."""

import asyncio
import dataclasses
import math
from contextlib import AsyncExitStack, nullcontext

import pytest

from gammaray.blocks import Shape
from gammaray.config import OrchestratorSettings
from gammaray.errors import (
    InternalError,
    InvalidArgumentError,
    ModelChangedError,
    ResourceExhaustedError,
    UnavailableError,
)
from gammaray.grammar.matcher import grammar_identity
from gammaray.types import ADAPTIVE, DrafterKind, GammaPolicy, GenerationRequest, Proposal, VerificationMethod
from gammaray.v1 import target_service_pb2 as target_pb
from gammaray.v1 import types_pb2 as pb
from orchestrator.control.fixed import Reason
from orchestrator.cycle.run import run_cycle
from orchestrator.drafting.factory import Drafting
from orchestrator.workers.drafter import Readiness
from orchestrator.workers.session_client import session_spec
from orchestrator.workers.verifier import check_served
from services.streaming.messages import Model
from services.target_worker.worker import check_identity
from tests.support.cycle_helpers import ConstantGamma
from tests.support.workers.fleet_helpers import clients, emitted, fleet_of
from tests.support.workers.scripted_workers import (
    PROMPT,
    VOCAB,
    continuation,
    finish,
    make_session,
    next_token,
    scripted,
    until,
)

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("gamma", [0, 1, 3, 8])
async def test_remote_session_is_lossless_and_sends_only_missing_tokens(gamma):
    async with scripted("target", "draft") as (target, draft), fleet_of(target, draft) as fleet:
        session = make_session(max_tokens=40)
        cycles = await finish(session, *clients(fleet, session), gamma)
        assert emitted(session) == continuation(PROMPT, 40)
        for worker in (target, draft):
            assert worker.num_needs == 0
            assert sum(block.HasField("spec") for block in worker.blocks) == (worker is target or gamma > 0)
        sent = sum(len(block.context.token_ids) for block in target.blocks)
        accepted = sum(c.num_accepted for c in cycles)
        assert sent <= len(PROMPT) + 40 - accepted + gamma
        assert (len(draft.blocks) > 0) is (gamma > 0)
        assert all(block.gamma <= gamma for block in draft.blocks)


async def test_remote_evicted_session_is_fed_again():
    async with scripted("target", "draft") as (target, draft), fleet_of(target, draft) as fleet:

        def forgetful(worker):
            def answer(block):
                if len(worker.blocks) in (4, 7):
                    worker.forget()
                elif len(worker.blocks) == 5:  # a part of the cache is gone
                    worker.held[block.session_id] = worker.held.get(block.session_id, [])[:2]
                return worker.work(block)

            return answer

        for worker in (target, draft):
            worker.on_block = forgetful(worker)
        session = make_session(max_tokens=40)
        cycles = await finish(session, *clients(fleet, session), 3)
        assert emitted(session) == continuation(PROMPT, 40)
        assert target.num_needs >= 2
        assert draft.num_needs >= 2
        assert not any(c.draft_failed for c in cycles)


async def test_remote_worker_that_always_requests_tokens_is_abandoned():
    async with scripted("target", "draft") as (target, draft), fleet_of(target, draft) as fleet:
        greedy = lambda worker: lambda block: worker.result(block, need=pb.NeedTokens(position=0))  # noqa: E731
        session = make_session(max_tokens=8)
        drafter, verifier = clients(fleet, session)
        draft.on_block = greedy(draft)
        cycles = await finish(session, drafter, verifier, 3)
        assert emitted(session) == continuation(PROMPT, 8)
        assert cycles[0].draft_failed
        target.on_block = greedy(target)
        session = make_session("t")
        with pytest.raises(InternalError, match="lacks tokens after"):
            await finish(session, *clients(fleet, session), 0)
        target.on_block = lambda block: target.result(block, need=pb.NeedTokens(position=10**6))
        session = make_session("u")
        with pytest.raises(InternalError, match="ahead of the session"):
            await finish(session, *clients(fleet, session), 0)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (3, InvalidArgumentError),
        (8, ResourceExhaustedError),
        (0, InternalError),
        (2**32 - 1, InternalError),
    ],
)
async def test_remote_block_error_of_the_target_has_its_class(code, error):
    async with scripted("target") as target, fleet_of(target) as fleet:
        target.on_block = lambda b: target.result(b, error=pb.BlockError(code=code, message="because"))
        session = make_session()
        with pytest.raises(error, match="because"):
            await finish(session, *clients(fleet, session), 0)


NUM_SCORED = len(PROMPT) - 1
LOW = [-1.0] * NUM_SCORED
SCORED = {"logprobs": LOW, "ranks": [1] * NUM_SCORED}


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"logprobs": LOW[1:], "ranks": SCORED["ranks"]},
        {"logprobs": [math.nan] * NUM_SCORED, "ranks": SCORED["ranks"]},
        {**SCORED, "num_top": 2**32 - 1},
        {**SCORED, "num_top": 1, "top_token_ids": [VOCAB] * NUM_SCORED, "top_logprobs": LOW},
        {**SCORED, "num_top": 3, "top_token_ids": [1] * 3 * NUM_SCORED, "top_logprobs": LOW * 3},
    ],
    ids=["none", "too few", "nan", "columns that do not fit", "top token", "too many"],
)
async def test_remote_impossible_prompt_logprobs_are_a_typed_error(columns):
    async with scripted("target") as target, fleet_of(target) as fleet:

        def answer(block):
            assert block.num_prompt_logprobs == 2
            result = target.work(block)
            result.verdict.prompt_logprobs.CopyFrom(pb.PromptLogprobs(**columns))
            return result

        target.on_block = answer
        session = make_session()
        session.num_prompt_logprobs = 2
        with pytest.raises(InternalError):
            await finish(session, *clients(fleet, session), 0)
        assert emitted(session) == []


async def test_remote_prompt_logprobs_are_requested_until_a_token_is_emitted():
    async with scripted("target") as target, fleet_of(target) as fleet:
        asked = []

        def answer(block):
            asked.append(block.HasField("num_prompt_logprobs"))
            result = target.work(block)
            if asked[-1]:
                result.verdict.prompt_logprobs.CopyFrom(pb.PromptLogprobs(**SCORED))
            return result

        target.on_block = answer
        session = make_session(max_tokens=4)
        session.num_prompt_logprobs = 0
        await finish(session, *clients(fleet, session), 0)
        assert session.prompt_logprobs.token_ids == tuple(PROMPT)
        assert asked == [True, False, False, False]


async def test_remote_drafter_and_target_prefill_a_long_prompt_concurrently():
    async with scripted("target", "draft") as (target, draft), fleet_of(target, draft) as fleet:
        prompt = tuple(i % VOCAB for i in range(500))
        draft.runs.clear()
        session = make_session(max_tokens=60, prompt=prompt)
        drafter, verifier = clients(fleet, session)
        cycles = [await run_cycle(session, drafter, verifier, ConstantGamma(3, 0)) for _ in range(4)]
        assert [(c.gamma, c.num_drafted, c.draft_failed) for c in cycles] == [(3, 0, False)] * 4
        await until(lambda: draft.blocks)
        (waiting,) = draft.blocks
        assert (waiting.base_position, len(waiting.context.token_ids)) == (500, 500)
        draft.runs.set()
        await until(lambda: drafter.prepare(session) is Readiness.READY)
        cycles = await finish(session, drafter, verifier, 3)
        assert session.token_ids[500:] == continuation(prompt, 60)
        assert cycles[-2].num_drafted > 0
        assert len(draft.blocks[1].context.token_ids) < 10, "what was read is not sent again"


async def test_remote_draft_context_ends_before_the_targets():
    async with scripted("target") as target, scripted("draft", max_context=20) as draft:
        async with fleet_of(target, draft) as fleet:
            session = make_session(max_tokens=30)
            cycles = await finish(session, *clients(fleet, session), 4)
            assert emitted(session) == continuation(PROMPT, 30)
            assert not any(c.draft_failed for c in cycles)
            assert all(b.base_position + b.gamma <= 20 for b in draft.blocks)


async def test_remote_sessions_stay_and_new_ones_go_to_the_least_loaded():
    async with scripted("target", "target", "target") as targets, fleet_of(*targets) as fleet:
        pairs = []
        for index in range(9):
            session = make_session(f"s{index}", max_tokens=50)
            _, verifier = clients(fleet, session)
            pairs.append((session, verifier))
            for _ in range(3):
                verdict = await verifier.verify(session, Proposal())
                session.commit([verdict.next_token_id])
        assert [len(t.held) for t in targets] == [3, 3, 3]
        assert [len(t.blocks) for t in targets] == [9, 9, 9]
        for session, verifier in pairs:
            verifier.release(session)
            verifier.release(session)
        await until(lambda: all(not t.held for t in targets))
        assert [len(t.released) for t in targets] == [3, 3, 3]


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
    ],
    ids=["no adapter", "other weights"],
)
async def test_session_waits_for_a_target_that_serves_it(target, asked, error):
    async with scripted("target", **target) as worker, fleet_of(worker) as fleet:
        session = session_with(**asked)
        with pytest.raises(error):
            await finish(session, *clients(fleet, session, wait_s=0.3), 0)
        assert worker.blocks == []
        if error is ModelChangedError:
            with pytest.raises(ModelChangedError):
                await check_served(fleet.targets, "s", SQL, 0.1)
            await check_served(fleet.targets, "s", OTHER_SQL, 0.1)


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
    spec = pb.SessionSpec(adapter=adapter, model_identity=identity)
    block = target_pb.VerifyBlock(session_id="s", spec=spec)
    model = Model("m", 97, 100, "", identity=BASE, adapters={"sql": SQL})
    with nullcontext() if error is None else pytest.raises(error):
        check_identity(block, model)


def test_worker_without_adapters_says_so():
    block = target_pb.VerifyBlock(session_id="s", spec=pb.SessionSpec(adapter="x"))
    with pytest.raises(InvalidArgumentError, match="allowed: none: this worker serves no adapter"):
        check_identity(block, Model("m", 97, 100, ""))


NUM_TOKENS = 40


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


def trees_sent(target):
    return [block for block in target.blocks if block.proposal.parents]


@pytest.mark.parametrize("right_first", [True, False])
async def test_chain_target_gets_one_path_of_the_first_tree_and_no_later_one(right_first):
    """The session does not know its target before the first cycle."""
    async with scripted("target") as target, fleet_of(target) as fleet:
        session, drafter = make_session(max_tokens=NUM_TOKENS), TreeDrafter(right_first=right_first)
        cycles = await finish(session, drafter, clients(fleet, session)[1], 4, 8)
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
            task = asyncio.create_task(finish(session, drafter, verifier, 4, 8))
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


@pytest.mark.parametrize(("forward_s", "is_short"), [([], False), ([1.0, 1.0, 1.0, 500.0, 1500.0], True)])
async def test_first_gammas_follow_what_a_target_says_of_its_forwards(forward_s, is_short):
    async with scripted("target", forward_s=forward_s) as target, scripted("draft") as draft:
        async with fleet_of(target, draft) as fleet:
            session, request = make_session(max_tokens=60), GenerationRequest(prompt=PROMPT, gamma=ADAPTIVE)
            drafting = Drafting(OrchestratorSettings(), fleet.drafts, fleet.targets, VOCAB)
            spec = session_spec(session, frozenset(), shares_caches=True)
            drafter, choice = drafting.open(session, request, spec)
            verifier, gammas = clients(fleet, session)[1], []
            while session.finish_reason is None:
                cycle = await run_cycle(session, drafter, verifier, choice)
                if cycle.shape.drafter is DrafterKind.MODEL and cycle.shape.reason == Reason.BEST.value:
                    gammas.append(cycle.gamma)
    assert gammas
    assert (max(gammas) <= 3) is is_short


@pytest.mark.parametrize("method", [VerificationMethod.COUPLED, VerificationMethod.BLOCK])
async def test_few_tokens_are_drafted_only_where_a_proposal_may_end_anywhere(method):
    async with scripted("target") as target, scripted("draft") as draft:
        async with fleet_of(target, draft) as fleet:
            session = make_session(max_tokens=400)
            drafting = Drafting(OrchestratorSettings(), fleet.drafts, fleet.targets, VOCAB)
            request = GenerationRequest(prompt=PROMPT, gamma=ADAPTIVE, verification=method)
            drafter, choice = drafting.open(
                session, request, session_spec(session, frozenset(), shares_caches=True)
            )
            verifier = clients(fleet, session)[1]
            while session.finish_reason is None:
                await run_cycle(session, drafter, verifier, choice)
    few = {block.drafted_depth for block in draft.blocks}
    assert (few != {0}) is (method is VerificationMethod.COUPLED)
