"""Models that the engine cannot serve exactly are rejected at load, with the reason."""

import json
from typing import Any

import pytest
import torch
from transformers import T5Config
from transformers.models.llama.modeling_llama import LlamaAttention

from gammaray.errors import InvalidArgumentError, NotFoundError
from services.engine.core.errors import UnsupportedModelError
from services.engine.hf import probe
from services.engine.hf.attention import LayerInput
from services.engine.loader import load_engine
from services.engine.native.weights import NativeModel
from tests.support.engine_helpers import UNSUPPORTED, tiny_model


@pytest.mark.parametrize("arch", UNSUPPORTED)
def test_load_unsupported_architecture_refused_with_reason(arch, tmp_path):
    directory = tiny_model(arch, tmp_path)
    with pytest.raises(UnsupportedModelError) as refused:
        load_engine(str(directory))
    assert UNSUPPORTED[arch] in refused.value.reason
    assert refused.value.model == str(directory)


@pytest.mark.parametrize("arch", ["recurrent_gemma", "qwen3_next"])
def test_load_layers_with_other_state_refused_by_the_probe(arch, tmp_path, monkeypatch):
    """A hybrid whose configuration would not tell is found by counting the calls of the attention."""
    served = frozenset({"linear_attention", "full_attention", "sliding_attention"})
    monkeypatch.setattr("services.engine.core.model.LAYER_TYPES", served)
    with pytest.raises(UnsupportedModelError, match="1 of 3 layers attend"):
        load_engine(str(tiny_model(arch, tmp_path)))


def test_load_encoder_decoder_refused(tmp_path):
    T5Config(vocab_size=97, d_model=32, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        load_engine(str(tmp_path))


def test_load_unknown_attention_argument_refused(tmp_path, monkeypatch):
    """An argument that we do not follow would give silently wrong logits."""
    directory = tiny_model("llama", tmp_path)
    right = probe.unknown_arguments
    monkeypatch.setattr(
        probe, "unknown_arguments", lambda given: right({**given, "position_bias": torch.zeros(1)})
    )
    with pytest.raises(UnsupportedModelError, match="position_bias"):
        load_engine(str(directory))


def test_load_window_by_mask_alone_refused(tmp_path, monkeypatch):
    """A model that slides by its mask but does not tell its attention would never slide here."""
    directory = tiny_model("mistral", tmp_path)
    right = LayerInput.__init__

    def forget_window(self: LayerInput, *given: Any) -> None:
        right(self, *given[:4], None, *given[5:])

    monkeypatch.setattr(LayerInput, "__init__", forget_window)
    with pytest.raises(UnsupportedModelError, match="slides by its configuration"):
        load_engine(str(directory))


def test_load_general_path_that_differs_refused(tmp_path, monkeypatch):
    right = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        "services.engine.hf.attention.F.scaled_dot_product_attention",
        lambda *given, attn_mask, scale: right(*given, scale=scale),
    )
    with pytest.raises(UnsupportedModelError, match="differ from the model's own"):
        load_engine(str(tiny_model("llama", tmp_path)), engine="transformers")


def test_load_fast_kernel_path_that_differs_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(NativeModel, "rotation", lambda self, count: (torch.ones(64, 4), torch.ones(64, 4)))
    with pytest.raises(UnsupportedModelError, match="differ from the model's own"):
        load_engine(str(tiny_model("llama", tmp_path)))


@pytest.mark.parametrize(
    ("arch", "options", "reason"),
    [("gpt2", {}, "gpt2 is not covered"), ("llama", {"dtype": "float16"}, "float16 is not covered")],
)
def test_kernel_asked_for_but_not_covering_the_model_is_refused(arch, options, reason, tmp_path):
    directory = str(tiny_model(arch, tmp_path))
    with pytest.raises(InvalidArgumentError) as refused:
        load_engine(directory, engine="native", **options)
    assert (refused.value.field, refused.value.got) == ("engine", "native")
    assert refused.value.allowed == f"auto or transformers for {directory}: {reason}"


def test_load_bidirectional_attention_refused(tmp_path, monkeypatch):
    directory = tiny_model("llama", tmp_path)
    right = LlamaAttention.__init__

    def both_ways(self: LlamaAttention, *given: Any, **named: Any) -> None:
        right(self, *given, **named)
        self.is_causal = False

    monkeypatch.setattr(LlamaAttention, "__init__", both_ways)
    with pytest.raises(UnsupportedModelError, match="both directions"):
        load_engine(str(directory))


@pytest.mark.parametrize(
    ("setting", "field"), [({"device": "abacus"}, "device"), ({"dtype": "int3"}, "dtype")]
)
def test_load_unknown_device_or_dtype_names_the_field(tmp_path, setting, field):
    with pytest.raises(InvalidArgumentError, match=f"^{field}: got"):
        load_engine(str(tiny_model("llama", tmp_path)), **setting)  # type: ignore[arg-type]


def test_longrope_context_ends_where_its_rotation_changes(tmp_path):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    }
    directory = tiny_model("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=32)
    assert load_engine(str(directory)).max_context == 32


def test_load_missing_directory_not_found(tmp_path):
    with pytest.raises(NotFoundError, match="nowhere"):
        load_engine(str(tmp_path / "nowhere"))


def test_load_unknown_model_type_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of_tomorrow"}))
    with pytest.raises(UnsupportedModelError, match="of_tomorrow"):
        load_engine(str(tmp_path))
