"""How often draft-ahead has the next proposal ready, and what trees add: by method and temperature.

    python -m benchmarks.draft_ahead

Draft and target scheduler of the demo pair run in one thread, in turn: propose, verify, and then draft-ahead
for as long as the verification took (`--window` times that), as it would do at the same time on another core.
All times are CPU times of the thread, so the figures do not depend on what else the machine does. The
throttle, which looks at contention, is open. A hit is a proposal that was ready without a forward.

The claim to check: with coupled verification draft and target share their noise, so that the draft foresees
the target's tokens at temperature 1 nearly as well as at 0; with rejection sampling it does not.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer

from benchmarks.provenance import write_result
from gammaray.bench.tables import plain_table
from gammaray.bench.workloads import fingerprint, prompts
from gammaray.blocks import Shape
from gammaray.errors import GammarayError
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from services.demo_pair import DRAFT_DIR, TARGET_DIR
from services.draft.scheduler import DraftScheduler
from services.engine.loader import load_engine
from services.scheduling.metrics import AheadStats
from services.scheduling.planning import Limits
from services.scheduling.tasks import ProposeTask, Release, SessionSpec, Task, VerifyTask
from services.speculation.throttle import AHEAD_ROWS, Throttle
from services.target.scheduler import TargetScheduler

__all__ = ["Pair", "Run", "main"]

_LIMITS = Limits(max_batch_tokens=1024, prefill_chunk=256)
CHAINS = (2, 4, 6)
TREES = ((4, 8), (4, 12), (6, 16))
TEMPERATURES = (0.0, 0.7, 1.0)
"""What is measured: the depths of chains, the depth and nodes of trees, and the temperatures of each."""


class _Open(Throttle):
    is_open = True


@dataclass
class Run:
    """What was counted over some completions, without the first cycle of each.

    Attributes:
        gamma: Depth of the proposals.
        max_nodes: Upper bound of their nodes; 0 for chains.
        window: Time for draft-ahead, as a multiple of the verification's; 0 for none.
        draft_ms: Thread CPU time per cycle until the proposal was there.
        verify_ms: Thread CPU time per verification.
        tokens: The emitted tokens of each completion.
    """

    method: VerificationMethod
    temperature: float
    gamma: int
    max_nodes: int
    window: float
    cycles: int = 0
    emitted: int = 0
    nodes: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    stats: AheadStats = field(default_factory=AheadStats)
    tokens: list[list[int]] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Proposals that were ready, of those that could be."""
        return self.stats.hits / max(1, self.stats.lookups)

    def document(self) -> dict[str, Any]:
        """Return the counts and the rates made of them."""
        counts = asdict(self)
        del counts["tokens"], counts["draft_ms"], counts["verify_ms"]
        rate, lookups = self.hit_rate, max(1, self.stats.lookups)
        return {
            **counts,
            "method": self.method.value,
            "hit_rate": round(rate, 4),
            "hit_rate_standard_error": round(math.sqrt(rate * (1 - rate) / lookups), 4),
            "tokens_per_cycle": round(self.emitted / self.cycles, 4),
            "nodes_per_cycle": round(self.nodes / self.cycles, 3),
            "draft_ms_per_cycle": round(self.draft_ms / self.cycles, 4),
            "verify_ms_per_cycle": round(self.verify_ms / self.cycles, 4),
        }


class Pair:
    """The demo pair's two schedulers, driven by hand."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._draft, self._target = load_engine(str(DRAFT_DIR)), load_engine(str(TARGET_DIR))
        self._tokenizer = AutoTokenizer.from_pretrained(str(TARGET_DIR))
        self._ids = itertools.count()

    def run(self, run: Run, texts: Sequence[str], num_tokens: int) -> Run:
        """Complete every text, and count."""
        draft = DraftScheduler(self._draft, _LIMITS, ahead_rows=AHEAD_ROWS if run.window else 0)
        if draft.lookahead is not None:
            draft.lookahead.throttle = _Open()
        target = TargetScheduler(self._target, _LIMITS)
        for seed, text in enumerate(texts):
            params = SamplingParams(temperature=run.temperature, seed=seed)
            prompt = self._tokenizer(text)["input_ids"]
            tokens = self._complete(run, draft, target, params, prompt, num_tokens)
            run.tokens.append(tokens[len(prompt) :][:num_tokens])
        if draft.lookahead is not None:
            run.stats = draft.lookahead.throttle.stats
        return run

    def _complete(
        self,
        run: Run,
        draft: DraftScheduler,
        target: TargetScheduler,
        params: SamplingParams,
        prompt: Sequence[int],
        num_tokens: int,
    ) -> list[int]:
        spec = SessionSpec(params, run.method, len(prompt), ())
        name, tokens, held = str(next(self._ids)), list(prompt), 0
        while len(tokens) < len(prompt) + num_tokens:
            common = {
                "request_id": 0,
                "session_id": name,
                "epoch": 1,
                "base_position": len(tokens),
                "context_start": held,
                "context": tokens[held:],
                "spec": None if held else spec,
                "deadline": math.inf,
                "deliver": lambda task, reply: None,
            }
            proposal, draft_s = Proposal(), 0.0
            if run.gamma:
                proposal, draft_s = _ask(draft, ProposeTask(**common, shape=Shape(run.gamma, run.max_nodes)))
            outcome, verify_s = _ask(target, VerifyTask(**common, proposal=proposal, num_top_logprobs=None))
            path, is_first, held = outcome.accepted_path, held == 0, len(tokens)
            tokens += [*(proposal.token_ids[node] for node in path), outcome.next_token_id]
            if not is_first:
                run.cycles += 1
                run.emitted += len(path) + 1
                run.nodes += len(proposal)
                run.draft_ms += draft_s * 1e3
                run.verify_ms += verify_s * 1e3
            _draft_ahead(draft, run.window * verify_s)
        draft.release([Release(name)])
        target.release([Release(name)])
        return tokens


def _ask(scheduler: Any, task: Task) -> tuple[Any, float]:
    """Return the outcome of a block and the CPU seconds it took."""
    began = time.thread_time()
    scheduler.submit([task])
    while not (replies := scheduler.step()):
        pass
    outcome = replies[0][1].outcome
    if isinstance(outcome, GammarayError):
        raise outcome
    return outcome, time.thread_time() - began


def _draft_ahead(draft: DraftScheduler, seconds: float) -> None:
    began = time.thread_time()
    while draft.has_work and time.thread_time() - began < seconds:
        draft.step()


def _cases(window: float) -> list[Run]:
    coupled, rejection = VerificationMethod.COUPLED, VerificationMethod.REJECTION
    found = []
    for temperature in TEMPERATURES:
        for method in (coupled, rejection) if temperature else (coupled,):
            for gamma, max_nodes in (*((gamma, 0) for gamma in CHAINS), *TREES):
                if method is coupled or not max_nodes:
                    found += [Run(method, temperature, gamma, max_nodes, w) for w in (0.0, window)]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark, print a table and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draft_ahead", description=__doc__)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--window", type=float, default=1.5, help="time for draft-ahead / time of a verify")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    texts, pair = prompts("mixed", options.prompts), Pair()
    table = plain_table("Draft-ahead and trees, demo pair", _COLUMNS)
    documents = []
    for run in _cases(options.window):
        pair.run(run, texts, options.tokens)
        documents.append(run.document())
        table.add_row(*_row(documents[-1]))
    Console().print(table)
    settings = {"window": options.window, "tokens": options.tokens, "prompts": fingerprint(texts)}
    print(write_result("draft-ahead", {"settings": settings, "runs": documents}, options.out))


_COLUMNS = ("method", "T", "shape", "ahead", "hits", "tokens / cycle", "draft ms", "verify ms")


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    return (
        run["method"],
        f"{run['temperature']:g}",
        f"tree {run['gamma']}/{run['max_nodes']}" if run["max_nodes"] else f"chain {run['gamma']}",
        "on" if run["window"] else "off",
        f"{run['hit_rate']:.2f}" if run["window"] else "",
        f"{run['tokens_per_cycle']:.2f}",
        f"{run['draft_ms_per_cycle']:.2f}",
        f"{run['verify_ms_per_cycle']:.2f}",
    )


if __name__ == "__main__":
    main()
