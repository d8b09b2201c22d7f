"""Quantised checkpoints are refused with their method; and the report of loading."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.engine.core.errors import UnsupportedModelError
from services.engine.core.model import load_model
from services.engine.loader import load_engine
from tests.support.engine_helpers import tiny_model

Tensors = dict[str, Tensor]


def checkpoint_of(tmp_path: Path, change: Callable[[Tensors], Tensors], **settings: Any) -> str:
    """A tiny Llama with changed tensors and configuration."""
    folder = tiny_model("llama", tmp_path, head_dim=16, hidden_size=64, intermediate_size=128)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return str(folder)


def unchanged(tensors: Tensors) -> Tensors:
    return tensors


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
    given = checkpoint_of(tmp_path, unchanged, quantization_config=quantisation)
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
    given = checkpoint_of(tmp_path, unchanged)

    def fail(*_: Any, **__: Any) -> None:
        raise ImportError("no such kernel")

    monkeypatch.setattr("services.engine.loader.probe_model", fail)
    with pytest.raises(UnsupportedModelError, match="do not run on cpu: no such kernel"):
        load_engine(given, device="cpu")
