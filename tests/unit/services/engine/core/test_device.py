"""Errors that lose a device; types by compute capability, with a stand-in for the card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gammaray.errors import InvalidArgumentError
from services.engine import engine as engine_module
from services.engine import loader
from services.engine.core import model
from services.engine.core.batch import SequenceInput
from services.engine.core.device import raise_if_lost
from services.engine.core.errors import EngineLostError
from services.engine.core.model import torch_dtype
from services.engine.loader import load_engine
from tests.support.engine_helpers import tiny_model


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"), True),
        (torch.distributed.DistBackendError("NCCL error, unhandled cuda error"), True),
        (RuntimeError("CUDA error: out of memory"), False),
        (torch.OutOfMemoryError("CUDA error: out of memory"), False),
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


def test_torch_dtype_by_card(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda", 0)
    assert torch_dtype("auto", torch.device("cpu")) == torch.float32
    for capability, auto in (((7, 5), torch.float16), ((8, 0), torch.bfloat16)):
        monkeypatch.setattr(model, "device_capability", lambda _, found=capability: found)
        assert torch_dtype("auto", card) == auto
        assert torch_dtype("float32", card) == torch.float32
    monkeypatch.setattr(model, "device_capability", lambda _: (7, 5))
    with pytest.raises(InvalidArgumentError, match=r"float16 .*compute capability 7\.5 lacks bfloat16"):
        torch_dtype("bfloat16", card)


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
    assert seen == [[torch.device("cpu")]]
    forward = engine.runner.forward
    monkeypatch.setattr(engine.runner, "forward", lambda batch: (seen.append([*current]), forward(batch))[1])
    engine.step([SequenceInput("a", 0, [1, 2], 1)])
    assert seen == [[torch.device("cpu")]] * 2
