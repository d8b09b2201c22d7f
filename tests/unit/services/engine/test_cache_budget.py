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


@pytest.fixture
def budget(monkeypatch):
    """Returns the budget with so much free memory on a device."""

    def of(device, free, num_bytes=None, share=0.8):
        with monkeypatch.context() as patch:
            patch.setattr(cache_budget_module, "free_memory", lambda asked: free if asked == device else 0)
            return cache_budget(device, num_bytes, share)

    return of


@pytest.mark.parametrize(
    ("device", "free", "expected"),
    [
        (CUDA, 60 * GIB, 48 * GIB),
        (CUDA, 10 * GIB, 8 * GIB),
        (CUDA, 0, GIB // 16),
        (CPU, 3 * GIB, 3 * GIB // 4),
        (CPU, 500 * GIB, GIB),  # other workers run on the same machine
        (CPU, 1000, GIB // 16),
    ],
)
def test_budget_follows_the_free_memory(budget, device, free, expected):
    assert budget(device, free) == expected


def test_share_of_a_gpu_is_a_setting(budget):
    assert budget(CUDA, 60 * GIB, share=0.5) == 30 * GIB
    assert budget(CPU, 2 * GIB, share=0.5) == GIB // 2


def test_explicit_budget_ignores_the_free_memory(budget):
    assert budget(CUDA, 60 * GIB, num_bytes=7 * 2**20) == 7 * 2**20


def write(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        ("3221225472\n", "1073741824\n", 2 * GIB),
        ("max\n", "5\n", 8 * GIB),
        ("99999999999999\n", "5\n", 8 * GIB),
    ],
)
@pytest.mark.parametrize(
    "names",
    [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")],
    ids=["version 2", "version 1"],
)
def test_container_limit_applies_if_lower(tmp_path, names, limit, used, expected):
    write(tmp_path, **{names[0]: limit, names[1]: used})
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\nHugePages_Total:   0\n")
    assert available_memory(tmp_path, meminfo) == expected


def test_container_above_its_limit_has_no_free_memory(tmp_path):
    write(tmp_path, **{"memory.max": "10\n", "memory.current": "20\n"})
    (tmp_path / "meminfo").write_text("MemAvailable: 100 kB\n")
    assert available_memory(tmp_path, tmp_path / "meminfo") == 0


def test_worker_uses_the_free_memory_or_its_setting():
    fixed, free = (
        load_worker_engine(resolve_model("demo", "draft"), settings).stats().cache_budget_bytes
        for settings in (TargetSettings(cache_budget_mb=7), TargetSettings())
    )
    assert fixed == 7 * 2**20
    assert GIB // 16 <= free <= GIB
    assert free == GIB or free == pytest.approx(available_memory() / 4, rel=0.5)
