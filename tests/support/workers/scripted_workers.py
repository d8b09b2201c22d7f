"""Workers without a model: real grpc.aio servers that follow the wire contract, or break it on purpose."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from gammaray.types import SamplingParams, TokenOrigin, VerificationMethod
from gammaray.v1 import draft_service_pb2 as draft_pb
from gammaray.v1 import draft_service_pb2_grpc, target_service_pb2_grpc
from gammaray.v1 import target_service_pb2 as target_pb
from gammaray.v1 import types_pb2 as pb
from orchestrator.cycle.run import run_cycle
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Cycle
from orchestrator.storage.session_store import RedisStore
from tests.support.cycle_helpers import ConstantGamma

VOCAB = 50
PROMPT = (1, 2, 3)


def next_token(tokens) -> int:
    """The model: a token that depends on everything before it."""
    state = 7
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % VOCAB


def continuation(prompt, count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class ScriptedWorker:
    """A worker process's server side.

    Args:
        role: "target" or "draft".
        vocab_size: Vocabulary size that it reports; also `sha`, `max_context`, and a target's `identity`,
            `grammars`, `takes_trees`, `forward_s`, `adapters` and `protocols` (oldest, newest).

    Attributes:
        on_block: Called with each block; returns a result, several, or None to stay silent.
        runs: While it is cleared, the worker answers no call.
        frames: The received request frames.
        held: Committed tokens by session.
        is_draining: Whether it sends draining notices to its peers.
        released: Sessions that were released.
    """

    def __init__(
        self,
        role: str,
        *,
        vocab_size: int = VOCAB,
        sha: str = "",
        max_context: int = 1000,
        identity: str = "",
        grammars: str = "",
        takes_trees: bool = False,
        forward_s: Sequence[float] = (),
        adapters: Mapping[str, str] | None = None,
        protocols: tuple[int, int] = (0, 0),
    ) -> None:
        self.role = role
        self.frames: list[Any] = []
        self.held: dict[str, list[int]] = {}
        self.specs: dict[str, pb.SessionSpec] = {}
        self.released: list[str] = []
        self.num_streams = 0
        self.num_needs = 0
        self.delay_s = 0.0
        self.is_draining = False
        self.runs = asyncio.Event()
        self.runs.set()
        self.on_block: Callable[[Any], Any] = lambda block: self.work(block)
        self._info = {"model": role, "vocab_size": vocab_size, "max_context": max_context, "pid": 1}
        self._info["vocab_sha256"] = sha
        self._info["oldest_protocol"], self._info["protocol"] = protocols
        self.identity, self.grammars = identity, grammars
        self.takes_trees, self.forward_s, self.adapters = takes_trees, forward_s, adapters or {}
        self._server: grpc.aio.Server | None = None
        self.address = ""

    async def start(self) -> None:
        """Serve; on the same port as before when it was stopped."""
        self._server = grpc.aio.server()
        if self.role == "target":
            target_service_pb2_grpc.add_TargetServiceServicer_to_server(self, self._server)
        else:
            draft_service_pb2_grpc.add_DraftServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        """Break every stream and close the port; caches are lost."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
        self.forget()

    def forget(self) -> None:
        """Lose all caches, as after a restart or an eviction."""
        self.held.clear()
        self.specs.clear()

    @property
    def blocks(self) -> list[Any]:
        return [block for frame in self.frames for block in frame.blocks]

    async def Verify(self, requests, context):
        async for response in self._serve(requests, target_pb.VerifyResponse):
            yield response

    async def Propose(self, requests, context):
        async for response in self._serve(requests, draft_pb.ProposeResponse):
            yield response

    async def GetTargetInfo(self, request, context):
        await self.runs.wait()
        own = {"model_identity": self.identity, "grammar_identity": self.grammars, "adapters": self.adapters}
        own |= {"takes_trees": self.takes_trees, "forward_s": self.forward_s}
        return target_pb.GetTargetInfoResponse(**self._about(), **own)

    async def GetDraftInfo(self, request, context):
        await self.runs.wait()
        return draft_pb.GetDraftInfoResponse(**self._about())

    def _about(self) -> dict[str, Any]:
        return {**self._info, "num_sessions": len(self.held), "is_draining": self.is_draining}

    async def _serve(self, requests, response_type):
        self.num_streams += 1
        async for frame in requests:
            self.frames.append(frame)
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            await self.runs.wait()
            results = []
            for block in frame.blocks:
                outcome = self.on_block(block)
                results += outcome if isinstance(outcome, list) else [outcome] if outcome else []
            for release in frame.releases:
                self.released.append(release.session_id)
                self.held.pop(release.session_id, None)
                self.specs.pop(release.session_id, None)
            if results:
                yield response_type(results=results, is_draining=self.is_draining)

    def work(self, block: Any) -> Any:
        """Answer a block as a correct worker does."""
        known = self.held.get(block.session_id, [])
        if block.HasField("spec"):
            self.specs[block.session_id] = block.spec
        if block.session_id not in self.specs or block.context.start > len(known):
            self.num_needs += 1
            position = 0 if block.session_id not in self.specs else len(known)
            return self.result(block, need=pb.NeedTokens(position=position))
        tokens = known[: block.context.start] + list(block.context.token_ids)
        assert len(tokens) == block.base_position
        if self.role == "draft":
            self.held[block.session_id] = tokens
            return self.result(block, proposal=pb.Proposal(token_ids=self.guess(tokens, block.gamma)))
        verdict = judge(tokens, block.proposal.token_ids, block.proposal.parents)
        accepted = [block.proposal.token_ids[node] for node in verdict.accepted_path]
        self.held[block.session_id] = tokens + accepted
        return self.result(block, verdict=verdict)

    def guess(self, tokens: list[int], gamma: int) -> list[int]:
        """Return a chain that is wrong at every seventh position."""
        chain: list[int] = []
        for _ in range(gamma):
            token = next_token([*tokens, *chain])
            chain.append(token if (len(tokens) + len(chain)) % 7 else (token + 1) % VOCAB)
        return chain

    def result(self, block: Any, **outcome: Any) -> Any:
        kind = target_pb.VerifyResult if self.role == "target" else draft_pb.ProposeResult
        return kind(request_id=block.request_id, session_id=block.session_id, **outcome)


def judge(tokens: list[int], token_ids: Sequence[int], parents: Sequence[int] = ()) -> target_pb.Verdict:
    """Walk down a proposal, a chain without `parents`, as long as its tokens are the model's."""
    parents = parents or range(-1, len(token_ids) - 1)
    path: list[int] = []
    known, at = list(tokens), -1
    while True:
        wanted = next_token(known)
        children = [node for node, parent in enumerate(parents) if parent == at]
        hit = next((node for node in children if token_ids[node] == wanted), None)
        if hit is None:
            return target_pb.Verdict(
                accepted_path=path,
                next_token_id=wanted,
                next_origin=pb.TOKEN_ORIGIN_CORRECTION if children else pb.TOKEN_ORIGIN_BONUS,
                num_tested=len(path) + bool(children),
            )
        path.append(hit)
        known.append(wanted)
        at = hit


@asynccontextmanager
async def scripted(*roles: str, **options: Any) -> AsyncIterator[Any]:
    workers = [ScriptedWorker(role, **options) for role in roles]
    for worker in workers:
        await worker.start()
    try:
        yield workers[0] if len(workers) == 1 else tuple(workers)
    finally:
        for worker in workers:
            await worker.stop()


class NoText:
    """A text stream for sessions whose text does not matter."""

    def push(self, token_id: int) -> bool:
        return False

    def take(self, *, final: bool) -> str:
        return ""


def make_session(
    session_id: str = "s", max_tokens: int = 30, epoch: int = 1, prompt: tuple[int, ...] = PROMPT
) -> Session:
    params, method = SamplingParams(seed=1), VerificationMethod.COUPLED
    return Session(session_id, prompt, params, method, max_tokens, NoText(), epoch=epoch)


async def commit(
    store: RedisStore, session: Session, token_ids: Sequence[int], origins: Sequence[TokenOrigin] = ()
) -> None:
    """Commit tokens, of which a session keeps those up to its end, and store them."""
    kept = session.commit(token_ids)
    await store.append(session, token_ids[:kept], (origins or [TokenOrigin.BONUS] * kept)[:kept])


async def finish(
    session: Session, drafter: Any, verifier: Any, gamma: int, max_nodes: int = 0
) -> list[Cycle]:
    cycles = []
    while session.finish_reason is None:
        cycles.append(await run_cycle(session, drafter, verifier, ConstantGamma(gamma, max_nodes)))
    return cycles


async def until_so(ask: Callable[[], Awaitable[Any]], timeout_s: float = 30.0) -> Any:
    """Poll until the result is true or not empty, and return it; at the timeout return the last result."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        answer = await ask()
        if answer or asyncio.get_running_loop().time() > deadline:
            return answer
        await asyncio.sleep(0.02)


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError("it never came true")
        await asyncio.sleep(0.005)
