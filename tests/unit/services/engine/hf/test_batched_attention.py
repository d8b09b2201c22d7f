"""Attention of all sessions at once: masks, and calls per layer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.core import batch as batch_module
from services.engine.core.batch import Segment, SequenceInput, allowed_slots
from services.engine.core.session_cache import SessionCache
from services.engine.hf import batched_attention
from services.engine.hf.batched_attention import MAX_PADDED_ROWS, padded_mask
from tests.support.engine_helpers import CheckedEngine, batched_engine, plain_model, random_tokens, tiny_model

TOLERANCE = 1e-4


def checked(directory: Path) -> CheckedEngine:
    return CheckedEngine(batched_engine(directory), plain_model(directory))


def random_segment(generator: torch.Generator) -> Segment:
    """A chain or a tree, sometimes with kept nodes or slots that were not fed, as `plan_batch` makes them."""

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    start = number(0, 30)
    cache = SessionCache(torch.zeros(1, 1, 64, 1), first=number(0, min(start, 3)))
    kind = number(0, 2)
    if kind == 0:
        count = number(1, 9)
        return Segment(cache, 0, count, start, None, range(start, start + count))
    start = max(start, 4)
    kept = number(1, 6) if kind == 2 else 0
    chain = 0 if kept else number(0, 3)
    parents = [number(-2, node - 1) for node in range(kept + number(1, 8))]
    depth: list[int] = []
    for parent in parents:
        depth.append(start + chain + parent + 1 if parent < 0 else depth[parent] + 1)
    cache.tree_parents.extend(parents[:kept])
    positions = [*range(start, start + chain), *depth[kept:]]
    return Segment(cache, 0, len(positions), start, parents[kept:], positions, kept)


@pytest.mark.parametrize("window", [None, 1, 3, 8])
def test_mask_of_many_sessions_is_that_of_each(window):
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        segments = [random_segment(generator) for _ in range(4)]
        num_rows = max(segment.count for segment in segments) + 1
        firsts = [segment.cache.first for segment in segments]
        mask = padded_mask(segments, window, firsts, num_rows, 64, torch.device("cpu"))
        for index, (segment, first) in enumerate(zip(segments, firsts, strict=True)):
            end = segment.slot + segment.count
            allowed = allowed_slots(segment, window)
            if allowed is None:
                allowed = torch.ones(segment.count, end, dtype=torch.bool)
            assert torch.equal(mask[index, : segment.count, : end - first], allowed[:, first:])
            # Nothing after the session's slots is seen, and no row is without a slot.
            assert not mask[index, :, end - first :].any()
            assert mask[index].any(-1).all()


@pytest.mark.parametrize(("arch", "masked"), [("llama", False), ("mistral", True), ("gpt_oss", True)])
def test_prompts_have_a_mask_only_if_their_layers_need_one(arch, masked, tmp_path, monkeypatch):
    """Chunks of one session alone, then one too long to be padded in a step with other sessions."""
    run = checked(tiny_model(arch, tmp_path))
    masks = []
    right = batch_module.allowed_slots
    monkeypatch.setattr(batch_module, "allowed_slots", lambda *given: masks.append(given) or right(*given))
    run.step(SequenceInput("a", 0, random_tokens(20, 1), 2))
    run.step(SequenceInput("a", 20, random_tokens(30, 2), 2))
    run.step(
        SequenceInput("b", 0, random_tokens(3, 3), 1),
        SequenceInput("a", 50, random_tokens(MAX_PADDED_ROWS + 1, 4), 2),
    )
    assert run.worst <= TOLERANCE
    assert bool(masks) == masked


@pytest.mark.parametrize("num_sessions", [2, 32])
def test_one_call_per_layer_attends_for_all_sessions(num_sessions, tmp_path, monkeypatch):
    engine, calls = batched_engine(tiny_model("llama", tmp_path)), []
    right = batched_attention.F.scaled_dot_product_attention

    def counted(*given: Any, **options: Any) -> torch.Tensor:
        calls.append(given)
        return right(*given, **options)

    names = [str(number) for number in range(num_sessions)]
    engine.step([SequenceInput(name, 0, random_tokens(16, 1), 0) for name in names])
    monkeypatch.setattr(batched_attention.F, "scaled_dot_product_attention", counted)
    engine.step([SequenceInput(name, 16, random_tokens(5, 2), 5) for name in names])
    assert len(calls) == 3
