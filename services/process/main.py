"""Runs a worker as a process: command-line options derived from its settings, signals, exit status."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

from gammaray.config import WorkerSettings, parse_adapters
from gammaray.demo_pair import resolve_model
from gammaray.engines import check_installed
from gammaray.errors import GammarayError, InvalidArgumentError
from gammaray.program.settings import parse_settings
from services.process.adapters import max_rank
from services.process.server import check_serving

_MODELS = ("model", "target", "head")
"""Settings that name a model; a directory that does not exist is refused before torch is imported."""

EXIT_BAD_SETTINGS = 2
EXIT_UNSUPPORTED_MODEL = 3


def run(
    prog: str, settings_class: type[WorkerSettings], worker: str, argv: Sequence[str] | None = None
) -> int:
    """Serve until SIGTERM or SIGINT.

    `worker` is `module:class`, imported after the options were validated, since it loads torch.

    Returns:
        0 after a drain, 1 when the drain lost blocks or the engine was lost, 2 for settings or files of
        a model that are invalid, 3 for a model that cannot be served.

    Raises:
        SystemExit: After `--help`.
    """
    try:
        settings, _ = parse_settings(settings_class, f"python -m {prog}", argv)
        check_installed(settings.engine, settings.device)
        check_serving(settings)
        for field in _MODELS:
            resolve_model(getattr(settings, field, ""), field=field)
        max_rank(parse_adapters(getattr(settings, "lora", "")))
    except InvalidArgumentError as error:
        print(f"python -m {prog}: {error}", file=sys.stderr)
        return EXIT_BAD_SETTINGS
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    serving = _serve(prog, resolve_name(worker)(settings))
    try:
        import uvloop
    except ImportError:
        return asyncio.run(serving)
    return int(uvloop.run(serving))


async def _serve(prog: str, worker: Any) -> int:
    from services.engine.core.errors import InvalidModelError, UnsupportedModelError

    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    starting = asyncio.create_task(worker.start())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        # The model is still loading: nothing was served, and the loading thread ends with the process.
        return 0
    try:
        address = starting.result()
    except GammarayError as error:
        await worker.stop()
        print(f"python -m {prog}: {error}", file=sys.stderr)
        is_unsupported = isinstance(error, UnsupportedModelError) and not isinstance(error, InvalidModelError)
        return EXIT_UNSUPPORTED_MODEL if is_unsupported else EXIT_BAD_SETTINGS
    print(f"listening {address}", flush=True)
    ended = asyncio.create_task(worker.ended.wait())
    await asyncio.wait({stopping, ended}, return_when=asyncio.FIRST_COMPLETED)
    is_clean = await worker.stop()
    if worker.engine.is_alive:
        # A thread that is stuck in a device's driver could keep the interpreter from ending, too.
        logging.shutdown()
        os._exit(1)
    return 0 if is_clean and not ended.done() else 1
