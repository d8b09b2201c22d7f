"""What `services.qualify` measures, which is also the options of `gammaray qualify`, and what it found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from gammaray.bench.prompts import NUM_PROMPTS
from gammaray.config import REPEATABLE
from gammaray.types import MAX_GAMMA


def _parts(given: Any) -> Any:
    return [part.strip() for part in given.split(",")] if isinstance(given, str) else given


def _unique(given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(given))


_Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], AfterValidator(_unique)]
_Gammas = Annotated[
    tuple[Annotated[int, Field(ge=1, le=MAX_GAMMA)], ...],
    BeforeValidator(_parts),
    AfterValidator(lambda given: tuple(sorted(set(given)))),
]
_Temperatures = Annotated[
    tuple[Annotated[float, Field(ge=0, le=100)], ...], BeforeValidator(_parts), AfterValidator(_unique)
]


class QualifyTask(BaseModel):
    """Check whether drafts or heads suit a target: served exactly, lossless, and faster on this machine.

    Both models run alternately in one process; no cluster is needed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    target: str = Field(
        min_length=1, description="Directory, hub name or GGUF file of the target; 'demo' is the demo pair's."
    )
    draft: _Names = Field(
        (),
        description="Directory, hub name or GGUF file of a draft on a draft worker; repeatable.",
        json_schema_extra=REPEATABLE,
    )
    head: _Names = Field(
        (),
        validate_default=True,
        description="Directory or hub name of what drafts in the target worker: an EAGLE-3 head, or a draft "
        "model of the same vocabulary; repeatable.",
        json_schema_extra=REPEATABLE,
    )
    prompts: str = Field(
        "", description="File of prompts of the expected traffic: one per line, or a JSON list of strings."
    )
    num_prompts: int = Field(
        6,
        ge=1,
        le=NUM_PROMPTS,
        description="Without --prompts: number of own ones, code, prose and repetitive text in turn.",
    )
    chat: bool = Field(False, description="Each prompt is a user's message, in the target's chat template.")
    tokens: int = Field(96, ge=2, description="Maximum tokens per completion.")
    gammas: _Gammas = Field(
        "1,2,4,8", validate_default=True, description="Depths of chains; gamma 0 is always measured."
    )
    temperatures: _Temperatures = Field(
        "0,1", validate_default=True, description="Temperatures, with coupled verification."
    )
    rtt_ms: float = Field(
        0.5, ge=0, le=1e6, description="Network time that a proposal of a draft worker adds to a cycle."
    )
    min_speedup: float = Field(1.1, ge=0.01, le=100, description="Speedup that a draft must reach.")

    @field_validator("head")
    @classmethod
    def _check_candidates(cls, head: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not head and not info.data.get("draft"):
            raise ValueError("got no candidate, allowed: a draft or a head")
        return head


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
