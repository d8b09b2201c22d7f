"""Plain and speculative decoding at real sizes on one GPU.

    python -m benchmarks.gpu.run --out DIR            # at most nine minutes
    python -m benchmarks.gpu.run --out DIR --quick    # fewer sizes, one repetition
    python -m benchmarks.gpu.run --out DIR --tiny     # seconds, on a CPU: that it works, no figures

Needs torch, transformers and grpcio. Exactness is checked first: nothing is measured, and the exit status is
1, when the device's kernels do not compute what they should. Results are written after each phase, so a run
that is cut short leaves what it has. Exits with 1 when a phase failed.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.context import Context, Plan
from benchmarks.gpu.exactness import checked, exactness, invariance
from benchmarks.gpu.pair import EIGHT_B, TINY, Pair, Sizes
from benchmarks.gpu.peers import peers, vllm_peers
from benchmarks.gpu.phases import bandwidth, contexts, decoding, draft_costs, products, verify_costs
from benchmarks.gpu.speedup import speedups
from benchmarks.gpu.table import table
from benchmarks.provenance import write_result

__all__ = ["main", "run"]

_FULL = Plan(
    batches=(1, 8, 32),
    decode_batches=(1, 2, 4, 8, 16, 32, 64),
    contexts=(2048, 8192, 32_768),
    draft_layers=(2, 4),
    alphas=(0.8, 0.6, 0.9),
    verify_sizes=(1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 17, 25, 33),
    num_prompt=128,
    num_steps=64,
    num_cycles=24,
    repetitions=3,
    copy_bytes=2 * 2**30,
    sample=(16, 24),
)
_QUICK = replace(
    _FULL,
    batches=(1, 8),
    decode_batches=(1, 8, 64),
    contexts=(8192,),
    draft_layers=(2,),
    alphas=(0.8,),
    verify_sizes=(1, 3, 5, 9, 17, 33),
    num_steps=32,
    num_cycles=12,
    repetitions=1,
)
_TINY = replace(
    _QUICK,
    batches=(1, 2),
    decode_batches=(1, 2),
    contexts=(96, 300),
    verify_sizes=(1, 3, 5),
    num_prompt=16,
    num_steps=4,
    num_cycles=3,
    copy_bytes=2**20,
    sample=(2, 8),
)
# Seconds per phase; with building, checks and captures they make nine minutes at most.
_LIMITS = {
    "products": 40,
    "decode": 60,
    "contexts": 40,
    "verify": 80,
    "draft": 50,
    "speedup": 210,
    "peers": 40,
}


@dataclass
class Results:
    """The result file, written again after every phase."""

    path: Path
    settings: dict[str, Any]
    phases: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def phase(self, name: str, work: Callable[[], Any]) -> None:
        """Run a phase; what it yields is kept row by row, and an error does not end the run."""
        began = time.perf_counter()
        try:
            found = work()
            if isinstance(found, Iterable) and not isinstance(found, dict):
                rows = self.phases[name] = []
                for row in found:
                    rows.append(row)
                    print(name, row, flush=True)
            else:
                self.phases[name] = found
                print(name, found, flush=True)
        except Exception as error:
            self.errors[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        self.seconds[name] = round(time.perf_counter() - began, 1)
        self.write()

    def write(self) -> None:
        """Write all that is known."""
        content = {"settings": self.settings, "seconds": self.seconds, "errors": self.errors, **self.phases}
        write_result("gpu", content, self.path)


def run(sizes: Sizes, plan: Plan, device: str, dtype: torch.dtype, results: Results, limit: float) -> None:
    """Run all phases.

    Args:
        sizes: Shape of the target.
        plan: How much.
        device: Where.
        dtype: Of the weights.
        results: Are added to.
        limit: Factor of the phases' time limits.
    """
    results.phase("exactness", lambda: checked(exactness(device)))
    if results.errors:
        return
    built: list[Context] = []
    results.phase("build", lambda: _build(sizes, plan, device, dtype, built))
    if not built:
        return
    context = built[0]
    rows, phase = results.phases, results.phase
    phase("products", lambda: products(context, _timer("products", limit)))
    phase("invariance", lambda: invariance(context.target, 8))
    phase("decode", lambda: decoding(context, _timer("decode", limit)))
    phase("contexts", lambda: contexts(context, _timer("contexts", limit)))
    phase("verify", lambda: verify_costs(context, _timer("verify", limit)))
    phase("draft", lambda: draft_costs(context, _timer("draft", limit)))
    phase("speedup", lambda: speedups(context, rows, _timer("speedup", limit)))
    num_tokens = plan.num_steps
    phase(
        "peers",
        lambda: peers(
            context.pair, plan.draft_layers[0], plan.num_prompt, num_tokens, _timer("peers", limit)
        ),
    )
    layers, batches = plan.draft_layers[0], plan.batches
    phase("vllm", lambda: vllm_peers(context.pair, layers, batches, plan.num_prompt, num_tokens))


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run, print the table."""
    options = _parser().parse_args(arguments)
    if options.tiny:
        torch.set_num_threads(1)
        device, dtype, sizes, plan = "cpu", torch.float32, TINY, _TINY
    elif torch.cuda.is_available():
        device, dtype, plan = "cuda", torch.bfloat16, _QUICK if options.quick else _FULL
        sizes = replace(EIGHT_B, vocab=options.vocab)
    else:
        print("no CUDA device: use --tiny to see that it works", file=sys.stderr)
        return 2
    settings = {"sizes": asdict(sizes), "plan": asdict(plan), "device": _device_name(device)}
    results = Results(Path(options.out) / "gpu.json", settings)
    run(sizes, plan, device, dtype, results, options.minutes / 9)
    text = table(results.phases)
    (Path(options.out) / "gpu.md").write_text(text)
    print(text)
    for name, error in results.errors.items():
        print(f"{name} failed: {error}", file=sys.stderr)
    return 1 if results.errors else 0


def _build(sizes: Sizes, plan: Plan, device: str, dtype: torch.dtype, built: list[Context]) -> dict[str, Any]:
    pair = Pair.build(sizes, device, dtype)
    drafts = {count: pair.draft(count) for count in plan.draft_layers}
    context = Context(plan, pair, pair.target(), drafts)
    context.bytes_per_s = bandwidth(context.device, plan.copy_bytes)
    built.append(context)
    return {
        "copy_bytes_per_s": context.bytes_per_s,
        "target": pair.describe(sizes.layers),
        "drafts": [pair.describe(count) for count in plan.draft_layers],
    }


def _timer(name: str, factor: float) -> Callable[[], bool]:
    deadline = time.monotonic() + _LIMITS[name] * factor
    return lambda: time.monotonic() > deadline


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.run", description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True, help="folder for gpu.json and gpu.md")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer sizes, one repetition")
    size.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--vocab", type=int, default=EIGHT_B.vocab, help="token ids (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all phases (default 9)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
