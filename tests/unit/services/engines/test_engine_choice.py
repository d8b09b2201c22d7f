"""Which engine a worker gets."""

import pytest

from gammaray import engines
from gammaray.config import DraftSettings, TargetSettings
from gammaray.errors import InvalidArgumentError
from services.engines import choice
from services.engines.choice import choose, choose_for_draft


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there is a GPU, and vLLM's build for it."""
    monkeypatch.setattr(choice.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engines, "vllm_build", lambda: ("0.32.0", "cuda"))


@pytest.fixture(params=[True, False], ids=["vllm", "no vllm"])
def has_vllm(request, gpu, monkeypatch):
    if not request.param:
        monkeypatch.setattr(engines, "vllm_build", lambda: ("", ""))
    return request.param


def chosen(**given) -> str:
    return choose(TargetSettings(model="m", **given)).facts.name


def test_auto_is_vllm_where_it_is_installed_and_there_is_a_gpu(has_vllm, monkeypatch):
    expected = "vllm" if has_vllm else "native"
    assert chosen() == chosen(device="cuda") == expected
    assert chosen(device="cpu") == "native"
    assert [chosen(engine=name) for name in engines.ENGINES] == list(engines.ENGINES)
    monkeypatch.setattr(choice.torch.cuda, "is_available", lambda: False)
    assert chosen() == "native"


def test_auto_is_not_a_vllm_that_is_built_for_cpus(gpu, monkeypatch):
    monkeypatch.setattr(engines, "vllm_build", lambda: ("0.32.0+cpu", "cpu"))
    assert chosen() == "native"


@pytest.mark.parametrize(
    ("given", "field"),
    [({"head": "h", "draft_weights": "int8"}, "draft_weights"), ({"deterministic": True}, "deterministic")],
)
def test_auto_is_another_engine_for_what_vllm_does_not_serve(has_vllm, caplog, given, field):
    assert chosen(**given) == "native"
    assert (f"the engine is not vllm: {field}: got " in caplog.text) is has_vllm


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel: got 2, allowed: 1: vLLM is not the engine here"),
        ({"lora": "a=/a"}, "lora: got a=/a, allowed: empty: vLLM is not the engine here"),
    ],
)
def test_auto_refuses_what_only_vllm_serves_where_it_is_another_engine(has_vllm, given, words):
    if has_vllm:
        assert chosen(**given) == "vllm"
    else:
        with pytest.raises(InvalidArgumentError, match=words):
            chosen(**given)


@pytest.mark.parametrize(
    ("settings", "obstacle", "expected"),
    [
        ({}, None, "vllm"),
        ({"draft_weights": "int8"}, None, "native"),
        ({}, InvalidArgumentError("model", "d", "a causal model"), "native"),
        ({"engine": "vllm"}, InvalidArgumentError("model", "d", "a causal model"), "vllm"),
    ],
)
def test_auto_leaves_a_drafter_that_vllm_does_not_serve_to_the_own_engine(
    gpu, monkeypatch, settings, obstacle, expected
):
    monkeypatch.setattr(choice.VllmEngine, "refuse_draft", lambda *_: obstacle)
    assert choose_for_draft("draft", "", DraftSettings(**settings)).facts.name == expected
