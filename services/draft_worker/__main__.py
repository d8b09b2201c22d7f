"""Runs a draft worker without Ray: `python -m services.draft_worker --model DIR --listen HOST:PORT`."""

import sys

from gammaray.config import DraftSettings
from services.process.main import run

if __name__ == "__main__":
    # The worker is imported late, so that a wrong option is reported before the model libraries are loaded.
    sys.exit(run("services.draft_worker", DraftSettings, "services.draft_worker.worker:DraftWorker"))
