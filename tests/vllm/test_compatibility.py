"""The names of vLLM that are used, in the version that is supported."""

from tests.support import vllm_names
from tests.support.vllm_names import find_missing


def test_the_supported_version_has_every_name():
    assert find_missing() == []


def test_a_name_that_is_gone_is_found(monkeypatch):
    names = {"vllm.v1.engine.core:EngineCore": ("step", "gone"), "vllm.v1.engine.core:Gone": ()}
    monkeypatch.setattr(vllm_names, "NAMES", names)
    monkeypatch.setattr(vllm_names, "FIELDS", {"vllm.v1.request:Request": ("is_prefill_chunk", "left")})
    assert find_missing() == [
        "vllm.v1.engine.core:EngineCore.gone",
        "vllm.v1.engine.core:Gone",
        "vllm.v1.request:Request.left",
    ]
