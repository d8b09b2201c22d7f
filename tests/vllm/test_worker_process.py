"""Target workers on vLLM as processes: a kill in mid-stream, failover, a drain, and what is left of them."""

import asyncio
import dataclasses
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import psutil
import pytest

from gammaray.receipts.keys import read_receipt_keys, rotate
from gammaray.receipts.receipt import SignedReceipt
from gammaray.types import GammaPolicy, GenerationRequest, SamplingParams
from orchestrator.launcher.reaper import runs
from orchestrator.workers.protocol import TARGET
from services.receipts.check import ReceiptChecker
from tests.support.engine_helpers import random_tokens
from tests.support.workers.redis_helpers import running_redis, wait_until
from tests.support.workers.service_helpers import (
    PROMPTS,
    SEEDED,
    complete,
    running,
    tokens_of,
    worker_process,
)
from tests.support.workers.workers_helpers import Link, verify_block

pytestmark = [pytest.mark.integration, pytest.mark.nightly]

EXIT_TIMEOUT_S = 60
OPTIONS = ("--engine", "vllm", "--cache-budget-mb", "128", "--max-batch-tokens", "64")
KILLED_AFTER = 5
"""Chunks of a stream."""


async def num_sessions(address):
    async with grpc.aio.insecure_channel(address) as channel:
        return (await TARGET.get_info(channel, 10.0)).num_sessions


async def interrupted(orchestrator, request, processes):
    """Run a completion, and kill the worker that serves it when the first chunks have come."""
    chunks, killed = [], None
    async for chunk in orchestrator.generate(request):
        chunks.append(chunk)
        if len(chunks) == KILLED_AFTER:
            (killed,) = [address for address in processes if await num_sessions(address)]
            processes[killed].kill()
    return chunks, killed


@pytest.mark.timeout(400)
async def test_a_stream_survives_the_kill_of_its_worker_and_the_other_one_drains(tmp_path):
    """The receipts of the stream and of an undisturbed one are valid by the CPU engine."""
    rotate(keys := tmp_path / "keys.json")
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        redis = stack.enter_context(running_redis())
        starts = [worker_process("target", "demo", *OPTIONS) for _ in range(2)]
        started = threads.map(stack.enter_context, starts)
        processes = {address: process for process, address in started}
        async with running(redis, ",".join(processes), "", receipt_keys_file=str(keys)) as orchestrator:
            request = GenerationRequest(
                PROMPTS[1],
                sampling=SEEDED,
                max_tokens=60,
                ignore_eos=True,
                gamma=GammaPolicy(4),
                receipt=True,
            )
            greedy = dataclasses.replace(request, sampling=SamplingParams(temperature=0, seed=1))
            undisturbed = [tokens_of(await complete(orchestrator, one)) for one in (request, greedy)]
            chunks, killed = await interrupted(orchestrator, request, processes)
            assert tokens_of(chunks) == undisturbed[0]
            assert len(tokens_of(chunks)) == 60
            assert processes[killed].wait() == -signal.SIGKILL
            resumed = await complete(orchestrator, greedy)
            assert tokens_of(resumed) == undisturbed[1]
        (address,) = [address for address in processes if address != killed]
        await assert_drains(processes[address], address)
    checker = ReceiptChecker("demo")
    for text in (chunks[-1].receipt, resumed[-1].receipt):
        signed = SignedReceipt.parse(text)
        signed.check(read_receipt_keys(keys))
        verdict = checker.verdict(signed.receipt)
        assert (verdict.result, verdict.reason, verdict.num_tokens) == ("valid", "", 60)


async def assert_drains(process, address):
    """Stop a worker with blocks in it: all are answered, it exits with 0, and no process of it is left."""
    link = Link(address, "target")
    blocks = [verify_block(random_tokens(600, seed=seed), session_id=f"s{seed}") for seed in range(8)]
    pending = await link.send(blocks)
    await link.until(lambda info: info.num_queued > 0)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert not all(answer.done() for answer in pending)
    answers = await asyncio.wait_for(asyncio.gather(*pending), EXIT_TIMEOUT_S)
    assert {answer.WhichOneof("outcome") for answer in answers} == {"verdict"}
    assert await link.call.code() == grpc.StatusCode.OK
    assert await asyncio.to_thread(process.wait, EXIT_TIMEOUT_S) == 0
    await link.close()

    # A helper process of Python's may end a moment after the worker.
    await asyncio.to_thread(wait_until, lambda: not any(map(runs, children)))
