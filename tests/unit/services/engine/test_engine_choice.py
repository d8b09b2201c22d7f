"""Which engine `auto` is."""

from __future__ import annotations

import pytest

from gammaray.config import TargetSettings
from gammaray.errors import InvalidArgumentError
from services.engine import choice
from services.engine.choice import target_uses_vllm, uses_vllm


@pytest.fixture(params=[True, False], ids=["vllm", "no vllm"])
def has_vllm(request, monkeypatch) -> bool:
    """Pretend that there is a GPU, and vLLM or not."""
    monkeypatch.setattr(choice.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(choice, "find_spec", lambda name: object() if request.param else None)
    return request.param


def test_auto_is_vllm_where_it_is_installed_and_there_is_a_gpu(has_vllm, monkeypatch):
    assert uses_vllm("auto", "auto") is has_vllm
    assert uses_vllm("auto", "cuda") is has_vllm
    assert not uses_vllm("auto", "cpu")
    assert uses_vllm("vllm", "cpu")
    assert not uses_vllm("native", "auto")
    assert not uses_vllm("transformers", "cuda")
    monkeypatch.setattr(choice.torch.cuda, "is_available", lambda: False)
    assert not uses_vllm("auto", "auto")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"head": "h", "draft_weights": "int8"}, "draft_weights"),
        ({"deterministic": True}, "deterministic"),
    ],
)
def test_auto_is_another_engine_for_what_vllm_does_not_serve(has_vllm, caplog, given, words):
    assert not target_uses_vllm(TargetSettings(model="m", **given))
    assert (f"the engine is not vllm, which does not serve {words}" in caplog.text) is has_vllm


def test_target_is_spread_only_by_vllm(has_vllm):
    settings = TargetSettings(tensor_parallel=2)
    if has_vllm:
        assert target_uses_vllm(settings)
    else:
        with pytest.raises(InvalidArgumentError, match="tensor_parallel: got 2, allowed: 1: vLLM"):
            target_uses_vllm(settings)
