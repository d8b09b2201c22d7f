"""Train the demo pair's target: a shallow base, grown in depth. The draft is made of it by `distil`.

The recipe of the shipped weights, an hour on two CPU cores (`--device cuda` trains on a GPU):

    python -m benchmarks.demo_pair.corpus
    python -m benchmarks.demo_pair.train --stage base      # 4 layers, 36 minutes, 11.2 M tokens
    python -m benchmarks.demo_pair.train --stage target    # 16 layers grown from it, 22 minutes, 1.9 M tokens
    python -m benchmarks.demo_pair.train --stage export    # bf16 safetensors and tokenizer, in pair/target
    python -m benchmarks.demo_pair.distil --target build/demo_pair/pair/target

`--stage all` runs all three of `train`; `--minutes` or `--tokens` replace a stage's budget. A try in seconds:

    python -m benchmarks.demo_pair.corpus --out build/tiny --limit 30 --vocab-size 512
    python -m benchmarks.demo_pair.train --stage all --work build/tiny --tokens 4096 --hidden-size 64
    python -m benchmarks.demo_pair.distil --work build/tiny --target build/tiny/pair/target \\
        --samples 96 --steps 9

Muon trains the matrices of the blocks, AdamW embeddings and norms; the rate warms up, stays, and decays
linearly over the second half of the budget.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.utils import logging

from benchmarks.demo_pair import models
from benchmarks.demo_pair.corpus import read_split


@dataclass(frozen=True)
class Stage:
    """One training run: depth, start, budget (minutes on two cores) and learning rates."""

    num_layers: int
    minutes: float
    muon_lr: float
    adam_lr: float
    grow_from: str = ""


STAGES = {
    "base": Stage(4, 36, 0.02, 0.003),
    "target": Stage(16, 22, 0.006, 0.0006, grow_from="base"),
}
_WARMUP_STEPS = 40


@dataclass
class Budget:
    """How long a run lasts: until `seconds` or `tokens` are used up, whichever is set."""

    seconds: float | None
    tokens: int | None

    def progress(self, started: float, num_tokens: int) -> float:
        """Return the share that is used up; the run ends at 1."""
        if self.tokens is not None:
            return num_tokens / self.tokens
        assert self.seconds is not None
        return (time.monotonic() - started) / self.seconds


@dataclass(frozen=True)
class TrainingOptions:
    """What all stages share."""

    work: Path
    device: str
    batch: int = 16
    length: int = 256
    hidden_size: int = 256
    report: Callable[[str], None] = print


def rate(progress: float, step: int) -> float:
    """Return the factor of the learning rates: warm-up, constant, then linear decay from half-way on."""
    decay = 1.0 if progress < 0.5 else max(0.02, (1 - progress) / 0.5)
    return min(1.0, (step + 1) / _WARMUP_STEPS) * decay


def held_out_windows(
    held: NDArray[np.int64], length: int = 256, count: int = 64, stride: int = 1500
) -> Tensor:
    """Return up to `count` windows of held-out text, `[num_windows, length + 1]` token ids."""
    starts = range(0, min(count * stride, len(held) - length), stride)
    return torch.from_numpy(np.stack([held[s : s + length + 1] for s in starts]))


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, windows: Tensor) -> float:
    """Return the mean loss in nats per token over `windows` `[num_windows, length + 1]`."""
    losses = []
    for batch in windows.to(model.device).split(16):
        losses += F.cross_entropy(
            model(batch[:, :-1]).logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="none"
        ).tolist()
    return sum(losses) / len(losses)


def train_stage(name: str, budget: Budget, options: TrainingOptions) -> float:
    """Train one stage, save it as `<work>/<name>` and return its held-out loss in nats per token."""
    stage = STAGES[name]
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    train, held = read_split(options.work, "train"), read_split(options.work, "held")
    vocab_size = int(max(train.max(), held.max())) + 1
    model = _start(stage, options, vocab_size).to(options.device).train()
    optimizers = optimizers_of(model, stage.muon_lr, stage.adam_lr)
    started, step, num_tokens = time.monotonic(), 0, 0
    while (progress := budget.progress(started, num_tokens)) < 1:
        for optimizer, lr in zip(optimizers, (stage.muon_lr, stage.adam_lr), strict=True):
            optimizer.param_groups[0]["lr"] = lr * rate(progress, step)
        starts = rng.integers(0, len(train) - options.length - 1, options.batch)
        batch = torch.from_numpy(np.stack([train[s : s + options.length + 1] for s in starts]))
        loss = _loss(model, batch.to(options.device))
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        step, num_tokens = step + 1, num_tokens + options.batch * options.length
        if step % 100 == 0:
            elapsed = time.monotonic() - started
            options.report(
                f"{name}: {elapsed:.0f} s, {num_tokens / 1e6:.2f} M tokens, loss {loss.item():.3f}"
            )
    loss_held = held_out_loss(model.eval(), held_out_windows(held, options.length))
    options.report(f"{name}: {num_tokens / 1e6:.2f} M tokens, held-out loss {loss_held:.3f} nats per token")
    model.save_pretrained(options.work / name)
    return loss_held


def _start(stage: Stage, options: TrainingOptions, vocab_size: int) -> LlamaForCausalLM:
    model = models.build(stage.num_layers, options.hidden_size, vocab_size)
    if stage.grow_from:
        models.grow(model, models.load(options.work / stage.grow_from))
    return model


def optimizers_of(model: LlamaForCausalLM, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Return the optimisers of the blocks' matrices, and of embeddings and norms."""
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else rest).append(parameter)
    adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
    return [torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.05), adam]


def _loss(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """Next-token loss of `batch`, `[batch, length + 1]`."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=batch.device.type == "cuda"):
        logits = model(batch[:, :-1]).logits.flatten(0, 1).float()
        return F.cross_entropy(logits, batch[:, 1:].flatten())


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="Train the demo pair's target.")
    parser.add_argument("--stage", choices=[*STAGES, "export", "all"], required=True)
    parser.add_argument("--work", type=Path, default=Path("build/demo_pair"), help="corpus and models")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda (bf16 autocast)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--minutes", type=float, help="budget instead of the stage's own")
    parser.add_argument("--tokens", type=int, help="budget in training tokens instead")
    parser.add_argument("--batch", type=int, default=16, help="windows per step")
    parser.add_argument("--length", type=int, default=256, help="tokens per window")
    parser.add_argument("--hidden-size", type=int, default=256, help="width, a multiple of 64")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.set_flush_denormal(True)
    logging.disable_progress_bar()
    options = TrainingOptions(given.work, given.device, given.batch, given.length, given.hidden_size)
    for name in (stage for stage in STAGES if given.stage in (stage, "all")):
        minutes = given.minutes if given.minutes is not None else STAGES[name].minutes
        train_stage(name, Budget(minutes * 60, given.tokens), options)
    if given.stage in ("export", "all"):
        out = given.work / "pair" / "target"
        size = models.export(given.work / "target", given.work / "tokenizer.json", out)
        print(f"{out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
