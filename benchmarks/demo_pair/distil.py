"""Make the draft: some of the target's own blocks, distilled from it, also on text that it wrote itself.

    python -m benchmarks.demo_pair.corpus
    python -m benchmarks.demo_pair.distil    # the draft of the shipped target, in build/demo_pair/draft

The draft starts as every n-th of the target's blocks: those that were there before it was grown (drafting
by skipping blocks: arXiv 2309.08168). The target reads every training window once and its likeliest tokens
are kept; epochs then cost the draft's own passes alone. More than a quarter of the windows is the target's
own text (greedy, temperature 0.7 and 1), begun by words of the training split: what the draft has to foresee
when it serves (arXiv 2310.08461). The loss is the divergence from the target; over the last part of the run
its total variation distance, which is one minus the acceptance (arXiv 2211.17192), at temperature 1 and
sharpened to 0.5, where the likeliest token counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.utils import logging

from benchmarks.demo_pair import models
from benchmarks.demo_pair.corpus import read_split
from benchmarks.demo_pair.train import held_out_windows, optimizers_of, rate
from services.demo_pair import TARGET_DIR
from services.engine.core.batch import SequenceInput
from services.engine.engine import Engine
from services.engine.loader import load_engine

_LENGTH = 256
_NUM_KEPT = 48
_PROMPT_TOKENS = 32
_TEMPERATURES = (0.0, 0.7, 1.0)
_VARIATION_FROM = 0.6
"""The share of the run after which the total variation is what counts."""


@dataclass(frozen=True)
class Lessons:
    """Windows and what the target expects after each of their tokens.

    `windows` is `[num_windows, length]` token ids; `ids` and `logs` are `[num_windows, length, kept]`: the
    target's likeliest tokens at each position and their log-probabilities (float16).
    """

    windows: Tensor
    ids: Tensor
    logs: Tensor


@torch.no_grad()
def agreement(target: LlamaForCausalLM, draft: LlamaForCausalLM, windows: Tensor) -> tuple[float, float]:
    """Return how well the draft foresees the target on `windows`, `[num_windows, length + 1]` token ids.

    The share of positions at which the likeliest tokens are equal, and alpha: the mean of 1 - TV, the
    acceptance of rejection verification at temperature 1 (arXiv 2211.17192).
    """
    match = alpha = 0.0
    for batch in windows.split(16):
        context = batch[:, :-1].to(target.device)
        p, q = (model(context).logits.float().softmax(-1) for model in (target, draft))
        match += (p.argmax(-1) == q.argmax(-1)).sum().item()
        alpha += torch.minimum(p, q).sum().item()
    num = windows.size(0) * (windows.size(1) - 1)
    return match / num, alpha / num


def write_samples(engine: Engine, train: Tensor, num_windows: int, batch: int = 96, seed: int = 1) -> Tensor:
    """Return windows that the target wrote, `[num_windows, length]`, each begun by words of `train`."""
    generator = torch.Generator().manual_seed(seed)
    begins = torch.randint(len(train) - _PROMPT_TOKENS, (num_windows,), generator=generator).tolist()
    written = [train[begin : begin + _PROMPT_TOKENS].tolist() for begin in begins]
    for first in range(0, num_windows, batch):
        texts = dict(enumerate(written[first : first + batch]))
        temperatures = torch.tensor([_TEMPERATURES[i % len(_TEMPERATURES)] for i in texts]).unsqueeze(1)
        fed = 0
        while (length := len(texts[0])) < _LENGTH:
            rows = engine.step([SequenceInput(str(i), fed, text[fed:], 1) for i, text in texts.items()])
            # The argmax of the scaled logits and Gumbel noise is a sample; without noise it is the likeliest.
            noise = -torch.empty(len(rows), rows[0].size(-1)).exponential_(generator=generator).log()
            drawn = (torch.cat(rows) + temperatures * noise).argmax(-1).tolist()
            fed = length
            for text, token in zip(texts.values(), drawn, strict=True):
                text.append(token)
        for i in texts:
            engine.release(str(i))
    return torch.tensor(written)


@torch.no_grad()
def read_lessons(target: LlamaForCausalLM, windows: Tensor, batch: int = 16) -> Lessons:
    """Return what `target` expects after each token of `windows`, `[num_windows, length]`.

    Raises:
        ValueError: Its vocabulary is too large for the 16 bits that hold a token id here.
    """
    if target.config.vocab_size > 2**15:
        raise ValueError(f"vocab_size: got {target.config.vocab_size}, allowed: at most {2**15}")
    kept = min(_NUM_KEPT, target.config.vocab_size)
    ids = torch.empty((*windows.shape, kept), dtype=torch.int16)
    logs = torch.empty((*windows.shape, kept), dtype=torch.float16)
    for start in range(0, len(windows), batch):
        with _half_precision(target):
            logits = target(windows[start : start + batch].to(target.device)).logits
        best = F.log_softmax(logits.float(), -1).topk(kept, -1)
        logs[start : start + batch], ids[start : start + batch] = (
            best.values.half().cpu(),
            best.indices.short().cpu(),
        )
    return Lessons(windows, ids, logs)


def _with_rest(probs: Tensor) -> Tensor:
    """Append the probability of all other tokens: `[..., kept]` to `[..., kept + 1]`."""
    return torch.cat((probs, (1 - probs.sum(-1, keepdim=True)).clamp_min(1e-6)), -1)


def divergence(draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """Return the mean Kullback-Leibler divergence of `[positions, kept]`; the rest counts as one token."""
    wanted = _with_rest(target_probs)
    return (wanted * (wanted.log() - _with_rest(draft_probs).clamp_min(1e-9).log())).sum(-1).mean()


def variation(draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """Return the mean total variation distance of `[positions, kept]`; the rest counts as one token."""
    return 1 - torch.minimum(_with_rest(draft_probs), _with_rest(target_probs)).sum(-1).mean()


def _loss(logits: Tensor, ids: Tensor, logs: Tensor, progress: float) -> Tensor:
    target_probs = logs.exp()
    draft_probs = torch.softmax(logits, -1).gather(-1, ids)
    if progress < _VARIATION_FROM:
        return divergence(draft_probs, target_probs)
    sharp_draft = torch.softmax(2 * logits, -1).gather(-1, ids)
    sharp_target = torch.softmax(2 * logs, -1)
    return (
        variation(draft_probs, target_probs)
        + variation(sharp_draft, sharp_target)
        + 0.1 * divergence(draft_probs, target_probs)
    )


def distil(
    draft: LlamaForCausalLM, lessons: Lessons, *, num_steps: int, learning_rate: float, batch: int = 32
) -> Iterator[tuple[float, float]]:
    """Train `draft` for `num_steps` batches; yield the share that is done and the loss, now and then."""
    rates = (learning_rate, learning_rate / 10)
    optimizers = optimizers_of(draft, *rates)
    for step in range(num_steps):
        progress = step / num_steps
        for optimizer, base in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = base * rate(progress, step)
        chosen = torch.randint(len(lessons.windows), (batch,))
        with _half_precision(draft):
            logits = draft(lessons.windows[chosen].to(draft.device)).logits.flatten(0, 1).float()
        ids = lessons.ids[chosen].flatten(0, 1).long().to(draft.device)
        loss = _loss(logits, ids, lessons.logs[chosen].flatten(0, 1).float().to(draft.device), progress)
        draft.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if step % 100 == 99:
            yield progress, loss.item()


def _half_precision(model: LlamaForCausalLM) -> torch.autocast:
    return torch.autocast(model.device.type, torch.bfloat16)


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="Distil a draft from stored targets.")
    parser.add_argument("--work", type=Path, default=Path("build/demo_pair"), help="the corpus")
    parser.add_argument("--target", type=Path, default=TARGET_DIR)
    parser.add_argument("--blocks", type=int, default=4, help="depth of the draft")
    parser.add_argument("--draft", type=Path, help="a draft to start from, instead of blocks of the target")
    parser.add_argument("--out", type=Path, help="default: `draft` next to the corpus")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=800, help="batches of 32 windows")
    parser.add_argument("--samples", type=int, default=2048, help="windows that the target writes")
    parser.add_argument("--limit", type=int, help="take only so many windows of the corpus, by chance")
    parser.add_argument("--learning-rate", type=float, default=0.004)
    parser.add_argument("--seed", type=int, default=0, help="of the windows' choice, texts and batches")
    options = parser.parse_args()
    out = options.out or options.work / "draft"
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(options.seed)
    logging.disable_progress_bar()
    target = models.load(options.target).to(options.device).eval()
    draft = models.load(options.draft) if options.draft else models.truncated(target, options.blocks)
    draft = draft.to(options.device)
    train, held = (
        torch.from_numpy(np.asarray(read_split(options.work, split))) for split in ("train", "held")
    )
    held_windows = held_out_windows(held.numpy(), _LENGTH)
    writer = load_engine(str(options.target), threads=options.threads)
    own_windows = write_samples(writer, held, 96)
    corpus = train[: len(train) // _LENGTH * _LENGTH].view(-1, _LENGTH)
    corpus = corpus[torch.randperm(len(corpus))[: options.limit]]
    windows = torch.cat((corpus, write_samples(writer, train, options.samples, seed=options.seed + 1)))
    torch.set_num_threads(options.threads)  # the writer left torch one
    print(f"{windows.numel() / 1e6:.2f} M tokens written and read", flush=True)
    lessons = read_lessons(target, windows)
    for progress, loss in distil(
        draft, lessons, num_steps=options.steps, learning_rate=options.learning_rate
    ):
        held_out, own = (agreement(target, draft, windows) for windows in (held_windows, own_windows))
        print(
            f"{progress:.0%}: loss {loss:.3f}, argmax match and alpha on held-out text "
            f"{held_out[0]:.3f} {held_out[1]:.3f}, on the target's own {own[0]:.3f} {own[1]:.3f}",
            flush=True,
        )
        draft.save_pretrained(out)
    draft.save_pretrained(out)
    size = models.export(out, options.work / "tokenizer.json", out / "export")
    print(f"{size / 1e6:.1f} MB in {out / 'export'}")


if __name__ == "__main__":
    main()
