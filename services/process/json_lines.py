"""Processes that the command line starts: one JSON object per line on what was stdout.

`gammaray.qualify.process` reads them.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO

from transformers.utils import logging as transformers_logging

from gammaray.errors import GammarayError, InvalidArgumentError


def open_answers() -> TextIO:
    """Return what was stdout; what libraries print goes to stderr from now on, apart from the JSON lines."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # transformers does not type these two.
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return answers


def described(error: GammarayError) -> dict[str, str]:
    """Return an error as the JSON value from which the starting process makes it again."""
    if isinstance(error, InvalidArgumentError):
        return {
            "type": "InvalidArgumentError",
            "field": error.field,
            "got": error.got,
            "allowed": error.allowed,
        }
    return {"type": type(error).__name__, "message": str(error)}


def write_line(answers: TextIO, line: dict[str, Any]) -> None:
    """Write one JSON object."""
    answers.write(json.dumps(line) + "\n")
    answers.flush()
