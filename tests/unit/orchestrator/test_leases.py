"""Renewals of leases go on, whatever one of them raises."""

import asyncio

import pytest

from orchestrator.sessions import leases
from orchestrator.sessions.leases import LeaseManager
from tests.support.workers.scripted_workers import make_session, until


class FailingStore:
    def __init__(self, error: Exception) -> None:
        self.error, self.num_renewals = error, 0

    async def renew(self, _session) -> None:
        self.num_renewals += 1
        raise self.error

    async def running(self) -> list[str]:
        return []


@pytest.mark.parametrize("error", [RuntimeError("the handler is closed"), TypeError("a bug")])
async def test_renewals_go_on_after_an_unexpected_error(monkeypatch, caplog, error):
    monkeypatch.setattr(leases, "LEASE_S", 0.03)
    store = FailingStore(error)
    manager = LeaseManager(store, lambda *_: None)
    manager.start()
    with manager.holding(make_session()):
        await until(lambda: store.num_renewals >= 3)
    await asyncio.wait_for(manager.close(), 10)
    assert any(str(error) in str(record.exc_info[1]) for record in caplog.records if record.exc_info)
