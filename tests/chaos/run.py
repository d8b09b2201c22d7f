"""A run: troubles one after the other under load, and what each client got meanwhile."""

import asyncio
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from tests.chaos.clients import Clients
from tests.chaos.load import asks, reference, streams
from tests.chaos.spans import Measured, Span, line, longest_pause, measured, progress, result_of
from tests.chaos.stage import Done, Trouble

CALM_S = (0.1, 1.0)
MAX_TRACEBACKS = 3
_RECORD = re.compile(r"^(?=[A-Z]+ \d{4}-)", re.MULTILINE)  # the start of a record in a log of Ray Serve


@dataclass(frozen=True)
class Options:
    seconds: float = 300.0  # after which no further trouble begins
    seed: int = 0  # of the order of troubles, and of the pauses between them
    streams: int = 14  # clients over gRPC
    over_http: int = 4  # clients over HTTP
    max_tokens: int = 200  # of each completion
    # Of each request; half of it later every stream must have gone on after a trouble.
    deadline_s: float = 120.0
    may_fail: bool = False  # whether a typed error may end a request
    resume_s: float | None = None  # see `Clients`


async def run(stage: Any, options: Options, troubles: Iterable[Trouble]) -> Measured:
    """Have troubles befall a stage under load until there are no more, or the time is up."""
    say, wanted = partial(print, flush=True), asks(options.streams, options.max_tokens)
    say(f"{options.streams} streams over gRPC, {options.over_http} over HTTP; first plain, undisturbed ...")
    expected = await reference(stage.grpc.partition(",")[0], wanted)
    limits = options.deadline_s, options.over_http, options.may_fail, options.resume_s
    clients = Clients(stage.grpc, stage.http, streams(wanted, stage.ways), expected, *limits)
    clients.start()
    spans, rng = list[Span](), random.Random(options.seed)
    await progress(clients, time.monotonic())
    start = time.monotonic()
    await asyncio.sleep(3.0)
    usual_pause_s = longest_pause(clients, start, time.monotonic())
    for trouble in troubles:
        if time.monotonic() - start > options.seconds and spans:
            break
        await asyncio.sleep(rng.uniform(*CALM_S))
        spans.append(await _carry_out(stage, trouble, clients))
        say(f"{spans[-1].began - start:6.1f} s  {line(result_of(spans[-1], clients))}")
    seconds = time.monotonic() - start
    await clients.end()
    found = measured(spans, clients, seconds, usual_pause_s)
    if found.violations:
        print(tracebacks(), file=sys.stderr)
    return found


async def _carry_out(stage: Any, trouble: Trouble, clients: Clients) -> Span:
    def last() -> Span:
        began = time.monotonic()
        with trouble.during(stage) as done:
            time.sleep(trouble.seconds)
            ended = time.monotonic()
        done = done or Done()
        return Span(trouble.name + done.more, began, ended, done.killed)

    span = await asyncio.to_thread(last)
    span.back = await progress(clients, span.ended)
    return span


@contextmanager
def complaints() -> Iterator[int]:
    """Keep the standard error of a cluster, which tells of every death; print its end if something fails."""
    with TemporaryFile("w+") as file:
        try:
            yield file.fileno()
        except BaseException:
            file.seek(0)
            print(file.read()[-4000:], file=sys.stderr)
            raise


def tracebacks() -> str:
    """Return the last exceptions in the logs of this machine's clusters, whose directories end with them."""
    logs = Path(tempfile.gettempdir()).glob("gammaray-*/ray/session_latest/logs/serve/*.log")
    records = [record for log in logs for record in _RECORD.split(log.read_text(errors="replace"))]
    return "\n".join([record for record in records if "Traceback" in record][-MAX_TRACEBACKS:])
