"""Loads copies of models, drafts and heads in which one number or one tensor is changed.

`python -m tests.support.mutated_models FOLDER COUNT` loads COUNT copies of each kind, chosen at random, and
computes with them. It prints a JSON object: how many ended how, and what went wrong. The last line of its
standard error names the last copy, for the case that a kernel ends the process.
"""

from __future__ import annotations

import json
import logging
import math
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from gammaray.blocks import Shape
from gammaray.config import TargetSettings
from gammaray.errors import GammarayError
from gammaray.types import SamplingParams
from services.engine.core.batch import SequenceInput
from services.engine.core.errors import InvalidModelError, UnsupportedModelError
from services.engine.engine import Engine
from services.engine.loader import load_engine
from services.scheduling.planning import Limits
from services.target_worker.loading import load_local_drafter
from services.target_worker.scheduler import TargetScheduler
from tests.support.drafter_helpers import make_drafter
from tests.support.engine_helpers import random_tokens, tiny_model
from tests.support.head_helpers import DATA, as_official, bigram_head
from tests.support.target_helpers import Run

PROMPT = random_tokens(9, seed=3)
NUMBERS = (0, -1, 1, 3, 2**40, math.nan, math.inf, -0.5, "4")

Try = Callable[[Path], None]


def kinds(folder: Path) -> Iterator[tuple[Path, Try]]:
    """Yield a model, draft or head of each kind, and what loads it and computes with it."""
    target = tiny_model("llama", folder, seed=3)
    engine = load_engine(str(target))
    plain = tokens_of(TargetScheduler(engine, Limits(1024, 256)), 0)

    def as_model(path: Path) -> None:
        compute(load_engine(str(path)))

    def as_draft(path: Path) -> None:
        compute(load_engine(str(path), draft_for=str(target)))

    def as_head(path: Path) -> None:
        head = load_local_drafter(TargetSettings(model=str(target), head=str(path)), engine)
        assert tokens_of(TargetScheduler(engine, Limits(1024, 256), head=head), 3) == plain

    for arch in ("llama-yarn", "gpt2", "deepseek_v3"):
        yield tiny_model(arch, folder / "models"), as_model
    drafter = {"pard_token": 4, "mask_embedding": True, "draft_vocab_size": 40}
    yield make_drafter(target, folder / "drafter", **drafter), as_draft
    yield make_drafter(target, folder / "shared", shares_embedding=True), as_draft
    yield DATA / "llama", as_head
    yield DATA / "qwen3", as_head
    yield as_official(folder / "official"), as_head
    yield bigram_head(folder / "biased", target), as_head


def compute(engine: Engine) -> None:
    count = min(3, engine.max_context)
    (logits,) = engine.step([SequenceInput("s", 0, PROMPT[:count], count)])
    assert logits.shape == (count, engine.vocab_size)
    assert logits.isfinite().all()


def tokens_of(scheduler: TargetScheduler, depth: int) -> list[int]:
    run = Run(scheduler, PROMPT, SamplingParams(temperature=1.0, seed=5))
    while len(run.tokens) < len(PROMPT) + 6:
        run.cycle(Shape(depth))
    vocab_size = scheduler.engine.vocab_size
    assert all(0 <= token < vocab_size for proposal in run.proposals for token in proposal)
    return run.tokens[: len(PROMPT) + 6]


def numbers(stored: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the place and the value of each number in a configuration."""
    if isinstance(stored, (dict, list)):
        for key, value in stored.items() if isinstance(stored, dict) else enumerate(stored):
            yield from numbers(value, (*path, key))
    elif isinstance(stored, (int, float)) and not isinstance(stored, bool):
        yield path, stored


def with_number(stored: Any, path: tuple[Any, ...], value: object) -> Any:
    """Return a configuration with another value at a place."""
    if not path:
        return value
    copy = dict(stored) if isinstance(stored, dict) else list(stored)
    copy[path[0]] = with_number(stored[path[0]], path[1:], value)
    return copy


def tensors(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield other tensors than a tensor: of other shapes, types and values."""
    yield "a row less", tensor[:-1].clone()
    yield "a row more", torch.cat([tensor, tensor[:1]])
    yield "a dimension more", tensor[None].clone()
    yield "flat", tensor.flatten()[:-1].clone()
    yield "empty", tensor[:0].clone()
    yield "integers", tensor.to(torch.int32) if tensor.is_floating_point() else tensor.float() + 0.5
    if tensor.is_floating_point():
        for value in (math.nan, math.inf):
            changed = tensor.clone()
            changed.view(-1)[-1] = value
            yield str(value), changed
        yield "float64 past float32", tensor.double() * 1e300
    else:
        for value in (-(2**62), -1, 2**31, 2**62):
            yield str(value), torch.full_like(tensor, value)


def mutants(source: Path, copy: Path, count: int, seed: int) -> Iterator[str]:
    """Make changed copies of a directory, one after another; yields what was changed."""
    shutil.copytree(source, copy)
    config, file = copy / "config.json", next(copy.glob("m*.safetensors"))
    stored, weights = json.loads(config.read_text()), load_file(file)
    changes: list[tuple[str, Any, Any]] = []
    for path, number in numbers(stored):
        more = number + 1 if isinstance(number, int) else number * 2
        changes += [("", path, value) for value in (*NUMBERS, more)]
    for key, tensor in weights.items():
        changes += [(key, what, other) for what, other in tensors(tensor)]
    for key, what, value in random.Random(seed).sample(changes, min(count, len(changes))):
        changed = with_number(stored, what, value) if not key else stored
        config.write_text(json.dumps(changed))
        others = {key: value.contiguous()} if key else {}
        save_file(weights | others, file, metadata={"format": "pt"})
        yield f"{key}: {what}" if key else f"{'.'.join(map(str, what))} = {value!r}"


def main(folder: Path, count: int) -> None:
    disable_progress_bar()
    logging.disable(logging.ERROR)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for number, (source, load) in enumerate(kinds(folder)):
        load(source)
        for change in mutants(source, folder / "mutants" / str(number), count, number):
            name = f"{source.name}: {change}"
            print(name, file=sys.stderr, flush=True)
            try:
                load(folder / "mutants" / str(number))
                counts["computed"] += 1
            except GammarayError as error:
                counts["invalid" if isinstance(error, InvalidModelError) else "refused"] += 1
                if not isinstance(error, UnsupportedModelError) or "\n" in str(error):
                    wrong.append(f"{name}: {type(error).__name__}: {error}")
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__}: {error}")
        counts["kinds"] += 1
    print(json.dumps({"counts": counts, "wrong": wrong}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
