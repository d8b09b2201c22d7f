"""Workers whose device is lost or stuck leave: unhealthy, deregistered, ended; after other errors not."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import Tensor

from gammaray.errors import UnavailableError
from services.engine.core.errors import EngineLostError
from services.scheduling import batcher
from services.streaming import engine_thread
from tests.support.engine_helpers import random_tokens
from tests.support.workers.workers_helpers import ANSWER_TIMEOUT_S, Link, block_of, running

pytestmark = pytest.mark.integration

PROMPT = random_tokens(12, seed=3)
UNAVAILABLE, INTERNAL = 14, 13
LEAVES_WITHIN_S = 20.0
SERVING = health_pb2.HealthCheckResponse.ServingStatus.SERVING

# tests/unit/services/engine/core/test_device.py has the errors of either kind.
LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
ORDINARY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def break_steps(worker: Any, step: Callable[..., Any]) -> None:
    engine = worker.engine.scheduler.engine
    engine.step = engine.chain = step


async def status(link: Link) -> Any:
    answer = await health_pb2_grpc.HealthStub(link.channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    return answer.status


async def assert_left(link: Link, worker: Any) -> None:
    """The worker says that it ended, fails its checks, and its port is closed."""
    await asyncio.wait_for(worker.ended.wait(), LEAVES_WITHIN_S)
    with pytest.raises(UnavailableError):
        worker.check()
    with pytest.raises(grpc.aio.AioRpcError):
        await status(link)


class LateFault(Tensor):
    """Logits of a device whose error arrives when they are first read."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise LOST


def lose(*_: Any, **__: Any) -> Any:
    raise LOST


@pytest.mark.parametrize(
    ("role", "arrives"), [("target", "at once"), ("draft", "at once"), ("target", "late"), ("draft", "last")]
)
async def test_error_that_loses_the_device_ends_the_worker(
    role, arrives, model, redis, redis_server, monkeypatch
):
    """It may arrive with the logits or, as kernels run after their launch, with the wait for the device."""
    async with running(role, model, redis_url=redis_server.url) as (link, worker):
        right = worker.engine.scheduler.engine.step

        def late(*given: Any, **options: Any) -> Any:
            return [one.as_subclass(LateFault) for one in right(*given, **options)]

        assert await status(link) == SERVING
        assert await redis.keys(f"gammaray:worker:{role}:*")
        if arrives == "last":
            monkeypatch.setattr(batcher, "wait_for_device", lose)
        else:
            break_steps(worker, lose if arrives == "at once" else late)
        answer = await link.ask(block_of(role, PROMPT))
        assert answer.error.code == UNAVAILABLE
        assert "the engine is lost" in answer.error.message
        await assert_left(link, worker)
        assert not await redis.keys(f"gammaray:worker:{role}:*")


async def test_ordinary_error_fails_its_blocks_alone(model, monkeypatch):
    monkeypatch.setattr(engine_thread, "STUCK_AFTER_S", 0.0)
    async with running("target", model) as (link, worker):
        scheduler = worker.engine.scheduler
        engine, unbounded = scheduler.engine, scheduler.step_timeout_s
        right = engine.step

        def step(*_: Any, **__: Any) -> Any:
            engine.step = right
            raise ORDINARY

        break_steps(worker, step)
        scheduler.step_timeout_s = 0.01
        assert (await link.ask(block_of("target", PROMPT))).error.code == INTERNAL
        await asyncio.sleep(0.1)
        assert worker.engine.why_stuck() == "", "it is idle"
        scheduler.step_timeout_s = unbounded
        answer = await link.ask(block_of("target", PROMPT, session_id="t"))
        assert answer.WhichOneof("outcome") == "verdict"
        assert await status(link) == SERVING
        worker.check()


async def test_forward_time_contains_the_wait_for_the_device(model, monkeypatch):
    async with running("target", model) as (link, _):
        monkeypatch.setattr(batcher, "wait_for_device", lambda device: time.sleep(0.25))
        answer = await link.ask(block_of("target", PROMPT))
        assert answer.timing.forward_us >= 250_000


class Stuck:
    """Forwards that do not return until the test ends, as those that wait for a dead process."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def step(self, *_: Any, **__: Any) -> Any:
        self.began.set()
        self.may_end.wait(ANSWER_TIMEOUT_S)
        raise EngineLostError("the test ends")

    async def runs(self) -> None:
        assert await asyncio.to_thread(self.began.wait, ANSWER_TIMEOUT_S)


def find_a_dead_process() -> None:
    raise EngineLostError("process 7 of the engine ended with status -9")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["one of its processes is dead", "a step takes too long"])
async def test_worker_leaves_while_its_engine_is_stuck(how, model, monkeypatch):
    monkeypatch.setattr(engine_thread, "STUCK_AFTER_S", 0.2)
    stuck = Stuck()
    async with running("target", model) as (link, worker):
        break_steps(worker, stuck.step)
        await link.send([block_of("target", PROMPT)])
        await stuck.runs()
        if how == "one of its processes is dead":
            worker.engine.scheduler.check = find_a_dead_process
        else:
            worker.engine.scheduler.step_timeout_s = 0.1
        await assert_left(link, worker)
        assert worker.engine.is_alive
        began = time.monotonic()
        await worker.stop()
        assert time.monotonic() - began < LEAVES_WITHIN_S, "it does not wait for the thread"
        stuck.may_end.set()


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_worker_whose_steps_have_a_bound_answers_during_one(role, model):
    stuck = Stuck()
    async with running(role, model) as (link, worker):
        break_steps(worker, stuck.step)
        await link.send([block_of(role, PROMPT)])
        await stuck.runs()
        with pytest.raises(grpc.aio.AioRpcError):
            await link.info(timeout=0.5)
        worker.engine.scheduler.step_timeout_s = 60.0
        assert (await link.info(timeout=ANSWER_TIMEOUT_S)).num_queued == 1
        assert not stuck.may_end.is_set()
        stuck.may_end.set()


async def test_idle_worker_whose_engine_is_lost_leaves(model):
    async with running("target", model) as (link, worker):
        assert await status(link) == SERVING
        worker.engine.scheduler.check = find_a_dead_process
        await assert_left(link, worker)
        assert not worker.engine.is_alive


@pytest.mark.slow
async def test_worker_with_a_slow_step_stays(model, monkeypatch):
    """Only a scheduler with `step_timeout_s` bounds the time of a step."""
    monkeypatch.setattr(engine_thread, "STUCK_AFTER_S", 0.0)
    async with running("target", model) as (link, worker):
        right = worker.engine.scheduler.engine.step

        def step(*given: Any, **options: Any) -> Any:
            time.sleep(2.5)  # two periods of the watch
            return right(*given, **options)

        break_steps(worker, step)
        assert (await link.ask(block_of("target", PROMPT))).WhichOneof("outcome") == "verdict"
        assert await status(link) == SERVING
        assert worker.engine.why_stuck() == ""
