"""The training process is started again when it ends, unless it cannot train, and ends with its worker."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from gammaray.errors import InvalidArgumentError
from gammaray.program.failures import failure_of
from services.learning.process import CANNOT_TRAIN, TrainingProcess
from services.train.live.__main__ import train_until
from tests.support.learning_helpers import new_head, tiny_target
from tests.support.small_files import no_descriptors
from tests.support.workers.redis_helpers import wait_until


def test_process_starts_once_there_are_descriptors_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("services.learning.process.FIRST_WAIT_S", 0.05)
    noted = tmp_path / "noted"
    with no_descriptors():
        process = TrainingProcess([sys.executable, "-c", "import sys; open(sys.argv[1], 'w')", str(noted)])
        wait_until(lambda: any("cannot start" in message for message in caplog.messages))
    wait_until(noted.exists)
    process.close()


def test_what_cannot_be_trained_is_not_started_again(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("services.learning.process.FIRST_WAIT_S", 0.05)
    note = "import sys; open(sys.argv[1], 'a').write('x'); sys.exit(int(sys.argv[2]))"
    for status in (CANNOT_TRAIN, 1):
        noted = tmp_path / str(status)
        process = TrainingProcess([sys.executable, "-c", note, str(noted), str(status)])
        wait_until(lambda noted=noted: noted.exists())
        time.sleep(0.5)
        assert (len(noted.read_text()) == 1) is (status == CANNOT_TRAIN)
        process.close()
    given_up = [one for one in caplog.messages if "nothing is trained" in one]
    assert len(given_up) == 1


def test_drafter_that_cannot_be_trained_ends_with_that_status(tmp_path):
    target = tiny_target(tmp_path / "target")
    head = new_head(tmp_path / "head", target)
    config = json.loads((head / "config.json").read_text())
    config["norm_output"] = True
    (head / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgumentError, match=r"allowed: one that can be trained \(init: got") as failed:
        train_until(lambda: False, pytest.fail, tmp_path / "learn", str(target), str(head))
    status, message = failure_of(failed.value)
    assert status == CANNOT_TRAIN
    assert str(head) in message


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_signal_ends_it_in_the_middle_of_a_step(tmp_path, number):
    code = """
import runpy
import services.train.live.trainer as trainer

def train(*_):
    print("in a step", flush=True)
    sum(range(10 ** 12))  # an operation in C, which no Python code interrupts

trainer.Trainer = train
runpy.run_module("services.train.live", run_name="__main__")
"""
    given = f"--folder {tmp_path} --target - --drafter - --parent {os.getpid()}"
    command = [sys.executable, "-c", code, *given.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "in a step\n"
        process.send_signal(number)
        try:
            assert process.wait(timeout=60) == -number  # at idle priority, it waits for other processes
        finally:
            process.kill()
