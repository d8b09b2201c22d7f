"""Input and output of `python -m services.qualify`, exchanged as JSON."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from gammaray.types import MAX_GAMMA


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class QualifyTask(_Frozen):
    """What to measure.

    Attributes:
        target: Directory, hub name or "demo".
        drafts: The same for each candidate that drafts on a draft worker.
        heads: The same for each candidate that drafts in the target worker: EAGLE-3 heads, and draft models.
        prompts: Texts to continue.
        chat: Whether each prompt is a user's message, to be put into the target's chat template.
        max_tokens: Upper bound of tokens per completion; end-of-sequence tokens end it earlier.
        gammas: Depths of chains; gamma 0 is always measured.
        temperatures: Temperatures to measure, with coupled verification.
        rtt_ms: Network time of a cycle beyond that of plain decoding.
        min_speedup: Smallest speedup at which speculation pays.
        error: Probability, at most, that measuring stops with the wrong answer at a temperature; 0: it does
            not stop before all completions are made.
        draft_weights: The worker setting, of drafts and heads; None: environment or default, as all others.
    """

    target: str
    drafts: tuple[str, ...]
    heads: tuple[str, ...] = ()
    prompts: tuple[str, ...]
    max_tokens: int
    gammas: tuple[int, ...]
    temperatures: tuple[float, ...]
    chat: bool = False
    rtt_ms: float = 0.0
    min_speedup: float = 1.0
    error: float = 0.0
    draft_weights: str | None = None


class ModelFacts(_Frozen):
    """Properties of a model.

    Attributes:
        name: The name given in the task.
        architecture: Its `model_type`; "" when transformers does not know it.
        refusal: Why it cannot be served exactly (the following fields are then unknown); "" if it can.
        vocab_size: Size of its vocabulary; 0: unknown.
        tokenizer_sha256: Fingerprint by which workers are matched; "" without a tokenizer.
        max_context: Longest sequence, in tokens; 0: unknown.
        device: Device it ran on.
        dtype: Data type it ran in.
    """

    name: str
    architecture: str = ""
    refusal: str = ""
    vocab_size: int = 0
    tokenizer_sha256: str = ""
    max_context: int = 0
    device: str = ""
    dtype: str = ""


class Run(_Frozen):
    """All completions at one gamma and temperature.

    Attributes:
        temperature: 0 is greedy.
        gamma: Depth of the chains; 0 is plain decoding.
        cycles: Number of verifications.
        emitted: Tokens emitted in all cycles.
        whole_cycles: Cycles whose proposal was `gamma` tokens long.
        whole_emitted: Tokens emitted in whole cycles.
        tested: Number of tested tokens by position in the proposal, `[gamma]`.
        accepted: Number of accepted tokens by position in the proposal, `[gamma]`.
        verify_ms: Median time of the target in whole cycles, without the first of a completion; None if there
            was none.
        draft_ms: The same for a whole proposal; None at gamma 0.
        draft_step_ms: The same for one forward pass of the draft.
    """

    temperature: float
    gamma: int
    cycles: int
    emitted: int
    whole_cycles: int
    whole_emitted: int
    tested: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    verify_ms: float | None = None
    draft_ms: float | None = None
    draft_step_ms: float | None = None


class Equality(_Frozen):
    """Comparison of completions with speculation and those of gamma 0, at one temperature.

    Attributes:
        temperature: 0 is greedy.
        compared: Completions compared, as far as they were made.
        equal: Completions with the same tokens.
        ties: Completions that diverge where the two best scores differ by rounding only.
        first: Description of the first other divergence; "" if there is none.
        tokens: Tokens compared.
    """

    temperature: float
    compared: int
    equal: int
    ties: int
    first: str = ""
    tokens: int = 0

    @property
    def is_lossless(self) -> bool:
        """Whether no completion diverges by more than rounding."""
        return self.equal + self.ties == self.compared


class Overlap(_Frozen):
    """What two different vocabularies share.

    Attributes:
        shared: Tokens of the target that the draft can propose one by one.
        prompt_share: Their share of the prompts' tokens, in [0, 1].
    """

    shared: int
    prompt_share: float


class Decision(_Frozen):
    """Result of the sequential test at one temperature.

    Attributes:
        temperature: 0 is greedy.
        pays: Whether speculation reaches the smallest speedup at any gamma; None: not certain.
        error: Probability of the opposite, at most. It covers the tokens per cycle; the median times of
            cycles are taken as exact.
    """

    temperature: float
    pays: bool | None
    error: float


class PairFacts(_Frozen):
    """Measurements of a target and one candidate.

    Attributes:
        target: The target.
        draft: The candidate.
        is_local: Whether the candidate drafts in the target worker, so that a proposal takes no network time.
        overlap: Of the vocabularies; None if they are equal, or the pair cannot be served.
        runs: Empty when the pair cannot be served.
        equality: One per temperature; empty when the pair cannot be served.
        decisions: One per temperature that was tested sequentially.
    """

    target: ModelFacts
    draft: ModelFacts
    is_local: bool = False
    overlap: Overlap | None = None
    runs: tuple[Run, ...] = ()
    equality: tuple[Equality, ...] = ()
    decisions: tuple[Decision, ...] = ()


def check_gamma(gamma: int) -> int:
    """Check that `gamma` can be measured in addition to gamma 0, and return it.

    Raises:
        ValueError: It is below 1 or above the maximum length of a proposal.
    """
    if not 1 <= gamma <= MAX_GAMMA:
        raise ValueError(f"gamma: got {gamma}, allowed: 1 to {MAX_GAMMA}")
    return gamma
