"""Time per step of the sampler that gammaray puts into vLLM, on random logits: it needs a GPU, but not vLLM.

    python -m benchmarks.vllm_sampler --device cuda --out benchmarks/results/NAME.json

The batch is that of vLLM's model runner as far as the sampler reads it. Every step verifies a wrong proposal:
all rows are drawn and one token is emitted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.provenance import write_result
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from services.scheduling.tasks import SessionSpec
from services.vllm.messages import SESSION, SPEC, PostedBlock
from services.vllm.sampler import BlockSampler

_KINDS: dict[str, dict[str, Any]] = {
    "T 0": {"temperature": 0.0},
    "T 1": {"temperature": 1.0},
    "T 0.7": {"temperature": 0.7},
    "T 1, top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "T 1, repetition penalty 1.1": {"temperature": 1.0, "repetition_penalty": 1.1},
}
_SESSIONS, _GAMMAS, _STEPS, _WARM_UP = (1, 8, 32, 64), (0, 4), 12, 3
_PROMPT, _BASE = 1000, 1500


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    rows = []
    for kind, params in _KINDS.items():
        for sessions in _SESSIONS:
            for gamma in _GAMMAS:
                rows.append({"kind": kind, **_measure(params, sessions, gamma, options)})
                print(rows[-1], flush=True)
    if options.out is not None:
        write_result("vllm-sampler", {"vocab_size": options.vocab, "rows": rows}, options.out)


def _measure(params: dict[str, Any], sessions: int, gamma: int, options: Any) -> dict[str, Any]:
    device = torch.device(options.device)
    specs = [
        SessionSpec(SamplingParams(seed=seed, **params), VerificationMethod.COUPLED, _PROMPT, (2,))
        for seed in range(sessions)
    ]
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(sessions * (gamma + 1), options.vocab, generator=generator)
    here = logits.to(device)
    sampler, times = _sampler(specs, options.vocab, device), []
    for number in range(_STEPS):
        _wait(device)
        began = time.perf_counter()
        _step(sampler, sessions, gamma, _BASE + number, here)
        _wait(device)
        times.append(1e3 * (time.perf_counter() - began))
    cpu = _sampler(specs, options.vocab, torch.device("cpu"))
    is_equal = _step(cpu, sessions, gamma, _BASE, logits) == _step(
        _sampler(specs, options.vocab, device), sessions, gamma, _BASE, here
    )
    return {
        "sessions": sessions,
        "gamma": gamma,
        "median_ms": round(statistics.median(times[_WARM_UP:]), 3),
        "max_ms": round(max(times[_WARM_UP:]), 3),
        "equals_cpu": is_equal,
    }


def _sampler(specs: Sequence[SessionSpec], vocab_size: int, device: torch.device) -> BlockSampler:
    names = [str(number) for number in range(len(specs))]
    tokens = np.random.default_rng(0).integers(0, vocab_size, (len(specs), _BASE + _STEPS), dtype=np.int32)
    requests = {
        name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args={SESSION: name, SPEC: spec}))
        for name, spec in zip(names, specs, strict=True)
    }
    batch = SimpleNamespace(num_reqs=len(specs), req_ids=names, token_ids_cpu=tokens)
    return BlockSampler(SimpleNamespace(device=device, requests=requests, input_batch=batch), vocab_size)


def _step(sampler: BlockSampler, sessions: int, gamma: int, base: int, logits: torch.Tensor) -> Any:
    block = PostedBlock(Proposal((7,) * gamma), base)
    sampler.begin({str(number): block for number in range(sessions)})
    sampler.take_masks(None)
    return sampler.serve(logits, [gamma] * sessions)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
