"""Verifiers on scripted target workers: failover, waiting for a target, deadlines, spreading of sessions."""

from __future__ import annotations

import asyncio

import pytest

from gammaray.types import Proposal
from tests.support.workers.fleet_helpers import clients, emitted, fleet_of
from tests.support.workers.scripted_workers import PROMPT, continuation, finish, make_session, scripted, until

pytestmark = pytest.mark.integration


async def test_remote_dead_target_is_replaced_without_changing_tokens():
    async with scripted("target", "target", "draft") as (*targets, draft), fleet_of(*targets, draft) as fleet:
        session = make_session(max_tokens=200)
        task = asyncio.create_task(finish(session, *clients(fleet, session), 3))
        await until(lambda: any(len(t.blocks) > 5 for t in targets))
        first, second = sorted(targets, key=lambda t: -len(t.blocks))
        await first.stop()
        await task
        assert emitted(session) == continuation(PROMPT, 200)
        assert second.blocks[0].context.start == 0
        assert second.blocks[0].HasField("spec")


async def test_remote_session_waits_for_the_restart_of_the_only_target():
    async with scripted("target") as target, fleet_of(target) as fleet:
        session = make_session(max_tokens=100)
        task = asyncio.create_task(finish(session, *clients(fleet, session), 0))
        await until(lambda: len(target.blocks) > 5)
        await target.stop()
        await asyncio.sleep(0.1)
        await target.start()
        await task
        assert emitted(session) == continuation(PROMPT, 100)


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
