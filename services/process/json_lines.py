"""Processes that the command line starts: a task as JSON on stdin, one JSON object per line on stdout.

`gammaray.qualify.process` starts them and reads the lines. The last line after a failure is
{"error": {"type": ..., ...}}, and the exit code is then 1.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from gammaray.errors import GammarayError, InvalidArgumentError

Report = Callable[[str, Any], None]
"""Writes an object with one key and its value."""


def serve_task(run: Callable[[str, Report], None]) -> int:
    """Run the task of stdin and return the exit code.

    Args:
        run: Called with the task's JSON and a function that writes a line. When the starting process has
            ended, that function raises BrokenPipeError.
    """
    # What libraries print goes to stderr from now on, apart from the JSON lines.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # transformers does not type these two.
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]

    def report(key: str, value: Any) -> None:
        answers.write(json.dumps({key: value}) + "\n")
        answers.flush()

    try:
        run(sys.stdin.read(), report)
    except GammarayError as error:
        report("error", _described(error))
        return 1
    except torch.OutOfMemoryError as error:
        report("error", {"type": "ResourceExhaustedError", "message": str(error).splitlines()[0]})
        return 1
    except (BrokenPipeError, KeyboardInterrupt):
        return 1
    return 0


def _described(error: GammarayError) -> dict[str, str]:
    if isinstance(error, InvalidArgumentError):
        fields = {"field": error.field, "got": error.got, "allowed": error.allowed}
        return {"type": "InvalidArgumentError", **fields}
    return {"type": type(error).__name__, "message": str(error)}
