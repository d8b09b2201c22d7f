"""What `services.train` trains; also the options of `gammaray train`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints


class TrainTask(BaseModel):
    """Train a drafter for a target on text that the target writes.

    Interrupted, the same command continues.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    target: str = Field(min_length=1, description="Directory or hub name; 'demo' is the demo pair's.")
    out: str = Field(min_length=1, description="Directory of the drafter.")
    work: str = Field("", description="Folder of answers and state; empty: OUT.work.")
    prompts: str = Field(
        "", description="File, one per line, or a JSON list of strings; empty: the target writes its own."
    )
    chat: bool = Field(True, description="Prompts are user turns; else they are texts to continue.")
    kind: Literal["eagle3", "plain"] = Field(
        "eagle3",
        description="A head, which reads the target's hidden states in its process, or a draft model.",
    )
    layers: Annotated[str, StringConstraints(pattern=r"^(\d{1,6}(,\d{1,6})*)?$")] = Field(
        "",
        description="Numbers of layers of the target, counted from 0: those of which a head reads the "
        "states, the last one the number of layers, or those to start a draft model from; empty: low, "
        "middle, high and last, or for plain 0,1.",
    )
    init: str = Field("", description="Directory of a drafter of the same shape to start from; empty: none.")
    draft_vocab: int = Field(8192, ge=1, description="Tokens it can propose; at most the target's.")
    tokens: int = Field(300_000, ge=1, description="Answer tokens to generate.")
    max_tokens: int = Field(256, ge=8, description="Longest answer.")
    batch: int = Field(64, ge=1, description="Answers generated at once.")
    train_tokens: int = Field(512, ge=1, description="Least answer tokens per step.")
    learning_rate: float = Field(0.0, ge=0, le=1, description="Peak; 0: by kind and hidden size.")
    loss: Literal["kl", "coupled"] = Field(
        "kl", description="Divergence, or what coupled verification rejects."
    )
    minutes: float = Field(
        60.0, gt=0, description="Limit of all runs together; half of it at most is generation."
    )
    steps_per_report: int = Field(
        50, ge=1, description="Steps between measurements; the state is saved after each."
    )
    device: str = Field("cpu", description="cpu, cuda or cuda:N.")
    threads: int = Field(2, ge=1, le=256, description="Arithmetic threads.")
    seed: int = Field(0, ge=0, description="Of all choices.")
