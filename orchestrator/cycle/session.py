"""The state of one session: prompt, emitted tokens, and when it ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gammaray.errors import DeadlineExceededError
from gammaray.types import FinishReason, PromptLogprobs, Proposal, SamplingParams, VerificationMethod
from orchestrator.cycle.types import Call


class TextStream(Protocol):
    """Turns emitted tokens into text and watches for stop strings."""

    def push(self, token_id: int) -> bool:
        """Add the next token; return True if it completes a stop string; the text ends before that."""

    def take(self, *, final: bool) -> str:
        """Return the complete text that was not yet taken; with `final` all remaining text."""


@dataclass
class Session:
    """The state of one completion; owned by one coroutine."""

    session_id: str  # the same in all components
    prompt: tuple[int, ...]
    params: SamplingParams  # the seed is set
    method: VerificationMethod  # the same in every cycle
    max_tokens: int  # upper bound of emitted tokens; prompt plus completion fit the context
    text: TextStream  # detokeniser of the emitted tokens
    eos_token_ids: frozenset[int] = frozenset()  # the model's; empty when they do not end the completion
    stop_token_ids: frozenset[int] = frozenset()  # further tokens that end the completion
    num_top_logprobs: int | None = None  # alternatives per token; None: no log-probabilities
    epoch: int = 1  # fencing number of the owner: workers and store refuse older epochs
    turn: int = 0  # from 0; the prompt contains the earlier turns
    cache_salt: str = ""  # workers share caches only between requests of one tenant with the same salt
    num_prompt_logprobs: int | None = None  # alternatives; None: no log-probabilities of the prompt
    adapter: str = ""  # of LoRA, which the target applies; empty: none
    is_stored: bool = True  # else workers keep nothing after the completion either
    token_ids: list[int] = field(init=False)  # committed: prompt, then emitted; positions are absolute
    finish_reason: FinishReason | None = field(init=False, default=None)  # set once the completion has ended
    state: bytes = field(init=False, default=b"")  # handover to the next owner, stored with the next commit
    deadline: float = field(init=False, default=math.inf)  # the caller's, as `time.monotonic()`
    # Returns the record of this cycle's calls to a worker, by role and address; None: no records.
    calls: Callable[[str, str], Call] | None = field(init=False, default=None)
    # Takes a proposal that was prepared for an outcome of this cycle's verification; None: not wanted.
    on_prepared: Callable[[Sequence[int], Proposal], None] | None = field(init=False, default=None)
    num_cached: int = field(init=False, default=0)  # tokens of the prompt that the target worker had cached
    # Set between the first verdict and the first chunk.
    prompt_logprobs: PromptLogprobs | None = field(init=False, default=None)
    model_identity: str = field(init=False, default="")  # of the target that emitted the tokens; "" for any
    uses_head: bool = field(init=False, default=False)  # the target keeps hidden states for its head
    has_head: bool = field(init=False, default=False)  # the target worker in use has a head, as far as known
    takes_trees: bool = field(init=False, default=True)  # that worker verifies trees, as far as known
    digest: str = field(init=False, default="")  # key in the store of the request that began the turn

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt)

    @property
    def num_committed(self) -> int:
        """Number of committed tokens, which is the absolute position of the next token."""
        return len(self.token_ids)

    @property
    def num_emitted(self) -> int:
        return len(self.token_ids) - len(self.prompt)

    @property
    def remaining(self) -> int:
        return self.max_tokens - self.num_emitted

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether the next verdict must include the log-probabilities of the prompt."""
        return self.num_prompt_logprobs is not None and self.num_emitted == 0

    @property
    def needs_draft_distributions(self) -> bool:
        """Whether verification needs the distribution that each proposed token was drawn from."""
        return self.method.uses_draft_distributions and self.params.temperature > 0

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() >= self.deadline

    def left_s(self, timeout_s: float) -> float:
        """Return the timeout, shortened to the caller's deadline; DeadlineExceededError once that passed."""
        if self.deadline == math.inf:
            return timeout_s
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceededError("the caller's deadline came before the end of the completion")
        return min(timeout_s, left_s)

    def commit(self, token_ids: Sequence[int]) -> int:
        """Append tokens up to the one that ends the completion, then set `finish_reason`; return how many."""
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
