"""Models, drafts and heads with a wrong number or tensor compute or are refused; no kernel crashes.

A kernel that crashes ends pytest itself, with the last copy in the captured output.
"""

import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gammaray.blocks import Shape
from gammaray.config import TargetSettings
from gammaray.types import SamplingParams
from services.engine.core.batch import SequenceInput
from services.engine.core.errors import InvalidModelError, UnsupportedModelError
from services.engine.loader import load_engine
from services.own.head_loading import load_local_drafter
from services.own.target_scheduler import TargetScheduler
from services.scheduling.planning import Limits
from tests.support.drafter_helpers import make_drafter
from tests.support.engine_helpers import random_tokens, tiny_model
from tests.support.head_helpers import DATA, as_official, bigram_head
from tests.support.target_helpers import Run

COPIES = 60
PROMPT = random_tokens(9, seed=3)
NUMBERS = (0, -1, 1, 3, 2**40, math.nan, math.inf, -0.5, "4")
DRAFT = {"pard_token": 4, "mask_embedding": True, "draft_vocab_size": 40}
KINDS = {
    **{arch: lambda folder, _, arch=arch: tiny_model(arch, folder) for arch in ("gpt2", "deepseek_v3")},
    "llama-yarn": lambda folder, _: tiny_model("llama-yarn", folder),
    "draft": lambda folder, target: make_drafter(target, folder / "draft", **DRAFT),
    "shared draft": lambda folder, target: make_drafter(target, folder / "draft", shares_embedding=True),
    "head": lambda *_: DATA / "llama",
    "qwen3 head": lambda *_: DATA / "qwen3",
    "official head": lambda folder, _: as_official(folder / "head"),
    "bigram head": lambda folder, target: bigram_head(folder / "head", target),
}
OF_THE_NIGHT = ("qwen3 head", "bigram head", "shared draft")
"""Each has one beside it of nearly the same form."""


def compute(path: Path, target: Path, kind: str) -> None:
    if "head" not in kind:
        engine = load_engine(str(path), draft_for=str(target) if "draft" in kind else "")
        count = min(3, engine.max_context)
        (logits,) = engine.step([SequenceInput("s", 0, PROMPT[:count], count)])
        assert logits.shape == (count, engine.vocab_size)
        assert logits.isfinite().all()
        return
    engine, found = load_engine(str(target)), []
    head = load_local_drafter(TargetSettings(model=str(target), head=str(path)), engine)
    for drafter, depth in ((head, 3), (None, 0)):
        scheduler = TargetScheduler(engine, Limits(1024, 256), head=drafter)
        run = Run(scheduler, PROMPT, SamplingParams(temperature=1.0, seed=5))
        while len(run.output) < 6:
            run.cycle(Shape(depth))
        assert all(0 <= token < engine.vocab_size for proposal in run.proposals for token in proposal)
        found.append(run.output[:6])
    assert found[0] == found[1]


def with_numbers(stored):
    """Yield configurations with another number in one place, and what was changed."""
    for key, value in stored.items() if isinstance(stored, dict) else enumerate(stored):
        others = ()
        if isinstance(value, (dict, list)):
            others = with_numbers(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            others = ((other, repr(other)) for other in (*NUMBERS, 2 * value + 1))
        for other, what in others:
            changed = stored.copy()
            changed[key] = other
            yield changed, f"{key} = {what}" if "=" not in what else f"{key}.{what}"


def tensors(tensor: Tensor):
    """Yield other tensors than a tensor: of other shapes, types and values."""
    yield tensor[:-1]
    yield torch.cat([tensor, tensor[:1]])
    yield tensor[None]
    yield tensor.flatten()[:-1]
    yield tensor[:0]
    if not tensor.is_floating_point():
        yield tensor.float() + 0.5
        yield from (torch.full_like(tensor, value) for value in (-(2**62), -1, 2**31, 2**62))
        return
    yield tensor.to(torch.int32)
    yield tensor.double() * 1e300
    for value in (math.nan, math.inf):
        (changed := tensor.clone()).view(-1)[-1] = value
        yield changed


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.nightly] * (kind in OF_THE_NIGHT)) for kind in KINDS]
)
def test_changed_numbers_and_tensors_are_computed_with_or_refused_in_one_line(kind, tmp_path):
    target = tiny_model("llama", tmp_path, seed=3)
    source = KINDS[kind](tmp_path / "source", target)
    compute(source, target, kind)
    copy = shutil.copytree(source, tmp_path / "copy")
    file = next(copy.glob("m*.safetensors"))
    stored, weights = json.loads((copy / "config.json").read_text()), load_file(file)
    changes = [(config, {}, what) for config, what in with_numbers(stored)]
    for key, tensor in weights.items():
        changes += [(stored, {key: other}, f"{key} {list(other.shape)}") for other in tensors(tensor)]
    refused = list[UnsupportedModelError]()
    for config, others, what in random.Random(len(kind)).sample(changes, min(COPIES, len(changes))):
        print(what, flush=True)
        (copy / "config.json").write_text(json.dumps(config))
        save_file(
            {key: value.contiguous() for key, value in (weights | others).items()}, file, {"format": "pt"}
        )
        try:
            compute(copy, target, kind)
        except UnsupportedModelError as error:
            refused.append(error)
    assert not [error for error in refused if "\n" in str(error)]
    assert sum(isinstance(error, InvalidModelError) for error in refused) > 1
