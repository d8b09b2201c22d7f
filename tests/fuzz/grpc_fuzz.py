"""Calls to gRPC services with messages that were tampered with: the public one, and the workers' own."""

import asyncio
import random
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from gammaray.v1 import draft_service_pb2 as draft_pb
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.v1 import target_service_pb2 as target_pb
from gammaray.v1 import types_pb2
from tests.fuzz.campaign import Campaign
from tests.fuzz.values import TEXTS, mutate_bytes, mutate_message

ANSWER_TIMEOUT_S = 60.0
PATIENCE_MS = 15_000
ALLOWED = {
    *("OK", "CANCELLED", "DEADLINE_EXCEEDED", "FAILED_PRECONDITION", "INVALID_ARGUMENT"),
    *("NOT_FOUND", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "UNAVAILABLE"),
}
OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
"""One connection per fuzzer, so that breaking it does not affect other calls."""

_SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]


async def fuzz_public(address: str, campaign: Campaign, name: str) -> None:
    rng = campaign.dice(name)
    async with grpc.aio.insecure_channel(address, OPTIONS) as channel:
        while not campaign.is_over:
            method = _SERVICE.methods_by_name["Generate"]
            if rng.random() < 0.3:
                method = rng.choice(_SERVICE.methods)
            request = getattr(pb, method.input_type.name)()
            if method.name == "Generate":
                request.text, request.max_tokens = "def f(", 4
                request.sampling.seed, request.gamma.fixed = 1, 3
            mutate_message(rng, request)
            data = request.SerializeToString()
            if rng.random() < 0.2:
                data = mutate_bytes(rng, data)
            call = channel.unary_stream(f"/{_SERVICE.full_name}/{method.name}")(
                data, timeout=ANSWER_TIMEOUT_S, metadata=_metadata(rng)
            )
            code, text = await _outcome(call, rng)
            story = f"{method.name} {data[:200]!r}"
            is_ours = code != "UNAVAILABLE" or "worker" in text or "Redis" in text
            if code not in ALLOWED or not is_ours:  # a broken connection breaks other calls too
                campaign.count("grpc", code, wrong=f"{code} {text}: {story}")
            elif code == "DEADLINE_EXCEEDED" and "deadline" not in text and "within" not in text:
                campaign.count("grpc", "hang", wrong=f"{text}: {story}")
            else:
                campaign.count("grpc", code)


async def _outcome(call: Any, rng: random.Random) -> tuple[str, str]:
    leave_after = rng.choice([0, 1, 3]) if rng.random() < 0.15 else None
    num_read = 0
    try:
        async for _ in call:
            num_read += 1
            if leave_after is not None and num_read > leave_after:
                call.cancel()
                return "CANCELLED", ""
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


def _metadata(rng: random.Random) -> list[tuple[str, str]]:
    # Some ask for as many tokens as there can be: it ends for them in time, or it hangs.
    timeout = rng.choice(["1", "30", "-1", "x", "9" * 40]) if rng.random() < 0.1 else str(PATIENCE_MS)
    metadata = [("application", "gammaray"), ("gammaray-timeout-ms", timeout)]
    if rng.random() < 0.05:
        metadata.append(("authorization", rng.choice(["Bearer", "Bearer gr_x", "x" * 4000])))
    if rng.random() < 0.05:
        # Beyond 16 KiB of headers the proxy closes the connection: gRPC has no status for that.
        printable = [text for text in TEXTS if text.isascii() and text.isprintable() and len(text) < 8000]
        metadata.append(("traceparent", rng.choice(printable)))
    return metadata


async def fuzz_worker(address: str, role: str, campaign: Campaign, name: str) -> None:
    rng, names = campaign.dice(name), set[str]()
    path = f"/gammaray.v1.{'TargetService/Verify' if role == 'target' else 'DraftService/Propose'}"
    async with grpc.aio.insecure_channel(address, OPTIONS) as channel:
        while not campaign.is_over:
            frames = [_frame(role, rng, names) for _ in range(rng.choice([1, 2, 5]))]
            if rng.random() < 0.2:
                frames.append(mutate_bytes(rng, frames[-1]))
                names |= _names(role, frames[-1])

            async def requests(frames: list[bytes] = frames) -> AsyncIterator[bytes]:
                for frame in frames:
                    yield frame
                    await asyncio.sleep(0.01)

            call = channel.stream_stream(path)(requests(), timeout=ANSWER_TIMEOUT_S)
            code, text = await _outcome(call, rng)
            # gRPC itself answers a frame that is no protobuf with UNKNOWN or INTERNAL.
            is_parse = code in ("INTERNAL", "UNKNOWN") and re.search("deserializ|pars", text, re.IGNORECASE)
            wrong = None if code in ALLOWED - {"DEADLINE_EXCEEDED"} or is_parse else f"{role}: {code} {text}"
            campaign.count(f"{role} stream", code, wrong=wrong)
        await _release(channel, path, role, names)


def _names(role: str, data: bytes) -> set[str]:
    """Return the sessions that a frame is about, as far as it can be read."""
    try:
        frame = (target_pb.VerifyRequest if role == "target" else draft_pb.ProposeRequest).FromString(data)
    except DecodeError:
        return set()
    return {block.session_id for block in frame.blocks}


async def _release(channel: grpc.aio.Channel, path: str, role: str, names: set[str]) -> None:
    """End the sessions that were made up, as an orchestrator would."""
    frame: Message = target_pb.VerifyRequest() if role == "target" else draft_pb.ProposeRequest()
    for name in sorted(names)[:10_000]:
        frame.releases.add(session_id=name)  # type: ignore[attr-defined]

    async def requests() -> AsyncIterator[bytes]:
        yield frame.SerializeToString()

    async for _ in channel.stream_stream(path)(requests(), timeout=ANSWER_TIMEOUT_S):
        pass


def _frame(role: str, rng: random.Random, names: set[str]) -> bytes:
    frame: Message = target_pb.VerifyRequest() if role == "target" else draft_pb.ProposeRequest()
    for number in range(rng.choice([1, 3, 20])):
        block = frame.blocks.add()  # type: ignore[attr-defined]
        prompt = [rng.randrange(200) for _ in range(rng.choice([1, 5, 40]))]
        block.request_id, block.session_id = number + 1, f"fuzz-{rng.randrange(20)}"
        block.epoch, block.base_position, block.timeout_ms = rng.randrange(1, 4), len(prompt), 5000
        block.context.token_ids.extend(prompt)
        block.spec.sampling.seed, block.spec.sampling.temperature = rng.randrange(9), rng.choice([0.0, 1.0])
        block.spec.verification = types_pb2.VERIFICATION_METHOD_COUPLED
        block.spec.prompt_length = 1
        if role == "target":
            block.proposal.token_ids.extend([1, 2, 3])
        else:
            block.gamma = 3
        if rng.random() < 0.8:
            mutate_message(rng, block)
        names.add(block.session_id)
    if rng.random() < 0.3:
        frame.releases.add(session_id=f"fuzz-{rng.randrange(20)}")  # type: ignore[attr-defined]
    return frame.SerializeToString()
