"""Errors that lose a device; types by compute capability, with a stand-in for the card."""

import pytest
import torch

from gammaray.errors import InvalidArgumentError
from services.engine.core import model
from services.engine.core.device import has_bfloat16, raise_if_lost
from services.engine.core.errors import EngineLostError
from services.engine.core.model import torch_dtype


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
def test_raise_if_lost_by_kind_and_words(error, is_lost):
    if not is_lost:
        raise_if_lost(error)
        return
    with pytest.raises(EngineLostError) as raised:
        raise_if_lost(error)
    assert raised.value.__cause__ is error


def test_raise_if_lost_finds_the_cause_and_names_its_first_line():
    cause = RuntimeError("CUDA error: device-side assert triggered\nmore words")
    try:
        raise ValueError("a wrapper") from cause
    except ValueError as error:
        with pytest.raises(EngineLostError, match=r"RuntimeError: CUDA error: device-side assert triggered$"):
            raise_if_lost(error)


def test_torch_dtype_by_card(monkeypatch):
    card = torch.device("cuda", 0)
    assert torch_dtype("auto", torch.device("cpu")) == torch.float32
    for capability, auto in (((7, 5), torch.float16), ((8, 0), torch.bfloat16)):
        monkeypatch.setattr(model, "device_capability", lambda _, found=capability: found)
        assert torch_dtype("auto", card) == auto
        assert torch_dtype("float32", card) == torch.float32
    monkeypatch.setattr(model, "device_capability", lambda _: (7, 5))
    with pytest.raises(InvalidArgumentError, match=r"float16 .*compute capability 7\.5 lacks bfloat16"):
        torch_dtype("bfloat16", card)


@pytest.mark.parametrize(
    ("found", "has"), [({}, False), ({"amx_bf16": False}, False), ({"amx_bf16": 1}, True)]
)
def test_a_cpu_has_products_of_bfloat16_by_its_instructions(monkeypatch, found, has):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert (has_bfloat16("cpu"), has_bfloat16("cuda")) == (has, True)
