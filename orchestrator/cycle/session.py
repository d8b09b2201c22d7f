"""The state of one session: its prompt, what it emitted so far, and when it ends."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gammaray.errors import DeadlineExceededError
from gammaray.types import FinishReason, PromptLogprobs, SamplingParams, VerificationMethod
from orchestrator.cycle.types import Call

__all__ = ["CallLog", "Session", "TextStream"]


class TextStream(Protocol):
    """Turns emitted tokens into text and watches for stop strings."""

    def push(self, token_id: int) -> bool:
        """Take the next token; True when it completes a stop string, before which the text then ends."""

    def take(self, *, final: bool) -> str:
        """Return the text that is complete and not yet taken; all that is left when `final`."""


class CallLog(Protocol):
    """Takes down what workers are asked; `orchestrator.telemetry.cycle_log.CycleLog` is the real one."""

    def call(self, role: str, address: str) -> Call:
        """Return the note of what a worker is asked in this cycle."""


@dataclass
class Session:
    """One completion in the making; owned by one coroutine.

    Args:
        session_id: Its name, everywhere.
        prompt: Token ids of the prompt.
        params: Logits processing; the seed is set.
        method: Verification method, the same in every cycle.
        max_tokens: Upper bound of emitted tokens; prompt and completion together fit into the context.
        text: Detokeniser of the emitted tokens.
        eos_token_ids: The model's end-of-sequence tokens; empty when they do not end the completion.
        stop_token_ids: Further tokens that end it.
        num_top_logprobs: None for no log-probabilities, else how many alternatives per token.
        epoch: Fencing number of the owner: workers and store refuse older ones.
        turn: Turn of the session, from 0; the prompt holds the turns before.
        cache_salt: The workers' caches are shared only with the tenant's requests of the same salt.
        num_prompt_logprobs: None for no log-probabilities of the prompt, else how many alternatives.

    Attributes:
        token_ids: The committed tokens: prompt, then emitted. Positions are absolute.
        finish_reason: Set once the completion has ended.
        state: What an heir should know, to be stored with the next commit.
        deadline: `time.monotonic()` past which nobody waits for the completion.
        calls: Where to note what workers are asked; None for nowhere.
        num_cached: Tokens of the prompt that the target worker had cached.
        prompt_logprobs: Those of the prompt, between the first verdict and the first chunk.
        model_identity: Of the target whose tokens these are (`orchestrator.workers.verifier`); "" for any.
        digest: Names the request that began the turn in the store, see `orchestrator.storage.session_store`.
    """

    session_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    method: VerificationMethod
    max_tokens: int
    text: TextStream
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    num_top_logprobs: int | None = None
    epoch: int = 1
    turn: int = 0
    cache_salt: str = ""
    num_prompt_logprobs: int | None = None
    token_ids: list[int] = field(init=False)
    finish_reason: FinishReason | None = field(init=False, default=None)
    state: bytes = field(init=False, default=b"")
    deadline: float = field(init=False, default=math.inf)
    calls: CallLog | None = field(init=False, default=None)
    num_cached: int = field(init=False, default=0)
    prompt_logprobs: PromptLogprobs | None = field(init=False, default=None)
    model_identity: str = field(init=False, default="")
    digest: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt)

    @property
    def num_committed(self) -> int:
        """Number of committed tokens: the absolute position of the next one."""
        return len(self.token_ids)

    @property
    def num_emitted(self) -> int:
        """Number of tokens emitted so far."""
        return len(self.token_ids) - len(self.prompt)

    @property
    def remaining(self) -> int:
        """How many more tokens may be emitted."""
        return self.max_tokens - self.num_emitted

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether the next verdict has to tell log-probabilities of the prompt."""
        return self.num_prompt_logprobs is not None and self.num_emitted == 0

    @property
    def needs_draft_distributions(self) -> bool:
        """Whether verification needs the law each proposed token was drawn from."""
        return self.method is VerificationMethod.REJECTION and self.params.temperature > 0

    @property
    def is_overdue(self) -> bool:
        """Whether the caller's deadline is over."""
        return time.monotonic() >= self.deadline

    def left_s(self, timeout_s: float) -> float:
        """Return how much of a timeout the caller's deadline leaves.

        Raises:
            DeadlineExceededError: It is over.
        """
        if self.deadline == math.inf:
            return timeout_s
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceededError("the caller's deadline came before the end of the completion")
        return min(timeout_s, left_s)

    def commit(self, token_ids: Sequence[int]) -> int:
        """Append tokens up to the one that ends the completion, and set `finish_reason` there.

        Returns:
            How many of them were appended, at least 1.
        """
        for count, token_id in enumerate(token_ids, start=1):
            self.token_ids.append(token_id)
            if self._ends_with(token_id):
                self.finish_reason = FinishReason.STOP
                return count
            if self.remaining == 0:
                self.finish_reason = FinishReason.LENGTH
                return count
        return len(token_ids)

    def _ends_with(self, token_id: int) -> bool:
        if token_id in self.eos_token_ids:
            return True  # end-of-sequence tokens have no text
        return self.text.push(token_id) or token_id in self.stop_token_ids
