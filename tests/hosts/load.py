"""Streams of a client on one host, each compared with plain decoding, and their pauses.

    python -m tests.hosts.load --expect FILE ADDRESS                       write what plain decoding says
    python -m tests.hosts.load --expect FILE --seconds S ADDRESS ...       stream, and print a report as JSON

Each address gets streams. A pause is counted from a token to the next one, from the request to the first, or
from the last to the end, by the machine's monotonic clock, which all hosts share.
"""

import argparse
import asyncio
import json
import secrets
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from gammaray import AsyncClient, GammarayError
from tests.chaos.load import Ask, Heard, asks

STREAMS_EACH = 2
_MAX_TOKENS = 96
_TIMEOUT_S = 200.0
_LONG_S = 0.25
"""Shorter pauses are not reported."""


async def expected(address: str) -> list[tuple[int, ...]]:
    """Return the tokens of plain decoding."""
    async with AsyncClient(address) as client:
        said = [await Heard().over_grpc(client, ask, gamma=0, timeout_s=_TIMEOUT_S) for ask in _asks()]
    return [one.token_ids for one in said]


async def report(addresses: list[str], wanted: list[tuple[int, ...]], seconds: float) -> dict[str, Any]:
    """Stream for some seconds; return counts, and the pauses of the streams of each address."""
    counts: Counter[str] = Counter()
    pauses: dict[str, list[tuple[float, float]]] = {address: [] for address in addresses}
    ends = time.monotonic() + seconds

    async def stream(client: AsyncClient, address: str, number: int) -> None:
        while time.monotonic() < ends:
            number = (number + 1) % len(wanted)
            heard, begun = Heard(), time.monotonic()
            told = wanted[number]
            try:
                await heard.over_grpc(
                    client, _asks()[number], timeout_s=_TIMEOUT_S, cache_salt=secrets.token_hex(8)
                )
            except GammarayError as error:
                counts[f"error: {type(error).__name__}: {str(error)[:200]}"] += 1
                told = told[: len(heard.token_ids)]
            counts["completions"] += 1
            counts["tokens"] += len(heard.token_ids)
            counts["wrong"] += heard.token_ids != told
            times = [begun, *heard.arrivals, time.monotonic()]
            pauses[address] += [(a, b - a) for a, b in pairwise(times) if b - a > _LONG_S]

    clients = [AsyncClient(address) for address in addresses]
    try:
        await asyncio.gather(
            *(
                stream(client, address, index * STREAMS_EACH + number)
                for index, (client, address) in enumerate(zip(clients, addresses, strict=True))
                for number in range(STREAMS_EACH)
            )
        )
    finally:
        for client in clients:
            await client.close()
    return {**counts, "pauses": pauses, "seconds": seconds}


def _asks() -> list[Ask]:
    return [ask for ask in asks(12, _MAX_TOKENS) if not ask.grammar]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("addresses", nargs="+")
    parser.add_argument("--expect", type=Path, required=True)
    parser.add_argument("--seconds", type=float)
    options = parser.parse_args()
    if options.seconds is None:
        options.expect.write_text(json.dumps(asyncio.run(expected(options.addresses[0]))))
        return
    wanted = [tuple(token_ids) for token_ids in json.loads(options.expect.read_text())]
    print(json.dumps(asyncio.run(report(options.addresses, wanted, options.seconds))))


if __name__ == "__main__":
    main()
