"""A target worker that learns: its training process may be killed at any time, and ends with it."""

import time

import psutil
import pytest

from gammaray.types import SamplingParams
from gammaray.v1 import target_service_pb2 as pb
from gammaray.wire.blocks import proposal_from_proto
from tests.support.learning_helpers import PROMPTS, new_head, tiny_target
from tests.support.workers.redis_helpers import wait_until
from tests.support.workers.service_helpers import worker_process
from tests.support.workers.workers_helpers import Driver, Link

pytestmark = [pytest.mark.integration, pytest.mark.slow]

COUNT, PROMPT = 100, PROMPTS[0]


class Headed(Driver):
    """Lets the worker's head draft in every cycle."""

    async def generate(self, count):
        self.tokens = list(self.prompt)
        while len(self.tokens) < len(self.prompt) + count:
            head = pb.HeadDraft(gamma=3)
            result = await self._feed(self.target, pb.VerifyBlock, head=head)
            drafted = proposal_from_proto(result.drafted, 2**31)
            self.tokens += [drafted.token_ids[node] for node in result.verdict.accepted_path]
            self.tokens.append(result.verdict.next_token_id)
        return self.tokens[len(self.prompt) :][:count]


def training(worker):
    """The training processes of a worker: none for a moment after one has ended."""
    try:
        found = psutil.Process(worker.pid).children(recursive=True)
        return [one for one in found if "services.train.live" in " ".join(one.cmdline())]
    except psutil.NoSuchProcess:
        return []


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
            run = Headed(link, None, PROMPT, params, session_id=f"s {seed} {time.monotonic()}")
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
        worker.terminate()
        worker.wait(60)
        wait_until(lambda: not psutil.pid_exists(second.pid))


def test_training_process_of_a_killed_worker_ends(tmp_path):
    target = tiny_target(tmp_path / "target")
    head = new_head(tmp_path / "head", target)
    with worker_process("target", str(target), "--head", str(head), "--learn", str(tmp_path / "learn")) as (
        worker,
        _,
    ):
        wait_until(lambda: training(worker))
        (process,) = training(worker)
        worker.kill()
        worker.wait(30)
        wait_until(lambda: not psutil.pid_exists(process.pid))
