"""Python code in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_code(
    code: str, *arguments: str, env: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run code in the repository; return what it printed. It must end with exit code 0."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    return done
