"""`python -m services.train`: reads a TrainTask as JSON from stdin and writes a JSON object per line.

    {"doing": "..."}                 a line on progress
    {"done": true}                   the last line; false: it was stopped, and the same task continues

SIGINT and SIGTERM save the state and stop.
"""

from __future__ import annotations

import signal
import sys
import threading

from gammaray.qualify.training import TrainTask
from services.process.json_lines import Report, serve_task
from services.train.run import run


def main() -> int:
    """Train and return the exit code."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())

    def train(task: str, report: Report) -> None:
        parsed = TrainTask.model_validate_json(task)
        report("done", run(parsed, lambda line: report("doing", line), stop.is_set))

    return serve_task(train)


if __name__ == "__main__":
    sys.exit(main())
