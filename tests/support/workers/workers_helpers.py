"""Workers in this process on free loopback ports, and a driver that speaks their wire protocol."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from gammaray.config import DraftSettings, TargetSettings
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from gammaray.v1 import draft_service_pb2 as draft_pb
from gammaray.v1 import draft_service_pb2_grpc, target_service_pb2_grpc
from gammaray.v1 import target_service_pb2 as target_pb
from gammaray.v1 import types_pb2 as types
from gammaray.wire.blocks import proposal_from_proto, proposal_to_proto
from gammaray.wire.convert import sampling_to_proto
from gammaray.wire.enums import METHODS
from services.draft_worker.worker import DraftWorker
from services.target_worker.worker import TargetWorker

ANSWER_TIMEOUT_S = 60.0
GREEDY = SamplingParams(temperature=0.0, seed=1)


class Link:
    """One stream to a worker of a role; answers are matched by request id."""

    def __init__(self, address: str, role: str) -> None:
        self.is_target = role == "target"
        self.channel = grpc.aio.insecure_channel(address)
        if self.is_target:
            self.stub: Any = target_service_pb2_grpc.TargetServiceStub(self.channel)
            self.call = self.stub.Verify()
        else:
            self.stub = draft_service_pb2_grpc.DraftServiceStub(self.channel)
            self.call = self.stub.Propose()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._next_id = 0
        self._writing = asyncio.Lock()
        self._reader = asyncio.create_task(self._read())
        self.frame_sizes: list[int] = []
        self.is_asked_to_leave = False

    async def send(
        self, blocks: Iterable[Any] = (), releases: Iterable[str] = (), epoch: int = 0
    ) -> list[asyncio.Future[Any]]:
        """Send one frame and return the futures of its answers."""
        request = target_pb.VerifyRequest if self.is_target else draft_pb.ProposeRequest
        blocks, futures = list(blocks), []
        for block in blocks:
            self._next_id += 1
            block.request_id = self._next_id
            futures.append(asyncio.get_running_loop().create_future())
            self._answers[self._next_id] = futures[-1]
        ended = [types.ReleaseSession(session_id=session_id, epoch=epoch) for session_id in releases]
        async with self._writing:  # gRPC takes one write at a time.
            await self.call.write(request(blocks=blocks, releases=ended))
        return futures

    async def ask(self, *blocks: Any) -> Any:
        """Send blocks in one frame; return the answer, or the answers when there are several."""
        futures = await self.send(blocks)
        answers = await asyncio.wait_for(asyncio.gather(*futures), ANSWER_TIMEOUT_S)
        return answers[0] if len(answers) == 1 else answers

    async def release(self, *session_ids: str, epoch: int = 0) -> None:
        await self.send(releases=session_ids, epoch=epoch)

    async def info(self, timeout: float = 10) -> Any:
        if self.is_target:
            return await self.stub.GetTargetInfo(target_pb.GetTargetInfoRequest(), timeout=timeout)
        return await self.stub.GetDraftInfo(draft_pb.GetDraftInfoRequest(), timeout=timeout)

    async def until(self, condition: Callable[[Any], bool]) -> None:
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while not condition(info := await self.info()):
            assert time.monotonic() < deadline, info

    async def close(self) -> None:
        self._reader.cancel()
        self.call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self.channel.close()

    async def _read(self) -> None:
        async for frame in self.call:
            self.frame_sizes.append(len(frame.results))
            self.is_asked_to_leave |= frame.is_draining
            for result in frame.results:
                self._answers.pop(result.request_id).set_result(result)


@dataclass
class Driver:
    """Decodes one session the way an orchestrator does; trees if `max_nodes` is above `gamma`."""

    target: Link
    draft: Link | None
    prompt: Sequence[int]
    params: SamplingParams = GREEDY
    method: VerificationMethod = VerificationMethod.COUPLED
    gamma: int = 0
    max_nodes: int = 0
    session_id: str = "s"
    eos_token_ids: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    held: dict[bool, int] = field(default_factory=dict)
    accepted: int = 0
    num_needs: int = 0

    async def generate(self, count: int) -> list[int]:
        """Return `count` emitted tokens, or fewer when one of `eos_token_ids` was emitted."""
        self.tokens = list(self.prompt)
        end = len(self.prompt) + count
        while len(self.tokens) < end and self.tokens[-1] not in self.eos_token_ids:
            await self.run_cycle()
        emitted = self.tokens[len(self.prompt) : end]
        stops = [index for index, token in enumerate(emitted) if token in self.eos_token_ids]
        return emitted[: stops[0] + 1] if stops else emitted

    async def run_cycle(self) -> Proposal | None:
        """Run a cycle; return what was proposed, None if the drafter was not asked."""
        proposal = await self.propose() if self.draft is not None and self.gamma else Proposal()
        await self.verify(proposal)
        return proposal

    async def propose(self) -> Proposal:
        assert self.draft is not None
        shape = {"gamma": self.gamma, "max_nodes": self.max_nodes}
        result = await self._feed(self.draft, draft_pb.ProposeBlock, **shape)
        assert result.WhichOneof("outcome") == "proposal", result
        return proposal_from_proto(result.proposal, 2**31)

    async def verify(self, proposal: Proposal) -> Any:
        """Run the second half of a cycle, commit, and return the verdict."""
        message = proposal_to_proto(proposal)
        return self.commit(await self._feed(self.target, target_pb.VerifyBlock, proposal=message), proposal)

    def commit(self, result: Any, proposal: Proposal) -> Any:
        assert result.WhichOneof("outcome") == "verdict", result
        verdict = result.verdict
        self.accepted += len(verdict.accepted_path)
        self.tokens += [proposal.token_ids[node] for node in verdict.accepted_path]
        self.tokens.append(verdict.next_token_id)
        return verdict

    async def _feed(self, link: Link, kind: Any, **fields: Any) -> Any:
        """Send a block with the missing tokens; send it again from the position that the worker requests."""
        start = self.held.get(link.is_target, 0)
        result = await link.ask(self.block(kind, start, with_spec=start == 0, **fields))
        if result.WhichOneof("outcome") == "need":
            self.num_needs += 1
            start = result.need.position
            result = await link.ask(self.block(kind, start, with_spec=start == 0, **fields))
        self.held[link.is_target] = len(self.tokens)
        return result

    def block(self, kind: Any, start: int, *, with_spec: bool, **fields: Any) -> Any:
        """Return a block that continues the session's tokens, with those from `start` on as context."""
        spec = spec_message(self.params, self.method, len(self.prompt), self.eos_token_ids)
        context = types.TokenSpan(start=start, token_ids=self.tokens[start:])
        place = {"session_id": self.session_id, "epoch": 1, "base_position": len(self.tokens)}
        return kind(**{**place, **fields}, context=context, spec=spec if with_spec else None)


@dataclass
class Headed(Driver):
    """Lets the target worker's head draft in every cycle in which it may; in the rest something else does."""

    every: int = 1
    drafted: int = 0
    cycles: int = 0

    async def run_cycle(self) -> Proposal | None:
        self.cycles += 1
        if self.cycles % self.every:
            await self.verify(Proposal((5, 6)))
            return None
        head = target_pb.HeadDraft(gamma=self.gamma, max_nodes=self.max_nodes)
        result = await self._feed(self.target, target_pb.VerifyBlock, head=head)
        proposal = proposal_from_proto(result.drafted, 2**31)
        assert len(proposal) <= max(self.gamma, self.max_nodes)
        self.drafted += len(proposal)
        self.commit(result, proposal)
        return proposal

    async def verify(self, proposal: Proposal) -> Any:
        """Verify another drafter's proposal; the worker keeps the hidden states."""
        fields = {"proposal": proposal_to_proto(proposal), "head": target_pb.HeadDraft()}
        result = await self._feed(self.target, target_pb.VerifyBlock, **fields)
        assert not result.HasField("drafted")
        return self.commit(result, proposal)


async def accepted_in_plain_tokens(
    target: Link, draft: Link, prompt: Sequence[int], temperature: float, shapes: Iterable[tuple[int, int]]
) -> int:
    """Check that 40 tokens are those of plain decoding, drafted in shapes of gamma and nodes.

    Decodes with and without penalties; returns how many drafted tokens were accepted.
    """
    penalties = {"frequency_penalty": 0.6, "repetition_penalty": 1.1, "min_tokens": 9}
    accepted = 0
    for number, extra in enumerate(({}, penalties)):
        params = SamplingParams(temperature=temperature, seed=7, **extra)
        common: dict[str, Any] = {"prompt": prompt, "params": params, "eos_token_ids": (5,)}
        plain = await Driver(target, None, **common, session_id=f"plain{number}").generate(40)
        for gamma, max_nodes in shapes:
            name = f"{gamma}-{max_nodes}-{number}"
            driver = Driver(target, draft, **common, gamma=gamma, max_nodes=max_nodes, session_id=name)
            assert await driver.generate(40) == plain
            accepted += driver.accepted
    return accepted


def spec_message(
    params: SamplingParams = GREEDY,
    method: VerificationMethod = VerificationMethod.COUPLED,
    prompt_length: int = 1,
    eos_token_ids: Sequence[int] = (),
    cache_salt: str | None = None,
) -> types.SessionSpec:
    given = {"prompt_length": prompt_length, "eos_token_ids": eos_token_ids, "cache_salt": cache_salt}
    return types.SessionSpec(sampling=sampling_to_proto(params), verification=METHODS[method], **given)


def verify_block(
    tokens: Sequence[int], proposal: types.Proposal | Sequence[int] = (), **fields: Any
) -> target_pb.VerifyBlock:
    """Return a block that sends all tokens and a greedy spec, unless `fields` say otherwise."""
    if not isinstance(proposal, types.Proposal):
        proposal = types.Proposal(token_ids=proposal)
    return target_pb.VerifyBlock(**{**_fields(tokens), "proposal": proposal, **fields})


def propose_block(tokens: Sequence[int], gamma: int, **fields: Any) -> draft_pb.ProposeBlock:
    return draft_pb.ProposeBlock(**{**_fields(tokens), "gamma": gamma, **fields})


def _fields(tokens: Sequence[int]) -> dict[str, Any]:
    context = types.TokenSpan(start=0, token_ids=tokens)
    place = {"session_id": "s", "epoch": 1, "base_position": len(tokens)}
    return {**place, "context": context, "spec": spec_message(prompt_length=1)}


def block_of(role: str, tokens: Sequence[int], **fields: Any) -> Any:
    """Return a block for a worker of this role, a proposal of four tokens for one that drafts."""
    return verify_block(tokens, **fields) if role == "target" else propose_block(tokens, 4, **fields)


@asynccontextmanager
async def running(
    role: str, model: str | Path, host: str = "", **settings: Any
) -> AsyncIterator[tuple[Link, Any]]:
    if role == "target":
        worker: Any = TargetWorker(TargetSettings(model=str(model), device="cpu", **settings), host)
    else:
        worker = DraftWorker(DraftSettings(model=str(model), device="cpu", **settings), host)
    link = None
    try:
        link = Link(await worker.start(), role)
        yield link, worker
    finally:
        if link is not None:
            await link.close()
        await worker.stop()
