"""What `services.train` trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TrainTask:
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

    target: str
    out: str
    work: str
    prompts: tuple[str, ...] | None = None
    chat: bool = True
    kind: Literal["eagle3", "plain"] = "eagle3"
    layers: tuple[int, ...] = ()
    init: str | None = None
    draft_vocab: int = 8192
    tokens: int = 300_000
    max_tokens: int = 256
    batch: int = 64
    train_tokens: int = 512
    learning_rate: float | None = None
    loss: Literal["kl", "tv", "coupled"] = "kl"
    minutes: float = 60.0
    steps_per_report: int = 50
    device: str = "cpu"
    threads: int = 2
    seed: int = 0
