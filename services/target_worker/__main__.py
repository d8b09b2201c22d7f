"""Runs a target worker without Ray: `python -m services.target_worker --model DIR --listen HOST:PORT`."""

import sys

from gammaray.config import TargetSettings
from services.process.main import run

if __name__ == "__main__":
    # The worker is imported late, so that a wrong option is reported before the model libraries are loaded.
    sys.exit(run("services.target_worker", TargetSettings, "services.target_worker.worker:TargetWorker"))
