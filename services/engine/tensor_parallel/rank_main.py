"""A rank other than 0: `python -m services.engine.tensor_parallel.rank_main FD RANK`, started by rank 0.

Runs the orders received through the pipe. When the pipe is closed it exits immediately, even during a step.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from gammaray.errors import GammarayError
from services.engine.core.batch import SequenceInput
from services.engine.engine import Engine
from services.engine.tensor_parallel.ranks import READY, STARTED, RankSpec, join_group

_Order = tuple[Sequence[tuple[str, tuple[Any, ...]]], Sequence[SequenceInput]]


def main(descriptor: int, rank: int) -> None:
    """Join the group, load the model, and run orders."""
    from services.engine.tensor_parallel.engine import build_rank

    pipe: Connection[Any, Any] = Connection(descriptor)
    spec: RankSpec = pipe.recv()
    orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, spec, orders), name="orders", daemon=True).start()
    pipe.send(STARTED)
    join_group(spec, rank)
    engine = build_rank(spec, Engine)
    pipe.send(READY)
    while True:
        operations, feeds = orders.get()  # the reader thread ends the process when the pipe is closed
        follow(engine, operations, feeds)


def follow(
    engine: Engine, operations: Sequence[tuple[str, tuple[Any, ...]]], feeds: Sequence[SequenceInput]
) -> None:
    """Apply rank 0's cache operations to this rank's caches, and run the step.

    A step that rank 0 refuses is refused here for the same reason, and the error is ignored.
    """
    for name, arguments in operations:
        getattr(engine, name)(*arguments)
    try:
        engine.step(feeds)
    except (GammarayError, ValueError):
        pass


def _read(pipe: Connection[Any, Any], spec: RankSpec, orders: queue.SimpleQueue[_Order]) -> None:
    """Queue the orders; end the process when rank 0 has ended, whatever it is waiting for."""
    while True:
        try:
            orders.put(pipe.recv())
        except (EOFError, OSError):
            spec.forget_meeting()
            os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
