"""Runs checks in a client's own environment, which has nothing of gammaray."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

QUESTION = "What is the weather in Oslo?"

Check = Callable[[Any, str], None]
_checks: list[Check] = []


class Weather(BaseModel):
    """What is asked for; bounded, so that a tiny model comes to its end."""

    city: Literal["Oslo", "Rome"]
    degrees: int = Field(ge=-40, le=50)
    words: list[Literal["sun", "rain"]] = Field(max_length=3)


def check(function: Check) -> Check:
    """Add a check, which gets a client and the model's name and raises if something is wrong."""
    _checks.append(function)
    return function


def demand(holds: object, seen: object = None) -> None:
    """Raise AssertionError with what was seen, unless `holds`."""
    if not holds:
        raise AssertionError(f"unexpected: {seen!r}")


def report(make_client: Callable[[str], Any]) -> None:
    """Run each check; write why it failed, or null, to a file.

    The command line has the address (host:port), the name of the model and the path of the file.

    Args:
        make_client: Gets the base address of the API.
    """
    address, model, path = sys.argv[1:]
    client = make_client(f"http://{address}/v1")
    outcomes: dict[str, str | None] = {}
    for function in _checks:
        try:
            function(client, model)
        except Exception as error:
            traceback.print_exc()
            outcomes[function.__name__] = f"{type(error).__name__}: {error}"
        else:
            outcomes[function.__name__] = None
    Path(path).write_text(json.dumps(outcomes))
