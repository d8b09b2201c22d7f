"""Values that travel between client, orchestrator and workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from gammaray.checks import check_encodable, check_int, check_session_id, check_token_ids
from gammaray.errors import InvalidArgumentError
from gammaray.sampling import SamplingParams as SamplingParams

MAX_GAMMA = 64
MAX_NODES = 256
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 2**20
"""Upper bound of a prompt's log-probabilities: number of tokens x (requested alternatives + 1)."""

MAX_CACHE_SALT = 64
MAX_STOP = 16
MAX_STOP_TOKEN_IDS = 4096
MAX_PREDICTION = 2**16
"""Longest prediction, in characters or token ids: about 16,000 tokens, the longest output of OpenAI's models
that take one. It is stored with the session and read again in each turn that is resumed."""


class VerificationMethod(str, Enum):
    """How the target decides which proposed tokens to accept; all methods are lossless."""

    COUPLED = "coupled"
    REJECTION = "rejection"
    NAIVE = "naive"
    BLOCK = "block"

    @property
    def uses_draft_distributions(self) -> bool:
        """Whether tokens are tested by the distributions that they were drawn from, above temperature 0.

        These travel with the proposal. The method is exact only if they are the true ones, and if nothing
        selects proposals by the drawn tokens.
        """
        return self in (VerificationMethod.REJECTION, VerificationMethod.BLOCK)


class TokenOrigin(str, Enum):
    """Origin of an emitted token."""

    ACCEPTED = "accepted"
    CORRECTION = "correction"
    BONUS = "bonus"


class FinishReason(str, Enum):
    """Why a generation ended; OpenAI's values where they exist."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class DrafterKind(str, Enum):
    """Kind of drafter: draft model, head, look-ups in text, tokens that a grammar forces, none."""

    MODEL = "model"
    HEAD = "head"
    SUFFIX = "suffix"
    PREDICTION = "prediction"
    GRAMMAR = "grammar"
    NONE = "none"

    @property
    def is_model(self) -> bool:
        """Whether a model proposes, rather than a look-up in text."""
        return self in (DrafterKind.MODEL, DrafterKind.HEAD)


@dataclass(frozen=True)
class WorkerTotals:
    """Totals of a worker since its start; see the proto of the same name for the fields."""

    steps: int = 0
    step_blocks: int = 0
    step_us: int = 0
    ahead_lookups: int = 0
    ahead_hits: int = 0


@dataclass(frozen=True)
class SpeculationTotals:
    """Totals of an orchestrator's cycles since its start; see the proto of the same name."""

    cycles: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    tested_tokens: int = 0
    accepted_tokens: int = 0
    emitted_tokens: int = 0
    gamma_sum: int = 0
    decode_us: int = 0
    plain_us: int = 0
    requests: int = 0
    failed_requests: int = 0


@dataclass(frozen=True)
class ProcessStatus:
    """One process of the cluster; `role` is orchestrator, draft, target or redis.

    `num_queued` counts waiting or running blocks of a worker, and waiting requests of an orchestrator. Only
    workers have `cache_bytes` (KV cache in use, of `cache_budget_bytes`), `worker_totals` and `kernel` (the
    implementation of the model's forward pass), only orchestrators `speculation_totals`,
    `accepted_per_position` (entry j: accepted tokens at depth j + 1) and `unusable` (each worker that they
    know and cannot use, with its address and the reason). `clock_offset_s` is the clock of a worker or of
    Redis minus that of the orchestrator that answered, in seconds.
    """

    role: str
    pid: int
    address: str
    model: str
    healthy: bool
    sessions: int
    metrics_address: str = ""
    num_queued: int = 0
    cache_bytes: int = 0
    cache_budget_bytes: int = 0
    worker_totals: WorkerTotals | None = None
    speculation_totals: SpeculationTotals | None = None
    accepted_per_position: tuple[int, ...] = ()
    kernel: str = ""
    version: str = ""
    clock_offset_s: float | None = None
    unusable: tuple[str, ...] = ()


@dataclass(frozen=True)
class SparseDistribution:
    """A truncated, quantised distribution: probability of `token_ids[i]` is `weights[i] / 2**weight_bits`."""

    token_ids: tuple[int, ...]
    weights: tuple[int, ...]
    weight_bits: int


@dataclass(frozen=True)
class Proposal:
    """The draft's tokens for one cycle."""

    token_ids: tuple[int, ...] = ()  # tokens of the nodes, each after its parent
    parents: tuple[int, ...] | None = None  # -1 for children of the committed prefix; None for a chain
    # Which each token was drawn from; only for rejection and block verification above temperature 0.
    draft_distributions: tuple[SparseDistribution, ...] | None = None
    version: int = field(default=0, compare=False)  # of a drafter that learns; 0 is the one of the start
    drafter: DrafterKind = field(default=DrafterKind.MODEL, compare=False)  # not on the wire, nor is the rest
    worker: str = field(default="", compare=False)  # host:port of the draft worker, "" for none
    is_fallback: bool = field(default=False, compare=False)  # the allowed drafter was absent, failed or late
    is_prepared: bool = field(default=False, compare=False)  # computed before it was requested

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def depth(self) -> int:
        """Length of the longest path, in tokens."""
        if self.parents is None:
            return len(self.token_ids)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)

    def first_path(self) -> tuple[int, ...]:
        """Return the nodes from the root down by first children, which drafters put first: the likeliest."""
        if self.parents is None:
            return tuple(range(len(self.token_ids)))
        path: list[int] = []
        for node, parent in enumerate(self.parents):
            if parent == (path[-1] if path else -1):
                path.append(node)
        return tuple(path)

    def path(self, nodes: Sequence[int]) -> Proposal:
        """Return the chain of these nodes, each the child of the one before."""
        drawn = self.draft_distributions
        return replace(
            self,
            token_ids=tuple(self.token_ids[node] for node in nodes),
            parents=None,
            draft_distributions=None if drawn is None else tuple(drawn[node] for node in nodes),
        )


@dataclass(frozen=True)
class GammaPolicy:
    """How gamma is chosen: always `fixed`, or per cycle up to `max_gamma` if `fixed` is None."""

    fixed: int | None = None  # depth of every proposal, in tokens
    max_gamma: int = 0  # upper bound of an adaptive gamma; 0 is the server's bound
    max_nodes: int = 0  # upper bound of a proposal's nodes; above gamma for trees

    def validate(self) -> None:
        """Raise InvalidArgumentError for a gamma outside [0, 64], or nodes outside [0, 256]."""
        if self.fixed is not None:
            check_int("gamma", self.fixed, 0, MAX_GAMMA)
        check_int("max_gamma", self.max_gamma, 0, MAX_GAMMA)
        if self.max_gamma and self.fixed is not None and self.fixed > self.max_gamma:
            raise InvalidArgumentError(
                "gamma", f"{self.fixed} with max_gamma {self.max_gamma}", "at most max_gamma"
            )
        check_int("max_nodes", self.max_nodes, 0, MAX_NODES)


ADAPTIVE = GammaPolicy()


@dataclass(frozen=True)
class GenerationRequest:
    """A requested completion."""

    prompt: str | tuple[int, ...]  # text, or token ids of the target's vocabulary; not empty
    model: str = ""  # name of the model; empty means the one served
    sampling: SamplingParams = field(default_factory=SamplingParams)  # logits processing and seed
    max_tokens: int = 128  # upper bound of emitted tokens, at least 1
    stop: tuple[str, ...] = ()  # the completion ends before the first of these strings
    # The completion ends after the first of these or of the model's own. At most 4,096.
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # continue after end-of-sequence tokens
    # None for no log-probabilities, else the number of alternatives, in [0, 20].
    num_top_logprobs: int | None = None
    verification: VerificationMethod = VerificationMethod.COUPLED
    gamma: GammaPolicy = ADAPTIVE
    drafter: DrafterKind = DrafterKind.MODEL  # at which the request starts
    session_id: str = ""  # id of the session; empty lets the server draw one
    turn: int = 0  # turn of the session; above 0 the prompt continues the finished previous turn
    # Resume the turn after this many of its tokens; None begins it. When resuming, the prompt may be omitted;
    # otherwise the request must equal the one that began the turn.
    resume_from: int | None = None
    # The workers' caches are shared only with requests of the same salt; at most 64 characters.
    cache_salt: str = ""
    # None for no log-probabilities of the prompt, else the number of alternatives, in [0, 20]. The prompt is
    # then recomputed, even if it is cached.
    num_prompt_logprobs: int | None = None
    # What the completion is expected to resemble, text or token ids; empty for none. It is proposed where the
    # completion follows it, and affects speed only. At most 65,536 characters or token ids.
    prediction: str | tuple[int, ...] = ""
    # Whether the session is stored. A completion that is not stored has no session: it cannot be resumed,
    # continued, listed, cancelled or traced. Only without `session_id`, `turn` and `resume_from`.
    store: bool = True
    # Whether the last chunk has a signed receipt (`gammaray.receipts`). Only with coupled verification, and
    # if the server has a key for receipts.
    receipt: bool = False

    def validate(self) -> None:
        """Check all fields without the model; InvalidArgumentError names the first invalid one."""
        self._check_session()
        if not self.prompt and self.resume_from is None:
            raise InvalidArgumentError("prompt", "an empty prompt", "at least one token")
        if isinstance(self.prompt, str) and len(self.prompt) > 2**20:
            raise InvalidArgumentError("prompt", f"{len(self.prompt)} characters", f"at most {2**20}")
        if isinstance(self.prompt, str):
            check_encodable("prompt", self.prompt)
        else:
            check_token_ids("prompt", self.prompt)
        self._check_prediction()
        if self.receipt and self.verification is not VerificationMethod.COUPLED:
            got = f"true with {self.verification.value} verification"
            raise InvalidArgumentError("receipt", got, "true with coupled verification only")
        check_token_ids("stop_token_ids", self.stop_token_ids, max_ids=MAX_STOP_TOKEN_IDS)
        self.sampling.validate()
        if self.sampling.grammar and self.ignore_eos:
            raise InvalidArgumentError("ignore_eos", True, "false with a grammar, which an end completes")
        self.gamma.validate()
        check_int("max_tokens", self.max_tokens, 1, 2**31)
        if self.sampling.min_tokens > self.max_tokens:
            got = f"{self.sampling.min_tokens} with max_tokens {self.max_tokens}"
            raise InvalidArgumentError("min_tokens", got, "at most max_tokens")
        if self.num_top_logprobs is not None:
            check_int("num_top_logprobs", self.num_top_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.num_prompt_logprobs is not None:
            check_int("num_prompt_logprobs", self.num_prompt_logprobs, 0, MAX_TOP_LOGPROBS)
            if not isinstance(self.prompt, str):
                check_prompt_logprobs(self.num_prompt_logprobs, len(self.prompt))
        if len(self.stop) > MAX_STOP:
            raise InvalidArgumentError("stop", f"{len(self.stop)} strings", f"at most {MAX_STOP}")
        for text in self.stop:
            if not 1 <= len(text) <= 256:
                raise InvalidArgumentError(
                    "stop", f"a string of {len(text)} characters", "1 to 256 characters"
                )
            check_encodable("stop", text)

    def _check_prediction(self) -> None:
        if not isinstance(self.prediction, str):
            check_token_ids("prediction", self.prediction, max_ids=MAX_PREDICTION)
            return
        if len(self.prediction) > MAX_PREDICTION:
            got = f"{len(self.prediction)} characters"
            raise InvalidArgumentError("prediction", got, f"at most {MAX_PREDICTION}")
        check_encodable("prediction", self.prediction)

    def _check_session(self) -> None:
        check_session_id(self.session_id)
        check_int("turn", self.turn, 0, 2**31 - 1)
        if len(self.cache_salt) > MAX_CACHE_SALT:
            got = f"{len(self.cache_salt)} characters"
            raise InvalidArgumentError("cache_salt", got, f"at most {MAX_CACHE_SALT} characters")
        check_encodable("cache_salt", self.cache_salt)
        check_encodable("model", self.model)
        if self.resume_from is not None:
            check_int("resume_from", self.resume_from, 0, 2**31 - 1)
        continued = {"turn": self.turn > 0, "resume_from": self.resume_from is not None}
        for name, is_given in {"session_id": self.session_id, **continued}.items():
            if is_given and not self.store:
                allowed = f"true with {name}: what is not stored is no session to name or resume"
                raise InvalidArgumentError("store", "false", allowed)
        if not self.session_id and any(continued.values()):
            raise InvalidArgumentError("session_id", "no name", "the name of the session to continue")


def check_prompt_logprobs(num_top: int, num_tokens: int) -> None:
    """Refuse more log-probabilities of a prompt than `MAX_PROMPT_LOGPROBS`."""
    if num_tokens * (num_top + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidArgumentError(
            "num_prompt_logprobs",
            f"{num_top} for a prompt of {num_tokens} tokens",
            f"(num_prompt_logprobs + 1) x tokens up to {MAX_PROMPT_LOGPROBS}",
        )


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities (natural log) of a prompt under the model's own distribution, in columns.

    Entry i of `logprobs` and `ranks` is for token i + 1, as the first token has no predecessor.
    """

    token_ids: tuple[int, ...]  # the prompt's
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]  # in the vocabulary; 1 is the most likely
    num_top: int = 0  # number of most likely tokens per entry
    top_token_ids: tuple[int, ...] = ()  # `num_top` tokens per entry, most likely first
    top_logprobs: tuple[float, ...] = ()

    def top(self, entry: int, count: int | None = None) -> list[tuple[int, float]]:
        """Return at most `count` most likely tokens of an entry with their log-probabilities."""
        start = entry * self.num_top
        end = start + (self.num_top if count is None else min(count, self.num_top))
        return list(zip(self.top_token_ids[start:end], self.top_logprobs[start:end], strict=True))


@dataclass(frozen=True)
class TopLogprob:
    """One of the most likely tokens at a position."""

    token_id: int
    logprob: float
    token_bytes: bytes = b""


@dataclass(frozen=True)
class EmittedToken:
    """One emitted token, its origin and, if requested, its log-probability.

    `drafter` proposed the token; None for the target's own tokens, and for replayed tokens of a resumed turn.
    """

    token_id: int
    origin: TokenOrigin
    token_bytes: bytes = b""
    logprob: float | None = None
    top_logprobs: tuple[TopLogprob, ...] = ()
    drafter: DrafterKind | None = None


@dataclass(frozen=True)
class Usage:
    """Token counts of a completion; see the proto of the same name for the fields."""

    prompt_tokens: int
    completion_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class SpeculationSummary:
    """Speculation summary of one completion; see the proto of the same name for the fields."""

    cycles: int
    tokens_per_cycle: float
    alpha: float | None
    acceptance_rate: float | None
    accepted_lengths: tuple[int, ...]
    gamma_mean: float
    draft_ms: float
    verify_ms: float
    other_ms: float
    total_ms: float
    speedup_estimate: float | None
    model_cycles: int = 0
    plain_cycles: int = 0
    fallback_cycles: int = 0
    draft_workers: int = 0
    suffix_cycles: int = 0
    prediction_cycles: int = 0
    grammar_cycles: int = 0
    head_cycles: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class Chunk:
    """A piece of a completion; the last one carries `finish_reason`, `usage` and `summary`.

    `offset` counts the turn's tokens before this piece; resume from offset + len(tokens). `prompt_tokens`
    counts the tokens of the turn's prompt; 0 if the server does not report it. The first piece carries
    `prompt_logprobs` if requested, except when a turn is resumed that has emitted tokens. The last one also
    carries `receipt`, which covers the whole turn, if requested.
    """

    session_id: str
    text: str
    tokens: tuple[EmittedToken, ...] = ()
    seed: int = 0
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    summary: SpeculationSummary | None = None
    offset: int = 0
    turn: int = 0
    prompt_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    receipt: str = ""

    @property
    def is_opening(self) -> bool:
        """Whether the piece only says that the request was admitted: without tokens, and not the last one."""
        return not self.tokens and self.finish_reason is None
