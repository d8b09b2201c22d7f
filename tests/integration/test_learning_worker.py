"""A target worker that learns: its training process may be killed at any time, and ends with it."""

import sys
import time

import psutil
import pytest

from gammaray.learning.folder import LearningFolder
from gammaray.types import SamplingParams
from tests.support.dying_trainer import NONE, START, STEPS
from tests.support.learning_helpers import PROMPTS, begin, end, learning, new_head, run_for, tiny_target
from tests.support.workers.redis_helpers import wait_until
from tests.support.workers.service_helpers import worker_process
from tests.support.workers.workers_helpers import Driver, Headed, Link

pytestmark = [pytest.mark.integration, pytest.mark.slow]

COUNT, PROMPT = 100, PROMPTS[0]


def training(worker):
    """The training processes of a worker: none for a moment after one has ended."""
    try:
        found = psutil.Process(worker.pid).children(recursive=True)
        return [one for one in found if "services.train.live" in " ".join(one.cmdline())]
    except psutil.NoSuchProcess:
        return []


@pytest.mark.nightly
async def test_serving_goes_on_when_the_training_is_killed(tmp_path):
    target = tiny_target(tmp_path / "target")
    head = new_head(tmp_path / "head", target)
    options = ("--head", str(head), "--learn", str(tmp_path / "learn"))
    with worker_process("target", str(target), *options) as (worker, address):
        link = Link(address, "target")
        expected = {}

        async def serve(seed):
            params = SamplingParams(temperature=1.0, seed=seed)
            if seed not in expected:
                plain = Driver(link, None, PROMPT, params, session_id=f"plain {seed}")
                expected[seed] = await plain.generate(COUNT)
                await link.release(f"plain {seed}")
            run = Headed(link, None, PROMPT, params, gamma=3, session_id=f"s {seed} {time.monotonic()}")
            assert await run.generate(COUNT) == expected[seed]
            await link.release(run.session_id)

        try:
            for seed in range(4):
                await serve(seed)
            wait_until(lambda: training(worker))
            (first,) = training(worker)
            first.kill()
            await serve(12)
            wait_until(lambda: [one for one in training(worker) if one.pid != first.pid], timeout_s=60)
            (second,) = (one for one in training(worker) if one.pid != first.pid)
        finally:
            await link.close()
        worker.kill()
        worker.wait(30)
        wait_until(lambda: not psutil.pid_exists(second.pid))


NUM_TOKENS, LIMIT_S = 48, 240


@pytest.mark.nightly
def test_serving_never_notices_and_the_next_process_goes_on(tmp_path, monkeypatch):
    target = tiny_target(tmp_path / "target")
    drafter = new_head(tmp_path / "drafter", target)
    notes, folder = tmp_path / "notes", tmp_path / "learn"
    notes.write_text("")
    monkeypatch.setattr("services.learning.versions.PERIOD_S", 0.05)
    with learning(folder, target, drafter, monkeypatch) as scheduler:
        expected = {}
        for seed in range(16):  # no process trains: these are the streams that are learnt from
            plain = begin(scheduler, seed)
            expected[seed] = run_for(plain, NUM_TOKENS, gamma=0)
            end(plain)
    command = [sys.executable, "-m", "tests.support.dying_trainer", str(notes), str(folder)]
    with learning(folder, target, drafter, monkeypatch, [*command, str(target), str(drafter)]) as scheduler:
        store, rounds, ends = LearningFolder(folder).store("open"), 0, time.monotonic() + LIMIT_S

        def died_at():
            return notes.read_text().splitlines()

        while NONE not in died_at() or not store.read().stable:
            assert time.monotonic() < ends, (died_at(), store.read())
            seed, rounds = rounds % 16, rounds + 1
            run = begin(scheduler, seed)
            assert run_for(run, NUM_TOKENS) == expected[seed], died_at()
            end(run)
            for version in store.read().versions:
                held = {path.name for path in store.directory(version.number).iterdir()}
                assert held == {"model.safetensors", "config.json", "gammaray.json", "README.md"}
                assert "cannot be loaded" not in version.reason
        assert died_at() == [START, *(name for name, *_ in STEPS), NONE]
