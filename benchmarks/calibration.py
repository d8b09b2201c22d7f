"""What the draft believes and what comes: chains by their believed probability, and how many are accepted.

    python -m benchmarks.calibration

The target writes texts. At each place the draft would propose a chain, which is accepted as far as it is the
target's text; shared noise above temperature 0. Chains are put into bins by the probability that the draft
gives them, as it is and with the power that it learns of each text (`services.speculation.calibration`; here
at once, in a worker one proposal later). The error is the mean distance of belief and share over all chains.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.provenance import write_result
from gammaray.bench.tables import plain_table
from gammaray.bench.workloads import prompts
from services.demo_pair import DRAFT_DIR, TARGET_DIR
from services.engine.engine import Engine, SequenceInput
from services.engine.loader import load_engine
from services.engine.sampling.noise import Noise
from services.speculation.calibration import Calibration
from services.speculation.predictions import draw_temperature

WORKLOADS = (
    ("prose", 0.0),
    ("repetitive", 0.0),
    ("mixed", 0.0),
    ("mixed", 0.7),
    ("mixed", 1.0),
    ("mixed", 1.2),
)
_BINS = 10


def confidences(
    target: Engine, draft: Engine, prompt: Sequence[int], num_tokens: int, temperature: float, seed: int
) -> tuple[list[float], list[bool]]:
    """Return, for each token of the target's, the draft's confidence in its own and whether both agree."""
    tokens, noise = list(prompt), Noise(seed, 0, target.vocab_size)
    session_id, scale = f"{seed}-{temperature}", draw_temperature(temperature)
    believed, is_right = list[float](), list[bool]()
    for fed in (0, *range(len(prompt), len(prompt) + num_tokens - 1)):
        feed = SequenceInput(session_id, fed, tokens[fed:], 1)
        ours, theirs = (
            _scores(e.step([feed])[0][0], temperature, noise, len(tokens)) for e in (draft, target)
        )
        choice = int(ours.argmax())
        believed.append(float(torch.softmax(ours / scale, -1)[choice]))
        tokens.append(int(theirs.argmax()))
        is_right.append(tokens[-1] == choice)
    for engine in (target, draft):
        engine.release(session_id)
    return believed, is_right


def _scores(logits: Tensor, temperature: float, noise: Noise, position: int) -> Tensor:
    if temperature == 0:
        return logits
    return torch.log_softmax(logits / temperature, -1) + noise.gumbel(position, 1)[0]


def chains(
    believed: Sequence[float], is_right: Sequence[bool], length: int, common: Calibration
) -> list[tuple[float, float, bool]]:
    """Return what is believed of the chains of a text, plainly and calibrated, and whether they come true."""
    calibration, found, position = Calibration(common), list[tuple[float, float, bool]](), 0
    while position + length <= len(believed):
        window = slice(position, position + length)
        plain = math.prod(believed[window])
        found.append((plain, plain**calibration.power, all(is_right[window])))
        accepted = next((i for i, right in enumerate(is_right[window]) if not right), length)
        tested = believed[position : position + min(accepted + 1, length)]
        calibration.observe(list(tested), is_rejected=accepted < length)
        position += accepted + 1
    return found


def error(found: Sequence[tuple[float, bool]]) -> float:
    """Return the expected calibration error: over the bins, how far belief and share are apart."""
    total = 0.0
    for index in range(_BINS):
        bin_ = [(p, came) for p, came in found if min(int(p * _BINS), _BINS - 1) == index]
        total += abs(sum(p for p, _ in bin_) - sum(came for _, came in bin_))
    return total / len(found)


def measure(
    target_dir: Path, draft_dir: Path, num_prompts: int, num_tokens: int, length: int
) -> list[dict[str, Any]]:
    """Return the errors by workload."""
    tokenizer = AutoTokenizer.from_pretrained(str(target_dir))
    target, draft = (load_engine(str(path), threads=1) for path in (target_dir, draft_dir))
    points, common = [], Calibration()
    for name, temperature in WORKLOADS:
        found = []
        for seed, text in enumerate(prompts(name, num_prompts)):
            ids = tokenizer.encode(text)
            written = confidences(target, draft, ids, num_tokens, temperature, seed)
            found += chains(*written, length, common)
        points.append(
            {
                "workload": name,
                "temperature": temperature,
                "chains": len(found),
                "believed": sum(p for p, _, _ in found) / len(found),
                "calibrated": sum(p for _, p, _ in found) / len(found),
                "accepted": sum(came for _, _, came in found) / len(found),
                "error": error([(p, came) for p, _, came in found]),
                "error_calibrated": error([(p, came) for _, p, came in found]),
            }
        )
    return points


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", type=Path, default=TARGET_DIR)
    parser.add_argument("--draft", type=Path, default=DRAFT_DIR)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=192, help="that the target writes after each")
    parser.add_argument("--length", type=int, default=4, help="of the chains, in tokens")
    parser.add_argument("--out", type=Path, help="result file (default: in benchmarks/results)")
    options = parser.parse_args()
    if not 1 <= options.length <= options.tokens:
        parser.error(f"--length: got {options.length}, allowed: 1 to --tokens ({options.tokens})")
    points = measure(options.target, options.draft, options.prompts, options.tokens, options.length)
    columns = ("workload", "T", "chains", "believed", "calibrated", "accepted", "error", "calibrated error")
    table = plain_table(f"Chains of {options.length} tokens, accepted whole", columns)
    for point in points:
        name, temperature, num_chains, *shares = point.values()
        table.add_row(name, f"{temperature:g}", str(num_chains), *(f"{share:.3f}" for share in shares))
    Console().print(table)
    result = {
        "length": options.length,
        "prompts": options.prompts,
        "tokens": options.tokens,
        "points": points,
    }
    print(f"written: {write_result('calibration', result, options.out)}")


if __name__ == "__main__":
    main()
