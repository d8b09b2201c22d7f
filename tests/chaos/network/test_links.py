"""Links: what each fault does to the bytes of a connection, and who notices."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from tests.chaos.network.links import FAULTS, Network
from tests.support.workers.fleet_helpers import clients, fleet_of
from tests.support.workers.scripted_workers import finish, make_session, scripted, until

BY_NAME = {fault.name: fault for fault in FAULTS}


@asynccontextmanager
async def echo():
    """A server that sends back what it gets, behind a link; the client's end of a connection."""

    async def answer(reader, writer):
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    with Network() as network:
        link = network.link(server.sockets[0].getsockname()[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        writer.write(b"a")
        assert await reader.read(1) == b"a"
        yield network, link, reader, writer
        writer.close()
    server.close()


async def heard(reader, count, timeout_s):
    """Return the bytes that come in time; None if the connection is reset."""
    try:
        return await asyncio.wait_for(reader.readexactly(count), timeout_s)
    except asyncio.TimeoutError:
        return b""
    except (ConnectionResetError, asyncio.IncompleteReadError):
        return None


@pytest.mark.parametrize(
    ("name", "during", "after"),
    [("cut", None, None), ("half-open, answers lost", b"", None), ("stalled, answers only", b"", b"b")],
)
async def test_link_loses_or_holds_bytes(name, during, after):
    async with echo() as (network, link, reader, writer):
        with network.faulty([link], BY_NAME[name]):
            await asyncio.sleep(0.05)
            writer.write(b"b")
            assert await heard(reader, 1, 0.3) == during
        assert await heard(reader, 1, 10.0) == after


async def test_fault_concerns_clients_of_its_sources_only():
    async with echo() as (network, link, reader, writer):
        with network.faulty([link], BY_NAME["stalled"], "127.0.0.2"):
            await asyncio.sleep(0.05)
            writer.write(b"b")
            assert await heard(reader, 1, 10.0) == b"b"


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
                with network.faulty([link], BY_NAME["stalled"]):
                    since = time.monotonic()
                    await until(lambda: fleet.targets.num_up == 0)
                    assert time.monotonic() - since < 5.0
            worker.address = address
