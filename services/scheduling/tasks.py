"""Objects passed between a worker's streams and the thread that owns its engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gammaray.blocks import Shape, TokenLogprobs
from gammaray.checks import MAX_TOKEN_IDS
from gammaray.errors import GammarayError, InvalidArgumentError
from gammaray.grammar.matcher import GrammarState
from gammaray.types import Proposal, SamplingParams, VerificationMethod

MAX_SESSION_ID = 256
"""Longest session id, in characters: the tenant's name plus the client's own id of at most 128."""


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What a worker must know about a session in addition to its tokens."""

    params: SamplingParams  # logits processing; the seed is set
    method: VerificationMethod  # of the whole session
    prompt_length: int  # number of leading tokens that are the prompt
    eos_token_ids: tuple[int, ...]  # masked until `params.min_tokens` were produced; they end a proposal
    cache_salt: str | None = None  # sessions with the same salt share caches; None: the session shares none
    adapter: str = ""  # LoRA adapter that the target applies; empty: none
    no_learning: bool = False  # whether nothing of the session may be kept to learn from

    @property
    def num_ids(self) -> int:
        """Size of the spec: the number of its token ids, and of its grammar's characters."""
        params = self.params
        lists = (params.logit_bias, params.allowed_token_ids, params.banned_token_ids, self.eos_token_ids)
        return sum(map(len, lists)) + len(params.grammar)

    def validate(self, base_position: int, vocab_size: int) -> None:
        """Check the spec as untrusted data; InvalidArgumentError names the first wrong field."""
        self.params.validate(vocab_size)
        if self.params.seed is None:
            allowed = "an integer, which the orchestrator always sets"
            raise InvalidArgumentError("spec.sampling.seed", None, allowed)
        if not 1 <= self.prompt_length <= base_position:
            raise InvalidArgumentError("spec.prompt_length", self.prompt_length, f"1 to {base_position}")
        if len(self.eos_token_ids) > vocab_size:
            got = f"{len(self.eos_token_ids)} ids"
            raise InvalidArgumentError("spec.eos_token_ids", got, f"at most {vocab_size}")
        if any(not 0 <= token_id < vocab_size for token_id in self.eos_token_ids):
            raise InvalidArgumentError("spec.eos_token_ids", self.eos_token_ids, f"below {vocab_size}")
        if self.cache_salt is not None and len(self.cache_salt) > MAX_SESSION_ID:
            got = f"{len(self.cache_salt)} characters"
            raise InvalidArgumentError("spec.cache_salt", got, f"at most {MAX_SESSION_ID}")


class Release(NamedTuple):
    """The end of a session on a worker; a session with a newer owner is kept."""

    session_id: str
    epoch: int = 0  # of the owner that ends it; 0 matches any
    forgets: bool = False  # whether its retained cache, for others with the same prefix, is dropped, too


@dataclass(slots=True, eq=False, kw_only=True)
class Task:
    """One block of a stream, waiting for or in the engine."""

    request_id: int
    session_id: str
    epoch: int
    base_position: int  # number of committed tokens
    context_start: int  # position of the first token of `context`
    context: Sequence[int]  # the last committed tokens
    spec: SessionSpec | None  # None: the worker has it
    deadline: float  # `time.monotonic()` past which the answer is not needed
    deliver: Callable[[Any, Reply], None]  # takes the reply; called in the event loop
    arrived: float = field(default_factory=time.monotonic)
    cancelled: bool = False  # set by the event loop when the stream has ended; the next step drops the work
    traceparent: str = ""  # of the calling span; empty when the session is not sampled
    grammar: GrammarState | None = None  # before the first token; None without one, or before it is compiled
    is_notice: bool = False  # whether the caller has a proposal already and does not wait for an answer
    is_ahead: bool = False  # whether the block was answered, and what follows is decoded ahead
    is_conditional: bool = False  # whether it is served only if the block before it emits `context`

    @property
    def num_ids(self) -> int:
        return len(self.context) + (0 if self.spec is None else self.spec.num_ids)

    def validate(self, vocab_size: int, max_context: int) -> None:
        """Check what does not depend on the session's state; InvalidArgumentError names the wrong field."""
        if not 1 <= len(self.session_id) <= MAX_SESSION_ID:
            raise InvalidArgumentError("session_id", self.session_id, f"1 to {MAX_SESSION_ID} characters")
        if not 1 <= self.base_position <= max_context:
            raise InvalidArgumentError("base_position", self.base_position, f"1 to {max_context}")
        end = self.context_start + len(self.context)
        if end != self.base_position:
            raise InvalidArgumentError("context", f"an end at {end}", f"base_position {self.base_position}")
        if len(self.context) > MAX_TOKEN_IDS:
            raise InvalidArgumentError("context", f"{len(self.context)} ids", f"at most {MAX_TOKEN_IDS}")
        if self.context and max(self.context) >= vocab_size:
            raise InvalidArgumentError("context.token_ids", max(self.context), f"below {vocab_size}")
        if self.spec is not None:
            self.spec.validate(self.base_position, vocab_size)


@dataclass(slots=True, eq=False, kw_only=True)
class VerifyTask(Task):
    proposal: Proposal
    num_top_logprobs: int | None  # alternatives per emitted token; None: no log-probabilities
    num_prompt_logprobs: int | None = None  # the same for each token of the prompt
    head: Shape | None = None  # what the head drafts first; depth 0: nothing; None: no states are kept either
    num_ahead: int = 0  # tokens that are decoded after the answer, before they are asked for; an upper bound

    @property
    def reads_anew(self) -> bool:
        """Whether all committed tokens must be fed because their logits are needed, cached or not."""
        return self.num_prompt_logprobs is not None


@dataclass(slots=True)
class AheadWork:
    """Draft-ahead after a block of a sampled session: its first and last `time.monotonic()`, its forwards."""

    began: float
    ended: float = 0.0
    num_forwards: int = 0
    is_stopped: bool = False  # whether more would have followed


@dataclass(slots=True, eq=False, kw_only=True)
class ProposeTask(Task):
    shape: Shape  # bounds of the proposal; its depth is 1 or more
    wants_ahead: bool = False  # whether proposals prepared to follow this one are sent when they are complete
    ahead: AheadWork | None = None  # what was drafted ahead; None: nothing, or the session is not sampled

    def validate(self, vocab_size: int, max_context: int) -> None:
        # A base position beyond the draft's context is no error: the proposal is then empty.
        Task.validate(self, vocab_size, max(max_context, self.base_position))


@dataclass(frozen=True, slots=True)
class NeedTokens:
    """The worker lacks the committed tokens from `position` on; at 0 also the spec."""

    position: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepared proposal for one outcome of `task`'s: the tokens from its base position on."""

    task: ProposeTask
    token_ids: Sequence[int]
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class AheadTokens:
    """Tokens that follow those of an answer, each drawn plainly before it was asked for."""

    task: VerifyTask
    base_position: int  # absolute position of the first one
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()  # one per token if the task has them
    is_last: bool = False  # whether no more will come without another block


@dataclass(slots=True)
class Timing:
    """Time spent on one block; see the proto WorkerTiming for each field.

    Not sent: `mask_us`, microseconds in which the masks of a grammar were computed, during the forward, and
    `head_us`, those in which a head drafted for the blocks of the batch, before it.
    """

    queue_us: int = 0
    compute_us: int = 0
    forward_us: int = 0
    batch_size: int = 0
    batch_tokens: int = 0
    num_forwards: int = 0
    cached_tokens: int = 0
    batch_rows: int = 0
    mask_us: int = 0
    head_us: int = 0

    def add(self, step: Timing) -> None:
        """Add one step that served the block."""
        self.compute_us += step.compute_us
        self.forward_us += step.forward_us
        self.batch_size = max(self.batch_size, step.batch_size)
        self.batch_tokens += step.batch_tokens
        self.batch_rows += step.batch_rows
        self.num_forwards += step.num_forwards


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one block; types of `outcome` other than the two named here are specific to the worker.

    An outcome of None is not sent; AheadWork is for the trace alone.
    """

    request_id: int
    session_id: str
    outcome: NeedTokens | GammarayError | Any
    timing: Timing = field(default_factory=Timing)
    is_ahead: bool = False  # whether it follows the answer
