"""What `services.qualify` measures, and what it found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QualifyTask:
    """What to measure.

    Attributes:
        target: Directory, hub name, GGUF file or "demo".
        drafts: The same for each candidate that drafts on a draft worker.
        heads: The same for each candidate that drafts in the target worker: EAGLE-3 heads, and draft models.
        prompts: Texts to continue.
        chat: Whether each prompt is a user's message, to be put into the target's chat template.
        max_tokens: Upper bound of tokens per completion; end-of-sequence tokens end it earlier.
        gammas: Depths of chains; gamma 0 is always measured.
        temperatures: Temperatures to measure, with coupled verification.
        rtt_ms: Network time that a proposal of a draft worker adds to a cycle.
        min_speedup: Smallest speedup at which speculation pays.
    """

    target: str
    drafts: tuple[str, ...]
    prompts: tuple[str, ...]
    max_tokens: int
    gammas: tuple[int, ...]
    temperatures: tuple[float, ...]
    heads: tuple[str, ...] = ()
    chat: bool = False
    rtt_ms: float = 0.0
    min_speedup: float = 1.0


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a model; those after `refusal` are unknown where it is not empty.

    Attributes:
        name: The name given in the task.
        refusal: Why it cannot be served exactly; "" if it can.
        vocab_size: Number of its token ids; of a draft with another vocabulary the target's.
        max_context: Longest sequence, in tokens.
        kernel: Implementation of its forwards, see `Engine.kernel`.
    """

    name: str
    refusal: str = ""
    vocab_size: int = 0
    max_context: int = 0
    kernel: str = ""


@dataclass(frozen=True)
class Depth:
    """Chains of one gamma.

    Attributes:
        gamma: Tokens of a proposal.
        tokens_per_cycle: Mean of the cycles with a whole proposal.
        draft_ms: Median time of a proposal, without the first of a completion.
        verify_ms: The same for its verification.
        cycle_ms: Both, and `rtt_ms` for a draft worker.
        speedup: Over plain decoding.
    """

    gamma: int
    tokens_per_cycle: float
    draft_ms: float
    verify_ms: float
    cycle_ms: float
    speedup: float


@dataclass(frozen=True)
class Trial:
    """All completions at one temperature, those of gamma 0 among them.

    Attributes:
        temperature: 0 is greedy.
        compared: Completions compared with those of gamma 0.
        equal: Completions with the same tokens.
        ties: Completions that diverge where the two best scores differ by rounding only.
        divergence: Description of the first other divergence; "" if there is none.
        tokens: Tokens compared.
        plain_ms: Median time of a cycle of plain decoding; None: too few tokens.
        draft_step_ms: Median time of one forward pass of the draft; None: no whole proposal.
        tested: Number of tested tokens by position in the proposal.
        accepted: Number of accepted tokens by position in the proposal.
        depths: Results by gamma, without those at which no proposal was whole.
    """

    temperature: float
    compared: int
    equal: int
    ties: int
    divergence: str = ""
    tokens: int = 0
    plain_ms: float | None = None
    draft_step_ms: float | None = None
    tested: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    depths: tuple[Depth, ...] = ()

    @property
    def is_lossless(self) -> bool:
        """Whether no completion diverges by more than rounding."""
        return self.equal + self.ties == self.compared

    @property
    def alpha(self) -> float:
        """Accepted over tested tokens; 0 without any."""
        return sum(self.accepted) / max(1, sum(self.tested))

    @property
    def best(self) -> Depth:
        """The depth with the largest speedup; there must be one."""
        return max(self.depths, key=lambda depth: depth.speedup)


@dataclass(frozen=True)
class PairFacts:
    """Measurements of a target and one candidate.

    Attributes:
        target: Facts about the target.
        draft: Facts about the candidate.
        is_local: Whether it drafts in the target worker, so that no network is between them.
        shared: If the vocabularies differ, the share of the prompts' tokens that the candidate can propose.
        trials: Results by temperature; none if the pair cannot be served.
    """

    target: ModelFacts
    draft: ModelFacts
    is_local: bool = False
    shared: float | None = None
    trials: tuple[Trial, ...] = ()
