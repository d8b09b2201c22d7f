"""What `python -m services.qualify` is asked and what it answers; travels as JSON between two processes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from gammaray.types import MAX_GAMMA

__all__ = ["Equality", "ModelFacts", "PairFacts", "QualifyTask", "Run"]

PLAIN_GAMMA = 0


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class QualifyTask(_Frozen):
    """What is measured.

    Attributes:
        target: Directory, hub name or "demo".
        drafts: The same of each candidate.
        prompts: Texts to continue.
        max_tokens: Upper bound of tokens per completion; end-of-sequence tokens end one before.
        gammas: Depths of chains; gamma 0 is always measured.
        temperatures: Each is measured by itself, with coupled verification.
        device: As of a worker; None leaves it to the environment or the default.
        dtype: The same.
        threads: The same.
        deterministic: The same.
    """

    target: str
    drafts: tuple[str, ...]
    prompts: tuple[str, ...]
    max_tokens: int
    gammas: tuple[int, ...]
    temperatures: tuple[float, ...]
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None
    deterministic: bool | None = None


class ModelFacts(_Frozen):
    """What was found out about a model.

    Attributes:
        name: As it was given.
        architecture: Its `model_type`; "" when transformers does not know it.
        refusal: Why it cannot be served exactly; "" when it can. What follows is then unknown.
        vocab_size: Token ids it knows; 0: unknown.
        tokenizer_size: Tokens of its tokenizer; 0: it has none.
        tokenizer_sha256: Fingerprint by which workers are matched; "" without a tokenizer.
        max_context: Longest sequence, in tokens; 0: unknown.
        device: Where it ran.
        dtype: Its arithmetic.
    """

    name: str
    architecture: str = ""
    refusal: str = ""
    vocab_size: int = 0
    tokenizer_size: int = 0
    tokenizer_sha256: str = ""
    max_context: int = 0
    device: str = ""
    dtype: str = ""


class Run(_Frozen):
    """All completions at one gamma and temperature.

    Attributes:
        temperature: 0 is greedy.
        gamma: Depth of the chains; 0 is plain decoding.
        cycles: Verifications.
        emitted: Tokens they gave.
        whole_cycles: Those whose proposal was `gamma` tokens long.
        whole_emitted: Tokens these gave.
        tested: How many proposed tokens were tested, by place in the proposal, `[gamma]`.
        accepted: How many of these were accepted, `[gamma]`.
        verify_ms: Median time of the target in a whole cycle, the first of a completion left out; None: there
            was none.
        draft_ms: The same of a whole proposal; None at gamma 0.
        draft_step_ms: The same of one forward of the draft.
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
    """Completions with speculation beside those of gamma 0, of one temperature.

    Attributes:
        temperature: 0 is greedy.
        compared: Completions.
        equal: Those with the same tokens.
        ties: Those that part where the two best scores differ by rounding only.
        first: The first that parts elsewhere, in words; "" when there is none.
    """

    temperature: float
    compared: int
    equal: int
    ties: int
    first: str = ""

    @property
    def is_lossless(self) -> bool:
        """Whether no completion differs by more than rounding."""
        return self.equal + self.ties == self.compared


class PairFacts(_Frozen):
    """A target and one candidate.

    Attributes:
        target: The target.
        draft: The candidate.
        runs: Empty when the pair cannot be served.
        equality: One per temperature; empty when the pair cannot be served.
    """

    target: ModelFacts
    draft: ModelFacts
    runs: tuple[Run, ...] = ()
    equality: tuple[Equality, ...] = ()


def check_gamma(gamma: int) -> int:
    """Return `gamma` when it can be measured beside gamma 0.

    Raises:
        ValueError: It is below 1 or above what a proposal may have.
    """
    if not 1 <= gamma <= MAX_GAMMA:
        raise ValueError(f"gamma: got {gamma}, allowed: 1 to {MAX_GAMMA}")
    return gamma
