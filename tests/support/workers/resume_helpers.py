"""Two orchestrators, and clients that disconnect and resume."""

import asyncio
import dataclasses
from contextlib import aclosing, asynccontextmanager

import grpc

from gammaray.types import GenerationRequest
from orchestrator.workers.protocol import DRAFT, TARGET
from tests.support.workers.service_helpers import PROMPTS, SEEDED, running, tokens_of

NAMES = iter(f"resume-{number}" for number in range(10_000))


@asynccontextmanager
async def two_orchestrators(redis_server, workers):
    async with running(redis_server, *workers) as one, running(redis_server, *workers) as other:
        yield one, other


async def any_model(session_id, identity, left_s):
    """Let a session continue with any target model."""


def request_of(prompt=PROMPTS[0], **fields):
    fields = {"sampling": SEEDED, "max_tokens": 48, "ignore_eos": True, "session_id": next(NAMES), **fields}
    return GenerationRequest(prompt, **fields)


async def first_chunks(orchestrator, request, count):
    chunks = []
    async with aclosing(orchestrator.generate(request)) as stream:
        async for chunk in stream:
            chunks += [] if chunk.is_opening else [chunk]
            if len(chunks) == count:
                break
    return chunks


def resumed(request, chunks):
    return dataclasses.replace(request, resume_from=len(tokens_of(chunks)))


def undisturbed(request):
    return dataclasses.replace(request, session_id=next(NAMES))


async def sessions_on(orchestrator, wanted=None):
    """Return the number of sessions on the workers once all releases have arrived: `wanted`, in 30 s."""
    held = -1
    for _ in range(150):
        infos = []
        for pool, protocol in ((orchestrator.fleet.targets, TARGET), (orchestrator.fleet.drafts, DRAFT)):
            for address in pool.links:
                async with grpc.aio.insecure_channel(address) as channel:
                    infos.append(await protocol.get_info(channel, 5.0))
        before, held = held, sum(info.num_sessions for info in infos)
        if held == before and wanted in (None, held):
            return held
        await asyncio.sleep(0.2)
    return held
