"""Fallback of drafters on scripted workers: within a cycle, with recovery, lossless at every step."""

import asyncio
import time
from functools import partial

import pytest

from gammaray.types import DrafterKind
from gammaray.v1 import types_pb2 as pb
from orchestrator.control.costs import CostModel
from orchestrator.control.fixed import FixedGamma
from orchestrator.cycle.run import run_cycle
from orchestrator.drafting.session_drafter import DrafterChoice, SessionDrafter
from orchestrator.drafting.suffix_decoding import SuffixDrafter
from tests.support.workers.fleet_helpers import clients, emitted, fleet_of, stop_pauses_ending
from tests.support.workers.scripted_workers import PROMPT, continuation, make_session, scripted, until

pytestmark = pytest.mark.integration

TEXTS = {
    DrafterKind.MODEL: [SuffixDrafter],
    DrafterKind.SUFFIX: [SuffixDrafter],
    DrafterKind.PREDICTION: [],
    DrafterKind.GRAMMAR: [],
    DrafterKind.NONE: [],
}
"""Look-ups by what a request allows; those of a prediction or a grammar need one."""


def advancing(fleet, session, allowed=DrafterKind.MODEL, **options):
    """Return what runs the next cycle of a session."""
    remote, verifier = clients(fleet, session, **options)
    texts = [look_up() for look_up in TEXTS[allowed]]
    gamma = 0 if allowed is DrafterKind.NONE else 3
    drafter = SessionDrafter({allowed: remote} if allowed is DrafterKind.MODEL else {}, texts, 3, fixed=gamma)
    choice = DrafterChoice(session, drafter, FixedGamma(gamma, CostModel()))
    return partial(run_cycle, session, drafter, verifier, choice)


async def run(session, advance):
    cycles = []
    while session.finish_reason is None:
        cycles.append(await advance())
    return cycles


@pytest.mark.parametrize("top", sorted(set(DrafterKind) - {DrafterKind.HEAD}))
async def test_fallback_is_lossless_for_every_requested_drafter(top):
    async with scripted("target", "draft") as (target, draft), fleet_of(target, draft) as fleet:
        session = make_session(max_tokens=60)
        cycles = await run(session, advancing(fleet, session, top))
        assert emitted(session) == continuation(PROMPT, 60)
        assert (len(draft.blocks) > 0) is (top is DrafterKind.MODEL)
        assert {cycle.drafter for cycle in cycles} <= {top, DrafterKind.NONE}
        assert not any(cycle.is_fallback for cycle in cycles)


async def test_each_token_of_a_prompt_adds_to_the_time_that_workers_have_to_read_it():
    async with scripted("target", "draft") as (target, draft), fleet_of(target, draft) as fleet:
        target.delay_s = draft.delay_s = 0.5
        session = make_session(prompt=PROMPT * 40, max_tokens=60)
        advance = advancing(fleet, session, verify_timeout_s=0.1, prefill_timeout_s=0.1)
        await advance()
        await asyncio.sleep(1.0)  # the draft worker answers after half of it
        target.delay_s = draft.delay_s = 0.0
        cycles = await run(session, advance)
        assert session.token_ids[-60:] == continuation(PROMPT * 40, 60)
        assert {cycle.drafter for cycle in cycles} == {DrafterKind.MODEL}


async def test_fallback_applies_in_the_cycle_that_loses_its_drafter_and_recovers():
    async with scripted("target", "draft") as (target, draft), fleet_of(target, draft) as fleet:
        session = make_session(max_tokens=100_000)
        advance = advancing(fleet, session, propose_timeout_s=30.0)
        for _ in range(5):
            assert (await advance()).drafter is DrafterKind.MODEL
        await draft.stop()
        lost = [await advance() for _ in range(20)]
        assert all(cycle.is_fallback for cycle in lost[1:])
        assert max(cycle.total_s for cycle in lost) < 30.0, "no cycle waits for a drafter that is gone"
        assert DrafterKind.MODEL not in {cycle.drafter for cycle in lost[1:]}
        await draft.start()
        deadline = time.monotonic() + 30
        while (cycle := await advance()).drafter is not DrafterKind.MODEL:
            assert time.monotonic() < deadline, "it never climbed back"
            await asyncio.sleep(0.01)
        assert not cycle.is_fallback
        assert emitted(session) == continuation(PROMPT, session.num_emitted)


@pytest.mark.slow
async def test_fallback_stopped_drafter_costs_one_deadline_and_is_used_when_it_resumes(monkeypatch):
    stop_pauses_ending(monkeypatch)
    async with scripted("target", "draft") as (target, draft), fleet_of(target, draft) as fleet:
        session = make_session(max_tokens=100_000)
        advance = advancing(fleet, session, propose_timeout_s=2.0)
        for _ in range(5):
            await advance()
        draft.runs.clear()
        lost = [await advance() for _ in range(30)]
        assert all(cycle.is_fallback for cycle in lost)
        # The other cycles did not call it: they began with another drafter.
        assert [cycle.shape.is_fallback for cycle in lost] == [False] + [True] * 29
        draft.runs.set()
        start = time.monotonic()
        while (await advance()).drafter is not DrafterKind.MODEL:
            assert time.monotonic() - start < 30.0, "its late answers say that it goes on"
            await asyncio.sleep(0.01)


async def test_fallback_error_of_one_session_does_not_stop_the_others_or_another_worker():
    async with scripted("target", "draft", "draft") as (target, *drafts), fleet_of(target, *drafts) as fleet:
        for draft in drafts[:1]:
            draft.on_block = lambda b, d=draft: d.result(b, error=pb.BlockError(code=13, message="broken"))
        sessions = [make_session(f"s{index}", max_tokens=200) for index in range(4)]
        all_cycles = await asyncio.gather(*(run(s, advancing(fleet, s)) for s in sessions))
        for cycles in all_cycles:
            workers = {cycle.draft_worker for cycle in cycles if cycle.draft_worker}
            assert workers == {drafts[1].address}
            assert sum(cycle.is_fallback for cycle in cycles) <= 5


async def test_draining_workers_are_replaced_without_a_failure():
    roles = ("target", "target", "draft", "draft")
    async with scripted(*roles) as workers, fleet_of(*workers) as fleet:
        session = make_session(max_tokens=100_000)
        advance = advancing(fleet, session)
        for _ in range(5):
            await advance()
        leaving = [worker for worker in workers if worker.blocks]
        assert {worker.role for worker in leaving} == {"target", "draft"}
        for worker in leaving:
            worker.is_draining = True
        await advance()  # whose answers bring the notice
        seen = [len(worker.blocks) for worker in leaving]
        after = [await advance() for _ in range(5)]
        assert [len(worker.blocks) for worker in leaving] == seen
        assert not any(cycle.is_fallback for cycle in after)
        stayed = [worker.address for worker in workers if worker.role == "draft" and worker not in leaving]
        assert {cycle.draft_worker for cycle in after} == set(stayed)
        await until(lambda: [worker.released for worker in leaving] == [["s"], ["s"]])
        assert emitted(session) == continuation(PROMPT, session.num_emitted)


@pytest.mark.slow
async def test_slow_target_is_replaced_at_its_deadline():
    async with scripted("target", "target") as targets, fleet_of(*targets) as fleet:
        session = make_session(max_tokens=100_000)
        advance = advancing(fleet, session, verify_timeout_s=2.0)
        await advance()
        (slow,) = [worker for worker in targets if worker.blocks]
        slow.on_block = lambda block: None
        start = time.monotonic()
        await advance()
        assert time.monotonic() - start < 20
        assert emitted(session) == continuation(PROMPT, session.num_emitted)
