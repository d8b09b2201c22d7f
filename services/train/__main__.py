"""`python -m services.train`: reads a TrainTask as JSON from stdin and writes a JSON object per line.

    {"doing": "..."}                 a line on progress
    {"done": true}                   the last line; false: it was stopped, and the same task continues
    {"error": {"type": ..., ...}}    the last line after a failure; the exit code is then 1

SIGINT and SIGTERM save the state and stop.
"""

from __future__ import annotations

import signal
import sys
import threading

import torch

from gammaray.errors import GammarayError
from gammaray.qualify.training import TrainTask
from services.process.json_lines import described, open_answers, write_line
from services.train.run import run


def main() -> int:
    """Train and return the exit code."""
    answers = open_answers()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        task = TrainTask.model_validate_json(sys.stdin.read())
        done = run(task, lambda line: write_line(answers, {"doing": line}), stop.is_set)
        write_line(answers, {"done": done})
    except GammarayError as error:
        write_line(answers, {"error": described(error)})
        return 1
    except torch.OutOfMemoryError as error:
        message = str(error).splitlines()[0]
        write_line(answers, {"error": {"type": "ResourceExhaustedError", "message": message}})
        return 1
    except BrokenPipeError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
