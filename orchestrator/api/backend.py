"""The interface of an orchestrator that both public APIs, HTTP and gRPC, use."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from gammaray.types import Chunk, DrafterKind, GenerationRequest, ProcessStatus
from orchestrator.access.caller import ANONYMOUS, Caller
from orchestrator.sessions.management import SessionCalls
from orchestrator.sessions.receipts import ReceiptIssuer
from orchestrator.storage.response_store import ResponseStore
from orchestrator.text.tokenizer import Tokenizer


class Backend(Protocol):
    """Generates text and reports the cluster's state; implemented by `orchestrator.service.Orchestrator`."""

    model_name: str
    max_context: int
    tokenizer: Tokenizer
    sessions: SessionCalls
    responses: ResponseStore
    receipts: ReceiptIssuer

    def generate(self, request: GenerationRequest, caller: Caller = ANONYMOUS) -> AsyncGenerator[Chunk, None]:
        """Yield the completion piece by piece; closing the iterator cancels it.

        The piece before the prompt is computed `is_opening`. A GammarayError before it refuses the request; a
        later one fails the generation.
        """
        ...

    @property
    def adapters(self) -> Sequence[str]:
        """Names of the LoRA adapters that a request's `model` may name."""
        ...

    @property
    def drafters(self) -> list[DrafterKind]:
        """What can draft for a session now: models first, then look-ups."""
        ...

    async def status(self) -> list[ProcessStatus]:
        """Return the processes that this orchestrator works with, itself included."""
        ...
