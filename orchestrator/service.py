"""The orchestrator of one replica: validates requests, runs their cycles and streams chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from gammaray.config import OrchestratorSettings
from gammaray.types import Chunk, GenerationRequest, ProcessStatus

__all__ = ["Orchestrator"]


class Orchestrator:
    """Serves generation requests with the workers it watches.

    Attributes:
        model_name: Name under which the target model is served.
        max_context: Longest prompt plus completion, in tokens.
        vocab_size: Number of token ids.
    """

    model_name: str
    max_context: int
    vocab_size: int

    @classmethod
    async def start(cls, settings: OrchestratorSettings) -> Orchestrator:
        """Connect to Redis, load the tokenizer and watch the workers."""
        raise NotImplementedError

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Stream one completion; closing the iterator cancels it and frees the workers' caches."""
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, with the special tokens that the tokenizer puts around it."""
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, without special tokens."""
        raise NotImplementedError

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt that the tokenizer's chat template makes of `messages`."""
        raise NotImplementedError

    async def status(self) -> list[ProcessStatus]:
        """Return the state of this orchestrator, its workers and Redis."""
        raise NotImplementedError

    async def close(self) -> None:
        """Cancel what runs, and close every connection."""
        raise NotImplementedError
