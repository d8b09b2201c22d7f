"""The training process is started again when it ends, and ends with its worker."""

import sys

import psutil
import pytest

from services.learning.process import TrainingProcess
from tests.support.workers.redis_helpers import wait_until


@pytest.fixture
def running(tmp_path, monkeypatch):
    monkeypatch.setattr("services.learning.process.FIRST_WAIT_S", 0.05)
    note = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(60)"
    process = TrainingProcess([sys.executable, "-c", note, str(tmp_path / "pids")])
    yield lambda: [int(line) for line in (tmp_path / "pids").read_text().split()], process
    process.close()


def test_killed_process_starts_again_and_close_ends_it(tmp_path, running):
    pids, process = running
    wait_until(lambda: (tmp_path / "pids").exists() and len(pids()) == 1)
    psutil.Process(pids()[0]).kill()
    wait_until(lambda: len(pids()) == 2)
    process.close()
    assert not any(psutil.pid_exists(pid) for pid in pids())
