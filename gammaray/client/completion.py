"""A finished completion, joined from its chunks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gammaray.client.structured import OutputForm
from gammaray.errors import InternalError
from gammaray.types import Chunk, EmittedToken, FinishReason, PromptLogprobs, SpeculationSummary, Usage


@dataclass(frozen=True)
class Completion:
    """A finished completion."""

    text: str  # cut before a stop string
    tokens: tuple[EmittedToken, ...]  # the emitted tokens with their origins
    finish_reason: FinishReason
    usage: Usage
    summary: SpeculationSummary
    seed: int  # the seed used: the same request with it gives the same tokens
    session_id: str
    prompt_logprobs: PromptLogprobs | None = None  # if requested
    receipt: str = ""  # the signed receipt, for `gammaray check`; empty if none was requested
    form: OutputForm = field(default=OutputForm(), repr=False, compare=False)  # that was asked for

    @property
    def parsed(self) -> Any:
        """The object that the text stands for: an instance of the type that was given as `json_schema`, what
        `json.loads` returns where a schema was given, else None.

        Raises:
            IncompleteOutputError: The text was cut, for example by `max_tokens` or a stop string.
        """
        return self.form.parsed(self.text, self.finish_reason.value)

    @classmethod
    def from_chunks(cls, chunks: Iterable[Chunk], form: OutputForm | None = None) -> Completion:
        """Join the chunks of one completion; InternalError if the last one is missing."""
        text = ""
        tokens: list[EmittedToken] = []
        last: Chunk | None = None
        prompt_logprobs: PromptLogprobs | None = None
        for last in chunks:
            prompt_logprobs = prompt_logprobs or last.prompt_logprobs
            text += last.text
            tokens.extend(last.tokens)
        if last is None or last.finish_reason is None or last.usage is None or last.summary is None:
            raise InternalError("the server ended the stream without a finish reason, usage and summary")
        return cls(
            text=text,
            tokens=tuple(tokens),
            finish_reason=last.finish_reason,
            usage=last.usage,
            summary=last.summary,
            seed=last.seed,
            session_id=last.session_id,
            prompt_logprobs=prompt_logprobs,
            receipt=last.receipt,
            form=form or OutputForm(),
        )


_SHOWN = (
    *("cycles", "tokens_per_cycle", "alpha", "acceptance_rate", "gamma_mean", "drafted_tokens"),
    *("accepted_tokens", "speedup_estimate", "fallback_cycles", "draft_workers"),
)


def speculation_object(summary: SpeculationSummary) -> dict[str, Any]:
    """Return what the JSON object `gammaray` of responses says about the speculation in a completion."""
    values = vars(summary)
    times = {part: values[f"{part}_ms"] for part in ("draft", "verify", "other", "total")}
    kinds = ("model", "head", "suffix", "prediction", "grammar")
    by_drafter = {kind: values[f"{kind}_cycles"] for kind in kinds} | {"none": summary.plain_cycles}
    return {
        **{name: values[name] for name in _SHOWN},
        "accepted_lengths": list(summary.accepted_lengths),
        "time_ms": times,
        "cycles_by_drafter": by_drafter,
    }
