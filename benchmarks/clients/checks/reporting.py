"""Runs checks in a client's own environment, which has nothing of gammaray."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def demand(holds: object, seen: object = None) -> None:
    """Raise AssertionError with what was seen, unless `holds`."""
    if not holds:
        raise AssertionError(f"unexpected: {seen!r}")


def report(checks: Sequence[Callable[[Any, str], None]], make_client: Callable[[str], Any]) -> None:
    """Run each check with a client and the model's name; write why it failed, or null, to a file.

    The command line has the address (host:port), the name of the model and the path of the file.

    Args:
        checks: They raise if something is wrong.
        make_client: Gets the base address of the API.
    """
    address, model, path = sys.argv[1:]
    client = make_client(f"http://{address}/v1")
    outcomes: dict[str, str | None] = {}
    for check in checks:
        try:
            check(client, model)
        except Exception as error:
            traceback.print_exc()
            outcomes[check.__name__] = f"{type(error).__name__}: {error}"
        else:
            outcomes[check.__name__] = None
    Path(path).write_text(json.dumps(outcomes))
