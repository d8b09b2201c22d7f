"""Errors that lose a device; types by compute capability, with stand-ins for the card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gammaray.errors import InvalidArgumentError
from services.engine import engine as engine_module
from services.engine import loader
from services.engine.core import device, model
from services.engine.core.batch import SequenceInput
from services.engine.core.device import on_device, raise_if_lost, wait_for_device
from services.engine.core.errors import EngineLostError
from services.engine.core.model import torch_device, torch_dtype
from services.engine.loader import load_engine
from tests.support.engine_helpers import tiny_model

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the compute capability of any device."""

    def put(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(model, "device_capability", lambda _: capability)

    return put


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), True),
        (torch.AcceleratorError("an error without the usual words"), True),
        (RuntimeError("CUDA error: misaligned address"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"), True),
        (torch.distributed.DistBackendError("NCCL error, unhandled cuda error"), True),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: invalid configuration argument"), False),
        (torch.OutOfMemoryError("CUDA error: out of memory"), False),
        (RuntimeError("a shape"), False),
        (KeyError("CUDA error"), False),
        (RuntimeError(), False),
    ],
)
def test_raise_if_lost_by_kind_and_words(error: Exception, is_lost: bool) -> None:
    if not is_lost:
        raise_if_lost(error)
        return
    with pytest.raises(EngineLostError) as raised:
        raise_if_lost(error)
    assert raised.value.__cause__ is error


def test_raise_if_lost_finds_the_cause_and_names_its_first_line() -> None:
    cause = RuntimeError("CUDA error: device-side assert triggered\nmore words")
    try:
        raise ValueError("a wrapper") from cause
    except ValueError as error:
        with pytest.raises(EngineLostError, match=r"RuntimeError: CUDA error: device-side assert triggered$"):
            raise_if_lost(error)


def test_device_of_a_cpu_needs_no_guard_and_no_wait() -> None:
    with on_device(CPU):
        wait_for_device(CPU)
    assert device.device_capability(CPU) is None


@pytest.mark.parametrize(
    ("capability", "name", "expected"),
    [
        ((7, 5), "auto", torch.float16),
        ((7, 5), "float16", torch.float16),
        ((7, 5), "float32", torch.float32),
        ((8, 0), "auto", torch.bfloat16),
        ((8, 0), "bfloat16", torch.bfloat16),
    ],
)
def test_torch_dtype_by_card(
    capability: tuple[int, int], name: str, expected: torch.dtype, card: Any
) -> None:
    card(capability)
    assert torch_dtype(name, CARD) == expected


def test_torch_dtype_bfloat16_on_a_card_without_it_refused(card: Any) -> None:
    card((7, 5))
    with pytest.raises(InvalidArgumentError, match=r"float16 .*compute capability 7\.5 lacks bfloat16"):
        torch_dtype("bfloat16", CARD)


def test_torch_dtype_auto_on_a_cpu_is_float32() -> None:
    assert torch_dtype("auto", CPU) == torch.float32


def test_torch_device_past_the_last_card_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert torch_device("cuda:1").index == 1
    with pytest.raises(InvalidArgumentError, match="N below 2"):
        torch_device("cuda:2")


def test_engine_runs_forwards_and_the_probe_on_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a model on cuda:1 Triton would else launch on cuda:0."""
    current: list[torch.device] = []
    seen: list[list[torch.device]] = []

    @contextmanager
    def guard(where: torch.device) -> Iterator[None]:
        current.append(where)
        yield
        current.pop()

    monkeypatch.setattr(engine_module, "on_device", guard)
    monkeypatch.setattr(loader, "on_device", guard)
    right = loader.probe_model
    monkeypatch.setattr(loader, "probe_model", lambda given: (seen.append([*current]), right(given))[1])
    engine = load_engine(str(tiny_model("llama", tmp_path)), device="cpu", engine="transformers")
    assert seen == [[CPU]]
    forward = engine.runner.forward
    monkeypatch.setattr(engine.runner, "forward", lambda batch: (seen.append([*current]), forward(batch))[1])
    engine.step([SequenceInput("a", 0, [1, 2], 1)])
    assert seen == [[CPU], [CPU]]
