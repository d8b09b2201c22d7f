"""How well the draft foresees the target, on text neither was trained on.

    python -m benchmarks.demo_pair.evaluate

prints, at temperature 1 on 64 windows of 256 held-out tokens:

- *argmax match*: the draft's most likely token is the target's;
- *alpha*: mean of 1 - TV, the acceptance of rejection verification (arXiv 2211.17192);
- *coupled alpha*: the target's token under shared Gumbel noise is among the draft's k best under the same
  noise (arXiv 2408.07978), for trees of k children per node;

and, with both models on the engine's best path and one thread, the time of a draft step in target steps: in
runs of eight, as a chain is drafted, and in turn with the target's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging

from benchmarks.demo_pair.corpus import encode
from benchmarks.demo_pair.models import load
from benchmarks.demo_pair.train import held_out_windows
from benchmarks.provenance import write_result
from benchmarks.workloads import documents
from gammaray.bench.tables import plain_table
from services.demo_pair import DRAFT_DIR, TARGET_DIR
from services.engine.core.batch import SequenceInput
from services.engine.engine import Engine
from services.engine.loader import load_engine

_CHILDREN = (1, 2, 4, 8)
_RUN = 8


@dataclass(frozen=True)
class Agreement:
    """Shares in [0, 1] over `num_positions` held-out positions; losses in nats per token."""

    argmax_match: float
    alpha: float
    coupled_alpha: dict[int, float]
    target_loss: float
    draft_loss: float
    num_positions: int


@torch.no_grad()
def agreement(target: LlamaForCausalLM, draft: LlamaForCausalLM, windows: Tensor, seed: int = 0) -> Agreement:
    """Compare two models on `windows`, `[num_windows, length + 1]` token ids."""
    generator = torch.Generator().manual_seed(seed)
    sums: dict[str, float] = dict.fromkeys(["match", "alpha", "target_loss", "draft_loss"], 0.0)
    hits = dict.fromkeys(_CHILDREN, 0.0)
    for window in windows.split(4):
        wanted = window[:, 1:].flatten()
        target_log, draft_log = (
            F.log_softmax(model(window[:, :-1].to(model.device)).logits.flatten(0, 1).float().cpu(), -1)
            for model in (target, draft)
        )
        sums["match"] += (target_log.argmax(-1) == draft_log.argmax(-1)).sum().item()
        sums["alpha"] += torch.minimum(target_log.exp(), draft_log.exp()).sum().item()
        sums["target_loss"] += F.nll_loss(target_log, wanted, reduction="sum").item()
        sums["draft_loss"] += F.nll_loss(draft_log, wanted, reduction="sum").item()
        gumbel = -torch.empty_like(target_log).exponential_(generator=generator).log()
        drawn = (target_log + gumbel).argmax(-1, keepdim=True)
        ranked = (draft_log + gumbel).topk(max(_CHILDREN), -1).indices
        for k in _CHILDREN:
            hits[k] += (ranked[:, :k] == drawn).any(-1).sum().item()
    num = windows.size(0) * (windows.size(1) - 1)
    return Agreement(
        argmax_match=sums["match"] / num,
        alpha=sums["alpha"] / num,
        coupled_alpha={k: hit / num for k, hit in hits.items()},
        target_loss=sums["target_loss"] / num,
        draft_loss=sums["draft_loss"] / num,
        num_positions=num,
    )


def step_times(target: Path, draft: Path, context: list[int], num_steps: int = 200) -> dict[str, float]:
    """Return the median times of one-token steps after `context`, in milliseconds, and the ratios' medians.

    Runs of draft and of target steps alternate, so that a change of the clock touches both: runs of eight, as
    a chain is drafted, and of one step, where each model finds the other's weights in the processor's cache.
    """
    engines = {"target": load_engine(str(target), threads=1), "draft": load_engine(str(draft), threads=1)}
    for engine in engines.values():
        engine.step([SequenceInput("s", 0, context, 1)])

    def run(engine: Engine, length: int) -> float:
        times = []
        for _ in range(length):
            started = time.perf_counter()
            engine.step([SequenceInput("s", len(context), context[:1], 1)])
            times.append((time.perf_counter() - started) * 1e3)
        return statistics.median(times)

    def alternate(length: int) -> tuple[list[float], list[float]]:
        pairs = [(run(engines["target"], length), run(engines["draft"], length)) for _ in range(num_steps)]
        return [target for target, _ in pairs], [draft for _, draft in pairs]

    targets, drafts = alternate(_RUN)
    in_turn = alternate(1)
    return {
        "target_step_ms": statistics.median(targets),
        "draft_step_ms": statistics.median(drafts),
        "draft_over_target": _median_ratio(targets, drafts),
        "draft_over_target_in_turn": _median_ratio(*in_turn),
    }


def _median_ratio(targets: list[float], drafts: list[float]) -> float:
    return statistics.median(draft / target for target, draft in zip(targets, drafts, strict=True))


def evaluate(target: Path, draft: Path, num_windows: int, num_steps: int) -> dict[str, Any]:
    """Return all figures of this module as JSON-ready values."""
    tokenizer = AutoTokenizer.from_pretrained(target).backend_tokenizer
    held = encode(tokenizer, [d.text for d in documents() if d.is_held_out]).astype(np.int64)
    windows = held_out_windows(held, count=num_windows)
    found = agreement(load(target).eval(), load(draft).eval(), windows)
    return {
        "argmax_match": found.argmax_match,
        "alpha": found.alpha,
        "coupled_alpha": {str(k): share for k, share in found.coupled_alpha.items()},
        "target_loss": found.target_loss,
        "draft_loss": found.draft_loss,
        "num_positions": found.num_positions,
        **step_times(target, draft, windows[0, :-1].tolist(), num_steps),
    }


def _table(figures: dict[str, Any]) -> Table:
    title = f"Demo pair, {figures['num_positions']} held-out positions, temperature 1"
    table = plain_table(title, ("figure", "value"))
    table.add_row("argmax match", f"{figures['argmax_match']:.3f}")
    table.add_row("alpha (1 - TV)", f"{figures['alpha']:.3f}")
    for k, share in figures["coupled_alpha"].items():
        table.add_row(f"coupled alpha, {k} {'child' if k == '1' else 'children'}", f"{share:.3f}")
    table.add_row(
        "loss, target / draft (nats per token)", "{target_loss:.3f} / {draft_loss:.3f}".format(**figures)
    )
    table.add_row("step, target / draft (ms)", "{target_step_ms:.2f} / {draft_step_ms:.2f}".format(**figures))
    table.add_row(
        f"draft step in target steps, {_RUN} in a row / in turn",
        "{draft_over_target:.3f} / {draft_over_target_in_turn:.3f}".format(**figures),
    )
    return table


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="Agreement and step times of a draft and a target.")
    parser.add_argument("--target", type=Path, default=TARGET_DIR)
    parser.add_argument("--draft", type=Path, default=DRAFT_DIR)
    parser.add_argument("--windows", type=int, default=64, help="windows of 256 held-out tokens")
    parser.add_argument("--steps", type=int, default=200, help="runs of steps timed per model")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    figures = evaluate(options.target, options.draft, options.windows, options.steps)
    Console().print(_table(figures))
    print(f"written: {write_result('demo-pair', figures, options.out)}")


if __name__ == "__main__":
    main()
