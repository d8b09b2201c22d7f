"""The `gammaray` command in a process of its own: signals and pipes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gammaray
from tests.support.sdk_helpers import WAIT_S, ScriptedService, endless, serve_in_thread

ROOT = Path(gammaray.__file__).parents[1]


@pytest.mark.parametrize(("is_interrupted", "code"), [(True, 130), (False, 1)], ids=["interrupt", "pipe"])
def test_interrupt_and_closed_pipe_cancel_on_the_server_and_end_quietly(is_interrupted, code):
    service = ScriptedService(endless)
    with serve_in_thread(service) as address:
        process = subprocess.Popen(
            [sys.executable, "-m", "gammaray", "generate", "Hi", "-a", address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        try:
            assert process.stdout.read(3) == b"xxx"
            if is_interrupted:
                process.send_signal(signal.SIGINT)
                _, stderr = process.communicate(timeout=WAIT_S)
            else:
                process.stdout.close()
                process.wait(WAIT_S)
                stderr = process.stderr.read()
        finally:
            process.kill()
        assert service.cancelled.wait(WAIT_S)
    assert process.returncode == code
    assert b"Traceback" not in stderr
