"""A scripted orchestrator for tests of the public APIs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from gammaray.errors import InvalidArgumentError, NotFoundError
from gammaray.types import (
    Chunk,
    DrafterKind,
    EmittedToken,
    FinishReason,
    GenerationRequest,
    ProcessStatus,
    PromptLogprobs,
    SpeculationSummary,
    TokenOrigin,
    TopLogprob,
    Usage,
)
from gammaray.wire.sessions import SessionState
from orchestrator.access.caller import ANONYMOUS, Caller
from orchestrator.sessions.receipts import ReceiptIssuer
from orchestrator.storage.response_store import Ending, StoredResponse
from orchestrator.text.chat import ChatFormat

SUMMARY = SpeculationSummary(
    *(2, 1.5, 0.5, 0.25, (1, 1), 2.0, 1.0, 2.0, 0.5, 3.5, None, 1, 0, 1, 1),
    drafted_tokens=2,
    accepted_tokens=1,
)
PIECES = (b"caf", b"\xc3", b"\xa9")
Messages = Sequence[Mapping[str, Any]]
MESSAGES_ONLY = ChatFormat("messages only")


class MemoryResponses:
    """Keeps responses by qualified name as `ResponseStore` does; may fail, or be full for ends."""

    def __init__(self) -> None:
        self.kept: dict[str, StoredResponse] = {}
        self.failure: Exception | None = None
        self.is_full = False

    async def create(self, name: str, stored: StoredResponse, room: int) -> None:
        self._check()
        self.kept[name] = stored

    async def finish(self, name: str, response: bytes, short: bytes) -> Ending:
        self._check()
        if name not in self.kept:
            return "gone"
        if self.is_full:
            self.kept[name] = StoredResponse(self.kept[name].input, short)
            return "cut"
        self.kept[name] = StoredResponse(self.kept[name].input, response)
        return "whole"

    def finish_later(self, name: str, response: bytes, short: bytes) -> None:
        self.kept[name] = StoredResponse(self.kept[name].input, response)

    async def read(self, name: str) -> StoredResponse:
        self._check()
        if name not in self.kept:
            raise NotFoundError(f"no response {name}", "response")
        return self.kept[name]

    async def delete(self, name: str) -> bool:
        self._check()
        return self.kept.pop(name, None) is not None

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure


class ScriptedBackend:
    """Answers every request with the tokens of `pieces`, one chunk each, as far as `max_tokens` goes.

    Args:
        before: Called with the request and the number of the chunk to come; may raise or return an awaitable.
        pieces: Bytes of the tokens.
        healthy: Whether there is a target worker.
        chat_format: Of the model's chat template, which is not that of `render_chat`.
        opens: Whether a chunk that `is_opening` comes first, as from an orchestrator.

    Attributes:
        tokenizer: The backend itself, which has the methods of a tokenizer that the APIs call.
    """

    model_name = "scripted"
    max_context = 64
    has_exact_bytes = True
    adapters: Sequence[str] = ()

    def __init__(
        self,
        before: Callable[[GenerationRequest, int], Any] = lambda request, number: None,
        pieces: Sequence[bytes] = PIECES,
        healthy: bool = True,
        chat_format: ChatFormat = MESSAGES_ONLY,
        opens: bool = False,
    ) -> None:
        self._opens = opens
        self.requests: list[GenerationRequest] = []
        self.callers: list[Caller] = []
        self.num_open = 0
        self._before, self._pieces, self._healthy = before, pieces, healthy
        self.chat_format = chat_format
        self.tokenizer: Any = self
        self.responses = MemoryResponses()
        self.receipts = ReceiptIssuer("", self.tokenizer, self.model_name)
        self.deleted: list[str] = []
        self.state = SessionState.RUNNING

    async def generate(
        self, request: GenerationRequest, caller: Caller = ANONYMOUS
    ) -> AsyncGenerator[Chunk, None]:
        await self.check(request)
        self.requests.append(request)
        self.callers.append(caller)
        self.num_open += 1
        try:
            pieces = self._pieces[: request.max_tokens]
            if self._opens:
                yield Chunk(request.session_id or "s0", "", turn=request.turn, prompt_tokens=5)
            for number, piece in list(enumerate(pieces))[request.resume_from or 0 :]:
                waiting = self._before(request, number)
                if waiting is not None:
                    await waiting
                yield self._chunk(request, pieces, number, piece)
        finally:
            await asyncio.sleep(0)  # tidying up takes a moment, and must get it
            self.num_open -= 1

    async def check(self, request: GenerationRequest) -> None:
        if request.model not in ("", self.model_name, *self.adapters):
            raise NotFoundError(f"no model {request.model!r}", "model")
        request.validate()

    def _chunk(self, request: GenerationRequest, pieces: Sequence[bytes], number: int, piece: bytes) -> Chunk:
        done = b"".join(pieces[:number]).decode("utf-8", "ignore")
        text = b"".join(pieces[: number + 1]).decode("utf-8", "ignore")[len(done) :]
        ranks = range(request.num_top_logprobs or 0)
        top = tuple(TopLogprob(rank, -1.0 - rank, b"t%d" % rank) for rank in ranks)
        logprob = None if request.num_top_logprobs is None else -0.5
        token = EmittedToken(number + 1, TokenOrigin.ACCEPTED, piece, logprob, top, DrafterKind.SUFFIX)
        last = number == len(pieces) - 1
        reason = FinishReason.LENGTH if request.max_tokens <= len(self._pieces) else FinishReason.STOP
        name = request.session_id or f"s{request.sampling.sample_index}"
        end = (reason, Usage(5, len(pieces), 2, 1, 3), SUMMARY) if last else (None, None, None)
        place = {"offset": number, "turn": request.turn, "prompt_tokens": 5}
        first = {"prompt_logprobs": self._prompt_logprobs(request)} if number == 0 else {}
        return Chunk(name, text, (token,), request.sampling.seed or 0, *end, **place, **first)

    def _prompt_logprobs(self, request: GenerationRequest) -> PromptLogprobs | None:
        """Tell of each token but the first -n / 10, rank 2, and as alternatives its neighbours."""
        count = request.num_prompt_logprobs
        if count is None:
            return None
        prompt = request.prompt
        token_ids = tuple(self.encode(prompt)) if isinstance(prompt, str) else prompt
        return PromptLogprobs(
            token_ids,
            logprobs=tuple(-number / 10 for number in range(1, len(token_ids))),
            ranks=(2,) * (len(token_ids) - 1),
            num_top=count,
            top_token_ids=tuple(i + 1 + step for i in token_ids[1:] for step in range(count)),
            top_logprobs=tuple(-0.01 * (step + 1) for _ in token_ids[1:] for step in range(count)),
        )

    @property
    def sessions(self) -> ScriptedBackend:
        return self

    async def delete(self, session_id: str, caller: Caller) -> bool:
        self.deleted.append(caller.qualify(session_id))
        return True

    async def get(self, session_id: str, caller: Caller) -> tuple[Any, tuple[EmittedToken, ...]]:
        if session_id == "gone":
            raise NotFoundError("no session gone", "session")
        return SimpleNamespace(state=self.state), tuple(
            EmittedToken(n + 1, TokenOrigin.ACCEPTED, data, -0.5) for n, data in enumerate(self._pieces)
        )

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def min_tokens(self, text: str) -> int:
        return 0

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(f"<{token_id}>" for token_id in token_ids if not self.is_special(token_id))

    def is_special(self, token_id: int) -> bool:
        return token_id == 0

    def token_bytes(self, token_id: int) -> bytes:
        return b"<%d>" % token_id

    def render_chat(self, messages: Messages, tools: Messages = ()) -> str:
        if messages[0]["role"] == "assistant":
            raise InvalidArgumentError("messages", "an assistant first", "a user first")
        told = "".join(f"tool: {tool['function']['name']}\n" for tool in tools)
        return told + "".join(f"{message['role']}: {message['content']}\n" for message in messages)

    @property
    def drafters(self) -> list[DrafterKind]:
        return [DrafterKind.HEAD, DrafterKind.SUFFIX]

    async def status(self) -> list[ProcessStatus]:
        return [
            ProcessStatus("orchestrator", 1, "", self.model_name, True, self.num_open),
            ProcessStatus("target", 2, "127.0.0.1:1", self.model_name, self._healthy, 0),
        ]
