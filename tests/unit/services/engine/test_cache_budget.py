"""Memory of a worker's KV cache: from a setting, or from the free memory."""

import pytest
import torch

from gammaray.config import TargetSettings
from gammaray.demo_pair import resolve_model
from services.engine import cache_budget as cache_budget_module
from services.engine.cache_budget import available_memory, cache_budget
from services.engine.loader import load_worker_engine

GIB = 2**30
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("device", "free", "num_bytes", "share", "expected"),
    [
        (CUDA, 60 * GIB, None, 0.8, 48 * GIB),
        (CUDA, 10 * GIB, None, 0.8, 8 * GIB),
        (CUDA, 60 * GIB, None, 0.5, 30 * GIB),
        (CUDA, 0, None, 0.8, GIB // 16),
        (CUDA, 60 * GIB, 7 * 2**20, 0.8, 7 * 2**20),
        (CPU, 3 * GIB, None, 0.8, 3 * GIB // 4),
        (CPU, 2 * GIB, None, 0.5, GIB // 2),  # the share is that of a GPU
        (CPU, 500 * GIB, None, 0.8, GIB),  # other workers run on the same machine
        (CPU, 1000, None, 0.8, GIB // 16),
    ],
)
def test_budget_is_that_of_its_setting_or_follows_the_free_memory(
    monkeypatch, device, free, num_bytes, share, expected
):
    monkeypatch.setattr(cache_budget_module, "free_memory", lambda asked: free if asked == device else 0)
    assert cache_budget(device, num_bytes, share) == expected


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        ("3221225472\n", "1073741824\n", 2 * GIB),
        ("max\n", "5\n", 8 * GIB),
        ("99999999999999\n", "5\n", 8 * GIB),
        ("10\n", "20\n", 0),
    ],
)
@pytest.mark.parametrize(
    "names",
    [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")],
    ids=["version 2", "version 1"],
)
def test_container_limit_applies_if_lower(tmp_path, names, limit, used, expected):
    (tmp_path / "memory").mkdir()
    for name, text in zip(names, (limit, used), strict=True):
        (tmp_path / name).write_text(text)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\nHugePages_Total:   0\n")
    assert available_memory(tmp_path, meminfo) == expected


def test_worker_uses_the_free_memory_or_its_setting():
    fixed, free = (
        load_worker_engine(resolve_model("demo", "draft"), settings).stats().cache_budget_bytes
        for settings in (TargetSettings(cache_budget_mb=7), TargetSettings())
    )
    assert fixed == 7 * 2**20
    assert GIB // 16 <= free <= GIB
    assert free == GIB or free == pytest.approx(available_memory() / 4, rel=0.5)
