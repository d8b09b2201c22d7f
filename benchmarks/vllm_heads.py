"""Acceptance of a head that drafts in the target: with vLLM, and on gammaray's own engine.

    python -m benchmarks.vllm_heads --target TARGET --head HEAD

vLLM drafts with the argmax of a head's logits. gammaray adds the noise with which the target's token is
drawn, so that at a temperature above 0 both draw the same more often. The same prompts and seeds: vLLM with
that noise in the drafts and without it, and the same head on the CPU engine. Every text has to be that of
gamma 0 on the same engine. No times: vLLM's CPU build is for tests.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from transformers import AutoTokenizer

from benchmarks.prompts import load_tasks
from benchmarks.provenance import write_result
from gammaray.bench.tables import plain_table
from gammaray.blocks import Shape, Verdict
from gammaray.config import TargetSettings
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from services.engine.loader import load_engine
from services.scheduling.planning import Limits
from services.scheduling.tasks import Release, SessionSpec, VerifyTask
from services.target_worker.loading import load_local_drafter
from services.target_worker.scheduler import TargetScheduler
from services.vllm.engine import EngineOptions, VllmEngine
from services.vllm.scheduler import VllmScheduler

LIMITS = Limits(max_batch_tokens=1024, prefill_chunk=256)
_SHARES_NOISE = "services.vllm.sampler.shares_noise"
"""What decides whether a session's noise is added to its drafts."""

_request_ids = itertools.count(1)


@dataclass
class Row:
    """What one way to draft gave at one temperature.

    Args:
        drafts: The way.
        temperature: Of all prompts.
        num_cycles: Verifications after the first of each prompt, for which no head can draft.
        num_drafted: Tokens that the head proposed.
        num_accepted: Of them.
        num_equal: Prompts with the text of gamma 0.
    """

    drafts: str
    temperature: float
    num_cycles: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_equal: int = 0

    @property
    def tokens_per_cycle(self) -> float:
        """Tokens that a verification emits."""
        return 1 + self.num_accepted / max(1, self.num_cycles)


@dataclass
class _Text:
    """A completion in progress."""

    name: str
    spec: SessionSpec
    tokens: list[int]
    most: int
    held: int = 0
    num_cycles: int = field(default=0)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.spec.prompt_length :]

    @property
    def left(self) -> int:
        is_ended = bool(self.output) and self.output[-1] in self.spec.eos_token_ids
        return 0 if is_ended else self.most - len(self.output)

    def block(self, depth: int) -> VerifyTask:
        """Return the next block."""
        depth = min(depth, self.left - 1)
        return VerifyTask(
            request_id=next(_request_ids),
            session_id=self.name,
            epoch=1,
            base_position=len(self.tokens),
            context_start=self.held,
            context=self.tokens[self.held :],
            spec=self.spec if self.held == 0 else None,
            deadline=math.inf,
            deliver=lambda task, reply: None,
            proposal=Proposal(),
            num_top_logprobs=None,
            head=Shape(depth) if depth > 0 else None,
        )

    def take(self, verdict: Verdict, row: Row) -> None:
        """Commit a verdict, up to the first token that ends the text."""
        drafted = () if verdict.drafted is None else verdict.drafted.token_ids
        emitted = [*(drafted[node] for node in verdict.accepted_path), verdict.next_token_id]
        self.held = len(self.tokens)
        for token_id in emitted:
            self.tokens.append(token_id)
            if token_id in self.spec.eos_token_ids:
                break
        if self.num_cycles:
            row.num_cycles += 1
            row.num_drafted += len(drafted)
            row.num_accepted += len(verdict.accepted_path)
        self.num_cycles += 1


def measure(
    scheduler: Any,
    prompts: Sequence[Sequence[int]],
    row: Row,
    *,
    num_tokens: int,
    depth: int,
    eos_token_ids: tuple[int, ...],
) -> list[list[int]]:
    """Complete all prompts at once, each with a seed of its own, and return the completions.

    Args:
        scheduler: Of vLLM or of the CPU engine.
        prompts: Token ids.
        row: The counts are added to it.
        num_tokens: Longest completion.
        depth: Tokens that the head may draft; 0: gamma 0.
        eos_token_ids: They end a completion.
    """
    texts = [
        _Text(
            f"{row.drafts} {row.temperature} {depth} {at}",
            SessionSpec(
                SamplingParams(temperature=row.temperature, seed=1000 + at),
                VerificationMethod.COUPLED,
                len(prompt),
                eos_token_ids,
            ),
            list(prompt),
            num_tokens,
        )
        for at, prompt in enumerate(prompts)
    ]
    while active := [text for text in texts if text.left > 0]:
        waiting = {text.name: text for text in active}
        scheduler.submit([text.block(depth) for text in active])
        while waiting:
            for task, reply in scheduler.step():
                if isinstance(reply.outcome, Exception):
                    raise reply.outcome
                waiting.pop(task.session_id).take(reply.outcome, row)
    scheduler.release([Release(text.name) for text in texts])
    scheduler.step()
    return [text.output for text in texts]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vllm_heads",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", required=True, help="model directory")
    parser.add_argument("--head", required=True, help="directory of a head that both engines load")
    parser.add_argument("--prompts", type=int, default=10, help="chat tasks; default 10")
    parser.add_argument("--tokens", type=int, default=64, help="of a completion; default 64")
    parser.add_argument("--depth", type=int, default=5, help="tokens of a proposal; default 5")
    parser.add_argument("--temperatures", default="0,0.7,1", help="default 0,0.7,1")
    parser.add_argument("--out", type=Path, help="new result file; default: in benchmarks/results")
    options = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    templated = partial(
        tokenizer.apply_chat_template, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    prompts: list[Any] = [templated(list(task.messages)) for task in load_tasks(("chat",), options.prompts)]
    engine = load_engine(options.target)
    settings = TargetSettings(model=options.target, head=options.head)
    own = TargetScheduler(engine, LIMITS, head=load_local_drafter(settings, engine), draft_ahead=False)
    vllm = VllmScheduler(
        VllmEngine(EngineOptions(options.target, head=options.head, cache_budget_bytes=512 << 20)), LIMITS
    )
    run = partial(
        measure, num_tokens=options.tokens, eos_token_ids=(tokenizer.eos_token_id,), prompts=prompts
    )
    rows = []
    for temperature in map(float, options.temperatures.split(",")):
        for name, scheduler in (("own engine", own), ("vLLM", vllm)):
            plain = run(scheduler, row=Row("gamma 0", temperature), depth=0)
            for drafts in (name, f"{name}, no noise"):
                if drafts != name and (temperature == 0 or scheduler is own):
                    continue
                row = Row(drafts, temperature)
                with nullcontext() if drafts == name else patch(_SHARES_NOISE, lambda spec: False):
                    texts = run(scheduler, row=row, depth=options.depth)
                row.num_equal = sum(map(list.__eq__, plain, texts))
                rows.append(row)
    vllm.close()
    table = plain_table(
        f"A head that drafts {options.depth} tokens, {options.prompts} prompts",
        ("drafts", "T", "cycles", "drafted", "accepted", "tokens per cycle", "texts of gamma 0"),
    )
    for row in rows:
        counts = map(str, (row.num_cycles, row.num_drafted, row.num_accepted))
        table.add_row(
            row.drafts, f"{row.temperature:g}", *counts, f"{row.tokens_per_cycle:.2f}", str(row.num_equal)
        )
    Console(width=120).print(table)
    keys = ("target", "head", "prompts", "tokens", "depth")
    result = {
        **{key: getattr(options, key) for key in keys},
        "rows": [{**asdict(row), "tokens_per_cycle": row.tokens_per_cycle} for row in rows],
    }
    print(f"written: {write_result('vllm-heads', result, options.out)}")


if __name__ == "__main__":
    main()
