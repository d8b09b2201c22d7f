"""Numbers and tensors that no model can have, and quantised checkpoints, are refused with the reason."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.engine.core.errors import InvalidModelError, UnsupportedModelError
from services.engine.core.model import load_model
from services.engine.core.shapes import check_fields, check_finite, check_token_map
from services.engine.loader import load_engine
from services.engine.native.weights import build_native, check_layout
from services.heads.loading import load_head
from tests.support.engine_helpers import tiny_model
from tests.support.head_helpers import changed


@pytest.fixture
def model(tmp_path):
    return tiny_model("llama", tmp_path, seed=3)


def test_head_with_fewer_query_heads_than_key_heads_is_refused(tmp_path, model):
    """Its files agree with each other, but the kernel would divide by zero."""

    def config(stored):
        stored["transformer_layer_config"] |= {"num_attention_heads": 1, "num_key_value_heads": 2}

    def weights(stored):
        stored["layers.0.self_attn.q_proj.weight"] = torch.randn(8, 64)
        stored["layers.0.self_attn.o_proj.weight"] = torch.randn(32, 8)

    folder = changed("llama", tmp_path / "head", config, weights)
    with pytest.raises(InvalidModelError) as refused:
        load_head(str(folder), str(model))
    error = refused.value
    assert (error.file, error.field, error.got) == ("config.json", "num_key_value_heads", "2")
    assert error.allowed.startswith("a divisor of the 1 query heads")
    assert str(error).startswith(
        f"{folder} cannot be served: config.json: num_key_value_heads: got 2, allowed"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_attention_heads", 0),
        ("num_key_value_heads", -2),
        ("num_key_value_heads", 3),
        ("num_hidden_layers", 10**9),
        ("intermediate_size", True),
        ("head_dim", 7.0),
        ("rms_norm_eps", math.nan),
        ("rms_norm_eps", -1e-6),
        ("rms_norm_eps", math.inf),
        ("attention_dropout", math.nan),
        ("max_position_embeddings", 1),
    ],
)
def test_model_with_a_number_that_is_none_is_refused_with_the_field(model, field, value):
    stored = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(stored | {field: value}))
    with pytest.raises(InvalidModelError) as refused:
        load_model(str(model))
    assert (refused.value.file, refused.value.field) == ("config.json", field)
    assert refused.value.got == repr(value)


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"rope_type": "yarn", "factor": math.inf}, "factor"),
        ({"full_attention": {"partial_rotary_factor": 1.5}}, "full_attention.partial_rotary_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0, -1.0]}, "short_factor"),
        ({"beta_fast": math.nan}, "beta_fast"),
    ],
)
def test_settings_of_the_rotary_embedding_are_checked_at_every_depth(rope, field):
    with pytest.raises(InvalidModelError, match=rf"config\.json: rope_parameters\.{field}: got"):
        check_fields("model", {"text_config": {"rope_parameters": rope}})


def test_configuration_that_describes_more_than_its_files_hold_is_refused_before_memory_is_taken(model):
    stored = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(stored | {"intermediate_size": 2**30}))
    with pytest.raises(InvalidModelError, match="weights that it describes: got 309,"):
        load_model(str(model))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weight_that_is_not_finite_is_refused(model, value):
    file = model / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][-1, -1] = value  # of a token that no check feeds
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(
        InvalidModelError, match=r"model.embed_tokens.weight: got numbers that are not finite"
    ):
        load_engine(str(model))


def test_number_past_float32_is_not_finite():
    with pytest.raises(InvalidModelError, match="finite"):
        check_finite("model", {"weight": torch.tensor([1e300], dtype=torch.float64)})


def test_integers_are_no_weights(model):
    file = model / "model.safetensors"
    key = "model.layers.0.mlp.up_proj.weight"
    weights = load_file(file)
    save_file(weights | {key: weights[key].to(torch.int8)}, file, metadata={"format": "pt"})
    with pytest.raises(InvalidModelError, match=f"{key}: got numbers of type I8"):
        load_engine(str(model))


@pytest.mark.parametrize(
    "d2t",
    [
        torch.tensor([0, 0, 2**62]),
        torch.tensor([0, 2**63 - 2, -(2**62)]),  # ids that wrap around ascend by one
        torch.tensor([0.0, 0.5, 1.0]),
        torch.tensor([True, True, True]),
        torch.tensor([0, 0]),
    ],
)
def test_map_of_tokens_that_leaves_the_vocabulary_is_refused(d2t):
    with pytest.raises(InvalidModelError, match="d2t"):
        check_token_map("head", 3, 97, d2t)


@pytest.mark.parametrize(
    ("field", "value"), [("kv_heads", 0), ("kv_heads", 3), ("heads", 2), ("hidden", 64), ("head_dim", 6)]
)
def test_layout_that_the_kernel_would_misread_is_refused(model, field, value):
    native = build_native(load_model(str(model), device="cpu"), [None] * 3, 97)
    check_layout("model", native)
    setattr(native.weights, field, value)
    with pytest.raises(InvalidModelError):
        check_layout("model", native)


Tensors = dict[str, Tensor]


def checkpoint_of(tmp_path: Path, change: Callable[[Tensors], Tensors] = dict, **settings: Any) -> str:
    """A tiny Llama with changed tensors and configuration."""
    folder = tiny_model("llama", tmp_path, head_dim=16, hidden_size=64, intermediate_size=128)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return str(folder)


def scaled(tensors: Tensors) -> Tensors:
    """FP8 weights with one scale each, as ModelOpt stores them."""
    made: Tensors = {}
    for key, weight in tensors.items():
        made[key] = weight
        if key.endswith("proj.weight"):
            made[key] = weight.to(torch.float8_e4m3fn)
            made[f"{key}_scale"] = torch.tensor(1.0)
    return made


@pytest.mark.parametrize(
    ("quantisation", "named"),
    [
        *(({"quant_method": method, "bits": 4}, f" by {method}") for method in ("awq", "fp8", "not known")),
        *((given, "") for given in ({}, {"quant_method": 4}, {"load_in_4bit": True})),
    ],
)
def test_load_of_quantised_weights_is_refused_with_the_method_and_what_serves_it(
    quantisation, named, tmp_path
):
    given = checkpoint_of(tmp_path, quantization_config=quantisation)
    reason = f"quantised{named}, which the engine vllm alone serves; name the unquantised checkpoint"
    with pytest.raises(UnsupportedModelError, match=reason):
        load_engine(given, device="cpu")


def test_load_older_modelopt_refused_by_its_own_file(tmp_path):
    given = checkpoint_of(tmp_path, scaled)
    (Path(given) / "hf_quant_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="quantised by modelopt"):
        load_engine(given, device="cpu")


REFUSED: list[tuple[Callable[[Tensors], Tensors], str]] = [
    (scaled, r"21 weights without a place .*down_proj\.weight_scale"),
    (lambda w: {**w, "model.norm.weight": torch.ones(7)}, r"norm\.weight: got .*\[7\], allowed: \[64\]"),
    (lambda w: {k: w[k] for k in w if ".0.mlp." not in k}, r"lacks 3 .* as .*down_proj.*up_proj"),
    *(
        (lambda w, key=key: {**w, key: torch.ones(7)}, f"1 weight without a place in it: {key}")
        for key in (
            "model.layers.1.self_attn.q_proj.bias",
            "model.layers.2.mlp.gate_proj.weight_scale",
            "model.layers.0.self_attn.q_norm.weight",
            "final_logits_bias",
        )
    ),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED)
def test_load_of_wrong_tensors_is_refused_with_the_reason(change, reason, tmp_path):
    given = checkpoint_of(tmp_path, change)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_engine(given, device="cpu")


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.3.self_attn.q_proj.weight",  # a layer past the last, as of multi-token prediction
        "mtp.layers.0.eh_proj.weight",
        "model.vision_tower.blocks.0.weight",
        "model.layers.1.self_attn.k_scale",
        "v_head.summary.weight",
    ],
)
def test_load_tensors_that_change_no_logit_accepted(key, tmp_path):
    load_model(checkpoint_of(tmp_path, lambda w: {**w, key: torch.ones(7)}), device="cpu")


@pytest.mark.parametrize("same", [True, False])
def test_load_tied_head_in_the_checkpoint_accepted(same, tmp_path):
    def change(tensors: Tensors) -> Tensors:
        head = "model.embed_tokens.weight" if same else "lm_head.weight"
        return {**tensors, "lm_head.weight": tensors[head].clone()}

    load_model(checkpoint_of(tmp_path, change, tie_word_embeddings=True), device="cpu")


def test_load_model_that_fails_in_its_first_forward_refused(tmp_path, monkeypatch):
    fail = Mock(side_effect=ImportError("no such kernel"))
    monkeypatch.setattr("services.engine.loader.probe_model", fail)
    with pytest.raises(UnsupportedModelError, match="do not run on cpu: no such kernel"):
        load_engine(checkpoint_of(tmp_path), device="cpu")
