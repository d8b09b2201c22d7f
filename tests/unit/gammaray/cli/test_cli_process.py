"""The `gammaray` command in a process of its own: signals and pipes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import gammaray
from tests.support.sdk_helpers import (
    WAIT_S,
    ScriptedService,
    endless,
    serve_in_thread,
)

ROOT = Path(gammaray.__file__).parents[1]


def run_module(*arguments, cwd=ROOT, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "gammaray", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def test_interrupt_cancels_on_the_server_and_is_exit_code_130():
    service = ScriptedService(endless)
    with serve_in_thread(service) as address:
        process = run_module("generate", "Hi", "-a", address)
        try:
            assert process.stdout.read(3) == b"xxx"
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
        assert service.cancelled.wait(WAIT_S)
    assert process.returncode == 130
    assert b"Traceback" not in stderr


def test_closed_pipe_ends_quietly():
    service = ScriptedService(endless)
    with serve_in_thread(service) as address:
        process = run_module("generate", "Hi", "-a", address)
        try:
            assert process.stdout.read(1) == b"x"
            process.stdout.close()
            assert process.wait(WAIT_S) == 1
        finally:
            process.kill()
        assert b"Traceback" not in process.stderr.read()
        assert service.cancelled.wait(WAIT_S)
