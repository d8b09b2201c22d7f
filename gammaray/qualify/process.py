"""Runs the measurements in a separate process, so that this one does not import torch, and survives a model
that exhausts memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from pydantic import BaseModel

from gammaray import errors
from gammaray.errors import FailedPreconditionError, GammarayError, InternalError, InvalidArgumentError
from gammaray.qualify.measured import PairFacts, QualifyTask

_NEEDED = ("services", "torch", "transformers")
STOP_TIMEOUT_S = 10.0
"""How long a process may take to stop before it is killed."""

COMMAND = (sys.executable, "-m", "services.qualify")


def measure_pairs(
    task: QualifyTask, doing: Callable[[str], None], command: tuple[str, ...] = COMMAND
) -> list[PairFacts]:
    """Run the measurements and return them, one per candidate, in order.

    Args:
        task: What to measure.
        doing: Called with a description of each step.
        command: Command of the measuring process.

    Raises:
        InvalidArgumentError: The model does not exist, or does not support the task.
        FailedPreconditionError: The packages of a worker are not installed.
        GammarayError: A model failed, or the process died.
    """
    pairs: list[PairFacts] = []
    for key, value in answers(task, command, "measurement"):
        if key == "doing":
            doing(value)
        elif key == "pair":
            pairs.append(PairFacts.model_validate(value))
    if len(pairs) != len(task.drafts) + len(task.heads):
        raise InternalError("the measurement process ended with status 0")
    return pairs


def answers(
    task: BaseModel, command: tuple[str, ...], name: str, stop_timeout_s: float = STOP_TIMEOUT_S
) -> Iterator[tuple[str, Any]]:
    """Run a process that reads a task as JSON and writes JSON objects, one per line; yield their items.

    Args:
        task: The task.
        command: Command of the process.
        name: Of the process, for messages.
        stop_timeout_s: How long it may take to stop, if the caller stops reading, before it is killed.

    Raises:
        FailedPreconditionError: The packages of a worker are not installed.
        GammarayError: The process reported it, wrote something else, or died.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise FailedPreconditionError(
            f"models need packages that are not installed ({', '.join(missing)}): "
            "pip install 'gammaray[worker]'"
        )
    with _started(command, stop_timeout_s) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdin:
                process.stdin.write(task.model_dump_json())
        except BrokenPipeError:
            pass  # it ended before reading; its exit status is checked below
        for line in process.stdout:
            for key, value in _parsed(line).items():
                if key == "error":
                    raise _error(value)
                yield key, value
        status = process.wait()
    if status != 0:
        why = (
            f"was killed by signal {-status} (possibly out of memory)"
            if status < 0
            else f"ended with status {status}"
        )
        raise InternalError(f"the {name} process {why}")


@contextmanager
def _started(command: tuple[str, ...], stop_timeout_s: float) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8")
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(stop_timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _parsed(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InternalError(f"the measurement process wrote {line[:80]!r}")
    return found


def _error(value: dict[str, str]) -> GammarayError:
    if value["type"] == "InvalidArgumentError":
        return InvalidArgumentError(value["field"], value["got"], value["allowed"])
    known = {name: getattr(errors, name) for name in errors.__all__ if name.endswith("Error")}
    # Error classes of the engine are not known here.
    cls: type[GammarayError] = known.get(value["type"], GammarayError)
    return cls(value["message"])
