"""What `gammaray qualify` measures; also its options."""

from __future__ import annotations

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

    For each candidate `gammaray up` starts a cluster, which is measured as `gammaray bench` does.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    target: str = Field(
        min_length=1, description="Directory or hub name of the target; 'demo' is the demo pair's."
    )
    draft: _Names = Field(
        (),
        description="Directory or hub name of a draft on a draft worker; repeatable.",
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
    tokens: int = Field(96, ge=2, description="Tokens per completion.")
    repeats: int = Field(1, ge=1, le=100, description="Repetitions, of which the median counts.")
    gammas: _Gammas = Field(
        "1,2,4,8", validate_default=True, description="Depths of chains; gamma 0 is always measured."
    )
    temperatures: _Temperatures = Field("0,1", validate_default=True, description="Temperatures.")
    min_speedup: float = Field(1.1, ge=0.01, le=100, description="Speedup that a draft must reach.")

    @field_validator("head")
    @classmethod
    def _check_candidates(cls, head: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not head and not info.data.get("draft"):
            raise ValueError("got no candidate, allowed: a draft or a head")
        return head
