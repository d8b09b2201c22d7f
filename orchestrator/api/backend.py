"""What the public APIs need of an orchestrator: the one thing that HTTP and gRPC both stand on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from gammaray.types import Chunk, GenerationRequest, ProcessStatus
from orchestrator.access.caller import ANONYMOUS, Caller
from orchestrator.sessions.management import SessionCalls

__all__ = ["Backend"]


class Backend(Protocol):
    """Generates text and tells the cluster's state; `orchestrator.service.Orchestrator` is the real one."""

    model_name: str
    max_context: int
    vocab_size: int
    sessions: SessionCalls

    def generate(self, request: GenerationRequest, caller: Caller = ANONYMOUS) -> AsyncGenerator[Chunk, None]:
        """Yield the completion piece by piece; closing the iterator cancels it.

        Raises:
            GammarayError: At the first step when the request is refused, later when the generation fails.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the text of one token by itself, as bytes; may be called in any thread."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is one that `decode` leaves out; may be called in any thread."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt that the model's chat template makes of messages.

        Raises:
            InvalidArgumentError: The model has no chat template, or it refuses the messages.
        """
        ...

    async def status(self) -> list[ProcessStatus]:
        """Return the processes that this orchestrator works with, itself included."""
        ...
