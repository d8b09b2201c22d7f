"""Streams of a client on one host, each compared with plain decoding, and when their tokens came.

    python -m tests.hosts.load --expect FILE ADDRESS                       write what plain decoding says
    python -m tests.hosts.load --expect FILE --seconds S ADDRESS ...       stream, and print a report as JSON

Each address gets streams. Times are of the machine's monotonic clock, which all hosts share.
"""

import argparse
import asyncio
import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

from gammaray import RetryPolicy
from tests.chaos.chaos_drafters import Way
from tests.chaos.clients import Clients
from tests.chaos.load import Said, asks, reference, streams

STREAMS_EACH = 2
_MAX_TOKENS = 96
_TIMEOUT_S, _RESUME_S = 200.0, RetryPolicy().resume_s
_ASKS = [ask for ask in asks(12, _MAX_TOKENS) if not ask.grammar]
_WAYS = [Way("as the cluster likes", (), {})]


async def report(addresses: list[str], said: list[Said], seconds: float) -> list[dict[str, Any]]:
    """Stream for some seconds; return what the streams of each address got."""
    expected = dict(zip(_ASKS, said, strict=True))
    wanted = streams(_ASKS, _WAYS)
    clients = [
        Clients(
            address, "", wanted[start : start + STREAMS_EACH], expected, _TIMEOUT_S, 0, resume_s=_RESUME_S
        )
        for start, address in zip(range(0, len(wanted), STREAMS_EACH), addresses, strict=False)
    ]
    for one in clients:
        one.start()
    await asyncio.sleep(seconds)
    await asyncio.gather(*(one.end() for one in clients))
    return [
        {
            "completions": len(one.histories),
            "wrong": one.violations(),
            "errors": [history.error for history in one.histories if history.error],
            "arrivals": one.arrivals,
        }
        for one in clients
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("addresses", nargs="+")
    parser.add_argument("--expect", type=Path, required=True)
    parser.add_argument("--seconds", type=float)
    options = parser.parse_args()
    if options.seconds is None:
        said = asyncio.run(reference(options.addresses[0], _ASKS))
        options.expect.write_text(json.dumps([astuple(said[ask]) for ask in _ASKS]))
        return
    known = [Said(tuple(token_ids), text) for token_ids, text in json.loads(options.expect.read_text())]
    print(json.dumps(asyncio.run(report(options.addresses, known, options.seconds))))


if __name__ == "__main__":
    main()
