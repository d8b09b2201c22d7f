"""A step that fails, one block's error, and an engine that is lost."""

import asyncio
import random

import pytest
import torch

from gammaray.errors import InternalError
from gammaray.types import SamplingParams
from services.engine.core.errors import EngineLostError
from services.scheduling.tasks import NeedTokens
from services.streaming.engine_thread import EngineThread
from tests.support.vllm_helpers import Session, answers, ask, end, generate, outcomes, references


def sessions_of(lengths):
    rng = random.Random(0)
    return [
        Session([rng.randrange(4, 97) for _ in range(length)], SamplingParams(seed=length), salt="one")
        for length in lengths
    ]


def worker_of(scheduler):
    return scheduler.engine.core.model_executor.driver_worker.worker


def runner_of(scheduler):
    return worker_of(scheduler).model_runner


def fail(*args, **kwargs):
    raise RuntimeError("planted")


def begin_masks(scheduler, patch, begin):
    step = scheduler.engine.step
    patch.setattr(scheduler.engine, "step", lambda begin_masks: step(begin))


FAULTS = {
    "forward": lambda scheduler, patch: patch.setattr(runner_of(scheduler).model, "forward", fail),
    "sampling": lambda scheduler, patch: patch.setattr(worker_of(scheduler).sampler, "sample", fail),
    # vLLM's runner keeps the forward's state until it samples, and refuses another forward.
    "between": lambda scheduler, patch: begin_masks(scheduler, patch, lambda posted: fail),
    "schedule": lambda scheduler, patch: begin_masks(scheduler, patch, fail),
}


@pytest.mark.parametrize("plant", FAULTS.values(), ids=FAULTS)
def test_a_step_that_raises_fails_its_blocks_and_the_engine_recovers(
    scheduler, reference, monkeypatch, plant
):
    held, idle, new, long = sessions = sessions_of((140, 260, 150, 700))
    generate(scheduler, [held, idle], 2)
    gone = sessions_of((30,))[0]
    ask(scheduler, gone)
    end(scheduler, gone)  # vLLM's worker has not heard of it when the step fails
    with monkeypatch.context() as patch:
        plant(scheduler, patch)
        tasks = [held.block([5, 6]), new.block(), long.block()]
        for outcome in outcomes(answers(scheduler, tasks)):
            assert isinstance(outcome, InternalError)
            assert "planted" in str(outcome)
    assert scheduler.queue.is_idle
    stats = scheduler.engine.stats()
    assert (stats.num_sessions, len(scheduler.queue.sessions)) == (0, 0)
    assert ask(scheduler, held) == NeedTokens(0)
    for each in sessions:
        each.held = 0
        (reply,) = answers(scheduler, [task := each.block()])
        each.take(task, reply)
        # The cache named blocks of the step that failed, which nothing had computed.
        assert reply.timing.cached_tokens == 0
    assert generate(scheduler, sessions, 6) == references(reference, sessions, 6)
    # Nothing of the requests before the failure is left in vLLM's worker.
    runner = runner_of(scheduler)
    kept = runner.req_states.req_id_to_index if hasattr(runner, "req_states") else runner.requests
    assert len(kept) == 4


def test_a_row_that_is_not_a_number_fails_its_block_alone(scheduler, reference, monkeypatch):
    good, bad = sessions = sessions_of((40, 50))
    generate(scheduler, sessions, 2)
    sampler = worker_of(scheduler).sampler
    sample = sampler.sample

    def spoil(logits, request_ids, drafts):
        row = next(at for at, name in enumerate(request_ids) if name.startswith(bad.name))
        logits = logits.clone()
        logits[row] = torch.nan
        return sample(logits, request_ids, drafts)

    with monkeypatch.context() as patch:
        patch.setattr(sampler, "sample", spoil)
        tasks = [good.block(), bad.block()]
        fine, failed = answers(scheduler, tasks)
    good.take(tasks[0], fine)
    assert isinstance(failed.outcome, InternalError)
    assert "not finite" in str(failed.outcome)
    assert generate(scheduler, sessions, 6) == references(reference, sessions, 6)


async def test_an_engine_that_is_lost_ends_its_thread_and_answers_what_waits(scheduler, monkeypatch):
    """As after a process of vLLM has ended, of which it calls back."""
    monkeypatch.setattr(type(scheduler), "close", lambda self: None)  # others use the engine
    thread = EngineThread(lambda: scheduler, "engine")
    await thread.start()
    answered = asyncio.Queue()
    session = sessions_of((40,))[0]

    def deliver(task, reply):
        answered.put_nowait((task, reply))

    thread.submit([session.block(deliver=deliver)])
    session.take(*await asyncio.wait_for(answered.get(), 30))
    try:
        scheduler.engine.note_loss()
        thread.submit([session.block(deliver=deliver)])
        _, reply = await asyncio.wait_for(answered.get(), 30)
        assert isinstance(reply.outcome, EngineLostError)
        await asyncio.wait_for(thread.ended.wait(), 30)
        assert await thread.stop(30)
    finally:
        scheduler.engine.is_lost = False
