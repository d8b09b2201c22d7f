"""Attention of all sessions at once: masks, faults that the comparison finds, and calls per layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.engine.core import batch as batch_module
from services.engine.core.batch import Batch, Segment, SequenceInput, allowed_slots
from services.engine.core.session_cache import SessionCache
from services.engine.engine import Engine
from services.engine.hf import runner
from services.engine.hf.batched_attention import MAX_PADDED_ROWS, StepAttention, padded_mask
from tests.support.engine_helpers import (
    CONFIGS,
    CheckedEngine,
    batched_engine,
    plain_model,
    random_tokens,
    tiny_model,
)
from tests.support.torch_helpers import TorchOperations

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
def test_mask_of_many_sessions_is_that_of_each(window: int | None) -> None:
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


def test_keys_of_another_session_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = checked(tiny_model("llama", tmp_path))
    run.step(*[SequenceInput(name, 0, random_tokens(9, n), 1) for n, name in enumerate("abc")])
    assert run.worst <= TOLERANCE

    def crossed(batch: Batch, *sizes: int) -> StepAttention:
        caches = [segment.cache for segment in batch.segments]
        segments = [replace(s, cache=caches[i - 1]) for i, s in enumerate(batch.segments)]
        return StepAttention(replace(batch, segments=segments), *sizes)

    monkeypatch.setattr(runner, "StepAttention", crossed)
    run.step(*[SequenceInput(name, 9, random_tokens(2, n), 2) for n, name in enumerate("abc")])
    assert run.worst > TOLERANCE


@pytest.mark.parametrize(("arch", "masked"), [("llama", False), ("mistral", True), ("gpt_oss", True)])
def test_prompts_have_a_mask_only_if_their_layers_need_one(
    arch: str, masked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def calls_of(engine: Engine, num_sessions: int, num_rows: int) -> Counter[str]:
    """Calls of a step in which each session, with 16 cached tokens, feeds `num_rows`."""
    names = [f"{num_sessions}-{index}" for index in range(num_sessions)]
    engine.step([SequenceInput(name, 0, random_tokens(16, 1), 0) for name in names])
    feeds = [SequenceInput(name, 16, random_tokens(num_rows, 2), num_rows) for name in names]
    with TorchOperations() as calls:
        engine.step(feeds)
    return calls.launches()


@pytest.mark.parametrize(
    ("arch", "attention", "batched", "alone"),
    [
        # gpt_oss computes a second softmax per layer, that of its router.
        ("llama", "aten.scaled_dot_product_attention.default", 39, {2: 44, 8: 74, 32: 194}),
        ("gpt_oss", "aten.softmax.int", 71, {2: 88, 8: 172, 32: 508}),
    ],
)
def test_calls_per_layer_do_not_depend_on_the_number_of_sessions(
    arch: str, attention: str, batched: int, alone: dict[int, int], tmp_path: Path
) -> None:
    """The numbers are those of docs/lab.md."""
    types = CONFIGS[arch][1].get("layer_types", [])
    deeper = {"num_hidden_layers": 6, **({"layer_types": 2 * types} if types else {})}
    directories = [tiny_model(arch, tmp_path / "3"), tiny_model(arch, tmp_path / "6", **deeper)]
    calls = {
        (is_batched, n): [
            calls_of(batched_engine(path, batched=is_batched), n, num_rows=5) for path in directories
        ]
        for is_batched in (True, False)
        for n in alone
    }
    per_layer = {key: (deep.total() - shallow.total()) / 3 for key, (shallow, deep) in calls.items()}
    assert per_layer == {(True, n): batched for n in alone} | {(False, n): alone[n] for n in alone}
    # One attention call in a layer, and per session one copy of its new keys and values in a step.
    shallow, deep = calls[True, 32]
    assert deep[attention] - shallow[attention] == (6 if arch == "gpt_oss" else 3)
    assert shallow.total() - calls[True, 8][0].total() == 24
