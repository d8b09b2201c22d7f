"""vLLM's own server with the plug-in gammaray-vllm: are completions with speculation the plain ones?

Each drafter and length gets a server of its own. The same prompts and seeds are completed, several at once,
and each completion is compared with that of the server without speculation. A difference is a tie if the
noisy scores of its two tokens are closer than --tie: rounding, which depends on the batch, decides then. The
noise of the V2 model runner is vLLM's and not known here: above temperature 0 a tie is a difference where the
log-probabilities of the two servers differ, too, by less than --tie. `roundings` has that difference.
`accepted` is vLLM's mean acceptance length, bonus token included, `standard` that of vLLM's own rule.

    python -m benchmarks.vllm_plugin --target build/models/smollm2 --prompts 40
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
from gammaray_vllm import RUNNER_VARIABLE, VARIABLE
from gammaray_vllm.noise import gumbel, row_keys
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from benchmarks.cluster import ClusterError, at_once, run_or_exit, running_server
from benchmarks.provenance import make_parser, settings_of, write_result
from benchmarks.workloads import WORKLOADS, prompts

_START_TIMEOUT_S = 900.0
_ANSWER_TIMEOUT_S = 900.0
_NEAR_TOKENS = 20
"""Alternatives among which the tokens of a difference are looked for."""

_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
_COUNTER = r"^vllm:spec_decode_num_{}_total(?:{{[^}}]*}})? (\S+)$"
_QUANTISED_LEVELS = 7  # on each side of zero, as with 4 bits


class Completion(NamedTuple):
    """Tokens, and the log-probabilities of the likely ones at each place."""

    token_ids: list[int]
    near: list[dict[int, float]]


def quantised(source: Path, folder: Path) -> Path:
    """Write a copy of a model whose matrices are rounded to four bits per row, for a draft; return it."""
    made = Path(shutil.copytree(source, folder / "quantised"))
    for path in made.glob("*.safetensors"):
        weights = load_file(path)
        for name, weight in weights.items():
            if weight.ndim == 2 and ".layers." in name:
                step = weight.float().abs().amax(dim=1, keepdim=True) / _QUANTISED_LEVELS
                weights[name] = ((weight.float() / step).round() * step).to(weight.dtype)
        save_file(weights, path, {"format": "pt"})
    return made


async def complete(
    client: httpx.AsyncClient, given: argparse.Namespace, texts: Sequence[list[int]], t: float
) -> list[Completion]:
    """Return the completions of all prompts at a temperature; the seed of each is its number."""

    async def one(number: int) -> Completion:
        body = {
            "model": given.target,
            "prompt": texts[number],
            "max_tokens": given.tokens,
            "temperature": t,
            "seed": number,
            "ignore_eos": True,
            "logprobs": _NEAR_TOKENS,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
        }
        response = await client.post("/v1/completions", json=body)
        if response.status_code != httpx.codes.OK:
            raise ClusterError(f"{response.status_code} {response.text}")
        (choice,) = response.json()["choices"]
        near = [
            {int(name.removeprefix("token_id:")): value for name, value in place.items()}
            for place in choice["logprobs"]["top_logprobs"]
        ]
        return Completion(choice["token_ids"], near)

    return await at_once(len(texts), given.concurrency, one)


class Difference(NamedTuple):
    """The first different token of two completions.

    `margin` is how far apart the scores of the two tokens are; None: they are not among the likely ones, or
    their noise is not known. `rounding` is the largest difference of a likely token's log-probabilities.
    """

    margin: float | None
    rounding: float

    def is_tie(self, limit: float, has_noise: bool) -> bool:
        """Whether rounding explains it; `has_noise`: noise that is not known was added."""
        if has_noise:
            return 0 < self.rounding < limit
        return self.margin is not None and self.margin < limit


def difference(
    plain: Completion, other: Completion, prompt: Sequence[int], seed: int, t: float, has_noise: bool = False
) -> Difference:
    """Return the first difference of two completions of a prompt."""
    pairs = zip(plain.token_ids, other.token_ids, strict=True)
    at = next(place for place, (one, two) in enumerate(pairs) if one != two)
    tokens, near = [plain.token_ids[at], other.token_ids[at]], plain.near[at]
    both = near.keys() & other.near[at].keys()
    rounding = max((abs(near[token] - other.near[at][token]) for token in both), default=0.0)
    if has_noise or any(token not in near for token in tokens):
        return Difference(None, rounding)
    scores = [near[token] / (t or 1) for token in tokens]
    if t:
        noise = gumbel(row_keys(torch.tensor([seed]), torch.tensor([len(prompt) + at])), max(tokens) + 1)[0]
        scores = [score + float(noise[token]) for score, token in zip(scores, tokens, strict=True)]
    return Difference(abs(scores[0] - scores[1]), rounding)


async def counters(client: httpx.AsyncClient) -> dict[str, float]:
    """Return vLLM's counts of accepted tokens and of drafts since its start; zeros without speculation."""
    text = (await client.get("/metrics")).text
    names = ("accepted_tokens", "drafts")
    return {name: sum(map(float, re.findall(_COUNTER.format(name), text, re.MULTILINE))) for name in names}


@asynccontextmanager
async def serving(
    given: argparse.Namespace, drafter: Mapping[str, Any] | None, is_coupled: bool
) -> AsyncIterator[httpx.AsyncClient]:
    """Run vLLM's server until the block ends, with the plug-in if `is_coupled`; yield a client of it."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", given.target]
    command += ["--dtype", given.dtype, "--max-model-len", "1024", "--max-logprobs", str(_NEAR_TOKENS)]
    command += ["--max-num-seqs", str(given.concurrency), "--enforce-eager"]
    command += ["--gpu-memory-utilization", str(given.memory_share)]
    if drafter is not None:
        command += ["--speculative-config", json.dumps(drafter)]
    os.environ |= {**_ENVIRONMENT, VARIABLE: str(int(is_coupled))}
    async with (
        running_server(command, _START_TIMEOUT_S) as url,
        httpx.AsyncClient(base_url=url, timeout=_ANSWER_TIMEOUT_S) as client,
    ):
        yield client


async def served(
    given: argparse.Namespace, drafter: Mapping[str, Any] | None, is_coupled: bool, texts: Sequence[list[int]]
) -> dict[float, tuple[list[Completion], float]]:
    """Return for each temperature the completions of a server and its mean acceptance length."""
    found = {}
    async with serving(given, drafter, is_coupled) as client:
        for t in given.temperatures:
            before = await counters(client)
            completions = await complete(client, given, texts, t)
            after = await counters(client)
            accepted, drafts = (after[name] - before[name] for name in ("accepted_tokens", "drafts"))
            found[t] = completions, round(1 + accepted / max(1.0, drafts), 3)
    return found


def drafters(given: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Return vLLM's options of each drafter; `folder` is for a draft model that is made."""
    found: dict[str, dict[str, Any]] = {
        "ngram": {"prompt_lookup_min": 2, "prompt_lookup_max": 4},
        "draft_model": {"model": given.draft or str(quantised(Path(given.target), folder))},
    }
    if given.head:
        found["eagle3"] = {"model": given.head}
    return {method: {"method": method, **options} for method, options in found.items()}


def encoded(given: argparse.Namespace) -> list[list[int]]:
    """Return the prompts as token ids."""
    tokenizer = AutoTokenizer.from_pretrained(given.target)
    return [tokenizer.encode(text)[: given.prompt_tokens] for text in prompts(given.workload, given.prompts)]


async def run(given: argparse.Namespace, folder: Path, rows: list[dict[str, Any]]) -> None:
    """Measure all servers; append a row for each drafter, length and temperature.

    A drafter whose server fails has a row with its `error`.
    """
    texts, methods = encoded(given), drafters(given, folder)
    is_second = os.environ.get(RUNNER_VARIABLE, "0") not in ("", "0")
    plain = await served(given, None, True, texts)
    for method, options in methods.items():
        for count in given.counts:
            drafter = {**options, "num_speculative_tokens": count}
            try:
                coupled = await served(given, drafter, True, texts)
                standard = await served(given, drafter, False, texts) if given.standard else {}
            except ClusterError as error:  # not every model runner has every drafter
                rows.append({"method": method, "K": count, "error": str(error)})
                print(f"{method}, {count}: not measured: {error}", flush=True)
                continue
            for t, (completions, accepted) in coupled.items():
                has_noise = is_second and t > 0
                found = [
                    difference(one, other, text, seed, t, has_noise)
                    for seed, (one, other, text) in enumerate(
                        zip(plain[t][0], completions, texts, strict=True)
                    )
                    if one.token_ids != other.token_ids
                ]
                ties = sum(each.is_tie(given.tie, has_noise) for each in found)
                row = {
                    **{"method": method, "K": count, "temperature": t, "equal": len(texts) - len(found)},
                    **{"ties": ties, "different": len(found) - ties},
                    "margins": [each.margin for each in found],
                    "roundings": [each.rounding for each in found],
                    **{"accepted": accepted, "standard": standard[t][1] if standard else None},
                }
                print(row, flush=True)
                rows.append(row)


def main() -> None:
    """Parse the command line, measure, write the result; exit with 1 if a completion differs beyond ties."""
    parser = make_parser(__doc__)
    parser.add_argument("--target", required=True, help="directory of a model")
    parser.add_argument("--draft", help="draft model; by default the target with weights of four bits")
    parser.add_argument("--head", help="EAGLE-3 head")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 8], help="lengths of proposals")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--prompt-tokens", type=int, default=256, help="most tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="length of each completion")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--workload", default="mixed", choices=WORKLOADS)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tie", type=float, default=1e-3)
    parser.add_argument("--memory-share", type=float, default=0.85, help="of a GPU's memory, for vLLM")
    parser.add_argument("--no-standard", dest="standard", action="store_false", help="leave vLLM's rule out")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        run_or_exit(run(given, Path(folder), rows))
    path = write_result("vllm-plugin", {"options": settings_of(given), "rows": rows}, given.out)
    print(f"written to {path}")
    sys.exit(any("error" in row or row["different"] for row in rows))


if __name__ == "__main__":
    main()
