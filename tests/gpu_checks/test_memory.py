"""What fits a card of 80 GB, counted on tensors without data."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed; to enable: make gpu-checks", allow_module_level=True)

from benchmarks.gpu.compiled import meta_model
from services.engine.cache_budget import CacheBudget
from services.engine.core.errors import CacheFullError
from services.engine.core.kv_cache import CacheShape
from services.engine.cuda.pages import PagedStore
from services.engine.cuda.runner import GraphRunner
from services.engine.cuda.triton_kernels import TritonKernels

CARD = 79 * 2**30
"""What an H100 or A100 of 80 GB has free for a process."""

NUM_LAYERS = 32


def free_bytes() -> int:
    """Return what Llama-3.1-8B in bfloat16, with matrices of its own for embedding and head, leaves free."""
    model = meta_model("llama-3.1-8b", NUM_LAYERS)
    return CARD - model.step_bytes - model.embedding.nbytes


def store(share: float | None = None) -> PagedStore:
    """Return the pool of a worker that starts with the default settings, or another share."""
    options = {} if share is None else {"share": share}
    budget = CacheBudget(free=lambda _: free_bytes(), **options).on(torch.device("cuda"))
    shape = CacheShape(NUM_LAYERS, 2 * 8, 128, torch.bfloat16, torch.device("meta"))
    return PagedStore(shape, budget)


@pytest.mark.parametrize(("sessions", "tokens"), [(32, 8192), (1, 131_072)])
def test_sessions_fit_the_pool_of_the_default_share(sessions, tokens):
    pool = store()
    pool.reserve_all({f"s{number}": tokens for number in range(sessions)})
    assert pool.num_evictions == 0
    assert pool.used_bytes == sessions * tokens * pool.shape.slot_bytes
    with pytest.raises(CacheFullError):
        store(0.2).reserve_all({f"s{number}": tokens for number in range(32)})


def test_a_prefix_that_sessions_share_is_held_once():
    pool = store()
    (first,) = pool.reserve_all({"s0": 8192})
    first.tokens.extend([1] * 8192)
    held = pool.used_bytes
    for number in range(1, 200):
        pool.fork("s0", f"s{number}", 8192)
    assert pool.used_bytes == held


def test_the_buffers_of_all_captured_steps_fit_beside_the_pool():
    """8B with all of its 131,072 positions: one memory for every captured step, whatever their number."""
    model = meta_model("llama-3.1-8b")
    model = replace(model, rotation=torch.empty(2, 131_072, 64, device="meta"))
    runner = GraphRunner(model, TritonKernels(model))
    storages: dict[int, torch.UntypedStorage] = {}
    for bucket in runner.buckets.all():
        program = runner.program(bucket)
        buffers = program.buffers
        tensors = [value for value in vars(buffers).values() if isinstance(value, torch.Tensor)]
        tensors += [*buffers.scratch, buffers.stripes.score, buffers.stripes.token, program.tables.flat]
        for storage in (tensor.untyped_storage() for tensor in tensors):
            storages[id(storage)] = storage
    assert len(storages) < len(runner.buckets.all()) + 20
    beside = free_bytes() - store().budget_bytes
    assert sum(storage.nbytes() for storage in storages.values()) < beside / 10
