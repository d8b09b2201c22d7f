"""The interface of an orchestrator that both public APIs, HTTP and gRPC, use."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from gammaray.types import Chunk, DrafterKind, GenerationRequest, ProcessStatus
from orchestrator.access.caller import ANONYMOUS, Caller
from orchestrator.sessions.management import SessionCalls
from orchestrator.storage.response_store import ResponseStore
from orchestrator.text.chat import ChatFormat


class Backend(Protocol):
    """Generates text and reports the cluster's state; implemented by `orchestrator.service.Orchestrator`."""

    model_name: str
    max_context: int
    vocab_size: int
    sessions: SessionCalls
    responses: ResponseStore

    def generate(self, request: GenerationRequest, caller: Caller = ANONYMOUS) -> AsyncGenerator[Chunk, None]:
        """Yield the completion piece by piece; closing the iterator cancels it.

        Raises:
            GammarayError: The request is refused (on the first iteration), or the generation fails (later).
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the text of a single token as bytes; thread-safe."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Return whether `decode` omits a token; thread-safe."""
        ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Return the prompt that the model's chat template makes of messages and, in OpenAI's form, tools.

        Raises:
            InvalidArgumentError: The model has no chat template, or it refuses the messages.
        """
        ...

    @property
    def chat_format(self) -> ChatFormat:
        """What is known of the model's chat template."""
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
