"""Input of `python -m services.train`, as JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TrainTask(BaseModel):
    """What to train; see the options of `gammaray train`.

    Attributes:
        target: Directory or hub name, or "demo".
        out: The drafter's directory.
        work: Folder of answers and state, from which an interrupted run continues.
        prompts: Texts; None: the target writes its own user turns.
        chat: Whether prompts are user turns, instead of texts to continue.
        kind: "eagle3", a head that reads the target's hidden states, or "plain", a draft model.
        layers: Of a head the layers whose entering states it reads, counted from 0, the last one the number
            of layers; of a draft model the target's layers to start from, in this order. Empty: 2, the
            middle, the last but two, and the end; for a draft model the first two.
        init: A directory of this command's drafter to start from; same shape.
        draft_vocab: Rows of the output matrix; at most the target's.
        tokens: Answer tokens to generate.
        max_tokens: Longest answer.
        batch: Answers generated at once.
        train_tokens: Least answer tokens per training step.
        learning_rate: Peak of AdamW's rate; None: 0.001, for a draft model 0.002.
        loss: "kl", "tv" (total variation) or "coupled" (what coupled verification rejects).
        minutes: Limit of generation and training together, over all runs; half of it at most is generation.
        steps_per_report: Training steps between two measurements; the state is saved after each.
        device: Where to train and generate: "cpu", "cuda" or "cuda:N".
        threads: Arithmetic threads.
        seed: Of all choices.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    out: str
    work: str
    prompts: tuple[str, ...] | None = None
    chat: bool = True
    kind: Literal["eagle3", "plain"] = "eagle3"
    layers: tuple[int, ...] = ()
    init: str | None = None
    draft_vocab: int = Field(8192, ge=1)
    tokens: int = Field(300_000, ge=1)
    max_tokens: int = Field(256, ge=8)
    batch: int = Field(64, ge=1)
    train_tokens: int = Field(512, ge=1)
    learning_rate: float | None = Field(None, gt=0)
    loss: Literal["kl", "tv", "coupled"] = "kl"
    minutes: float = Field(60.0, gt=0)
    steps_per_report: int = Field(50, ge=1)
    device: str = "cpu"
    threads: int = Field(2, ge=1)
    seed: int = 0
