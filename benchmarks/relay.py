"""A TCP relay that delivers bytes later, as a longer cable would, in order and at full rate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_CHUNK = 65_536


@asynccontextmanager
async def relay(address: str, delay_s: float) -> AsyncIterator[str]:
    """Relay connections to `address`, each direction `delay_s` late; yield the address to connect to."""
    host, _, port = address.rpartition(":")

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            await asyncio.gather(_carry(reader, far_writer, delay_s), _carry(far_reader, writer, delay_s))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while data := await reader.read(_CHUNK):
            loop.call_later(delay_s, _deliver, writer, data)
    loop.call_later(delay_s, writer.close)


def _deliver(writer: asyncio.StreamWriter, data: bytes) -> None:
    if not writer.is_closing():
        writer.write(data)
