"""What missing hidden states cost an EAGLE-3 head: acceptance on answers of its target.

    python -m benchmarks.feature_window --target TARGET --head HEAD --answers WORK/answers

A head may lack the states of earlier positions: behind a shared prefix, after an eviction, or when it reads
only the end of a long prompt. It then does not see these positions. This is the acceptance at temperature
1 (1 - TV over the target's likeliest ids) at the same places of held-out answers, with all states, without
those of the prompt, and with those of the last positions only: an upper bound of what a vector in place of
missing states could gain. The answers are those that `gammaray train` stored, of another run than the head's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console

from benchmarks.provenance import write_result
from gammaray.bench.tables import plain_table
from gammaray.demo_pair import resolve_model
from services.engine.core.model import load_model
from services.heads.loading import load_head
from services.train.answers.states import StateStore
from services.train.answers.store import AnswerStore, Sequence
from services.train.batches import Batch
from services.train.head import TrainableHead

__all__ = ["behind", "main"]

WINDOWS = (8, 32)
"""Last positions that a head still sees, counted from the middle of an answer."""

PLACES = 24
"""Places measured after the middle of an answer."""

_DEPTH = 3


def behind(batch: Batch, start: int) -> Batch:
    """Return the batch of one sequence without the states before `start`, and the places left."""
    kept = batch.place[:, 1] > start
    rows = {name: getattr(batch, name)[kept] for name in ("place", "labels", "top_ids", "top_logs")}
    return replace(
        batch,
        token_ids=batch.token_ids[:, start:],
        states=batch.states[:, start:],
        starts=torch.tensor([start]),
        **rows,
    )


@torch.no_grad()
def overlaps(drafter: TrainableHead, batch: Batch) -> dict[tuple[int, int], float]:
    """Return 1 - TV by anchor and depth."""
    wanted, found = drafter.common(batch, drafter(batch))
    shares = torch.minimum(wanted, found.exp()).sum(-1).tolist()
    return {
        (anchor, depth): share for (_, anchor, depth), share in zip(batch.place.tolist(), shares, strict=True)
    }


def compare(drafter: TrainableHead, held: Items[Sequence]) -> list[dict[str, Any]]:
    """Return a row per set of missing states: acceptance by depth, also with all states."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for one in held:
        batch = drafter.batch([one], _DEPTH)
        everything = overlaps(drafter, batch)
        middle = (one.num_prompt + len(one.token_ids)) // 2
        cases = {"those of the prompt": (max(0, one.num_prompt - 2), range(len(one.token_ids)))}
        for window in WINDOWS:
            cases[f"all but the last {window}"] = (max(0, middle - window), range(middle, middle + PLACES))
        for name, (start, places) in cases.items():
            pairs = found.setdefault(name, [])
            for (anchor, depth), share in overlaps(drafter, behind(batch, start)).items():
                if anchor in places:
                    pairs.append((depth, share, everything[anchor, depth]))
    return [
        {
            "missing": name,
            "places": len(pairs),
            "without": [mean(pair[1] for pair in pairs if pair[0] == depth + 1) for depth in range(_DEPTH)],
            "with_all": [mean(pair[2] for pair in pairs if pair[0] == depth + 1) for depth in range(_DEPTH)],
        }
        for name, pairs in found.items()
    ]


def main(argv: Items[str] | None = None) -> None:
    """Measure, print the table, write the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.feature_window",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", required=True, help="model directory")
    parser.add_argument(
        "--head", required=True, help="directory of an EAGLE-3 head with a reduced vocabulary"
    )
    parser.add_argument("--answers", required=True, type=Path, help="folder of `gammaray train`")
    parser.add_argument("--count", type=int, default=48, help="answers, every 16th; default 48")
    parser.add_argument("--out", type=Path, help="new result file; default: in benchmarks/results")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    path = resolve_model(options.target, "target")
    head, ids = load_head(options.head, path)
    if ids is None:
        parser.error("--head: it has the target's whole vocabulary")
    meta = json.loads((options.answers / "meta.json").read_text())
    identity = {key: meta[key] for key in ("target", "tokenizer")}
    model = load_model(path, device="cpu", dtype="float32").module
    store = AnswerStore(options.answers, identity, meta["top_k"], model.config.vocab_size)
    taps = head.config.taps
    states = StateStore(options.answers, identity, model, taps, store.num_tokens, len(store))
    drafter = TrainableHead(model, taps, ids, _DEPTH, states).eval()
    drafter.start_from(options.head, path)
    held = [one for one in store.sequences() if len(one.token_ids) - one.num_prompt > PLACES][::16]
    rows = compare(drafter, held[: options.count])
    table = plain_table(
        "1 - TV by depth at the same places", ("missing states", "places", "without them", "with all")
    )
    for row in rows:
        shown = (" ".join(f"{share:.3f}" for share in row[key]) for key in ("without", "with_all"))
        table.add_row(row["missing"], str(row["places"]), *shown)
    Console(width=120).print(table)
    result = {"target": options.target, "head": options.head, "count": options.count, "rows": rows}
    print(f"written: {write_result('feature-window', result, options.out)}")


if __name__ == "__main__":
    main()
