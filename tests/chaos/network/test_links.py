"""Links: who notices a fault."""

import time

import pytest

from tests.chaos.network.links import Fault, Network
from tests.support.workers.fleet_helpers import clients, fleet_of
from tests.support.workers.scripted_workers import finish, make_session, scripted, until


@pytest.mark.integration
async def test_worker_whose_link_stalls_is_left_before_its_deadlines():
    """gRPC's pings find it in 2.5 s; the worker's info is asked for twice, with 5 s each."""
    async with scripted("target") as worker:
        with Network() as network:
            link = network.link(int(worker.address.rpartition(":")[2]))
            address, worker.address = worker.address, f"127.0.0.1:{link.port}"
            async with fleet_of(worker) as fleet:
                session = make_session("s", max_tokens=5)
                await finish(session, *clients(fleet, session), 3)
                with network.faulty([link], Fault("stalled", stalls=True)):
                    since = time.monotonic()
                    await until(lambda: fleet.targets.num_up() == 0)
                    assert time.monotonic() - since < 5.0
            worker.address = address
