"""Runs a target worker without Ray: `python -m services.target --model DIR --listen HOST:PORT`."""

import sys

from gammaray.config import TargetSettings
from services.process.main import run


def main() -> int:
    """Read the settings, serve until a signal, return the exit status."""
    # The worker is imported late, so that a wrong option is reported before the model libraries are loaded.
    return run("services.target", TargetSettings, "services.target.worker:TargetWorker")


if __name__ == "__main__":
    sys.exit(main())
