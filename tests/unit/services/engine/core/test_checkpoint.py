"""Quantised checkpoints: what is served, what is refused and why; and the report of loading."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, TorchAoConfig

from gammaray.errors import InvalidArgumentError
from services.engine.core import checkpoint
from services.engine.core.batch import SequenceInput
from services.engine.core.errors import UnsupportedModelError
from services.engine.core.model import load_model
from services.engine.engine import Engine
from services.engine.loader import load_engine
from tests.support.engine_helpers import tiny_model

Tensors = dict[str, Tensor]
TEXT = list(range(3, 23))
BLOCK_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
TENSOR_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


def quantised(tensors: Tensors, suffix: str, *, blocks: bool = False, extra: str = "") -> Tensors:
    """FP8 weights with one scale each, or one for each block of 128 by 128, under a suffix of the name."""
    made: Tensors = {}
    for key, weight in tensors.items():
        if not key.endswith("proj.weight"):
            made[key] = weight.bfloat16()
            continue
        scale = (weight.abs().max() / 448).float()
        made[key] = (weight / scale).to(torch.float8_e4m3fn)
        if suffix:
            counts = [-(-size // 128) for size in weight.shape] if blocks else []
            made[key + suffix] = torch.full(counts, scale.item())
        if extra:
            made[key.replace("weight", extra)] = torch.tensor(1.0)
    return made


def checkpoint_of(
    tmp_path: Path, change: Callable[[Tensors], Tensors], quantisation: Any = None, **settings: Any
) -> str:
    """A tiny Llama with changed tensors and configuration."""
    folder = tiny_model("llama", tmp_path, head_dim=16, hidden_size=64, intermediate_size=128)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if quantisation is not None:
        config["quantization_config"] = quantisation
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return str(folder)


def logits(engine: Engine) -> Tensor:
    return engine.step([SequenceInput("a", 0, TEXT, len(TEXT))])[0]


def reference(tmp_path: Path, given: str) -> Tensor:
    """Logits of the checkpoint with its weights dequantised by hand."""
    tensors = load_file(Path(given) / "model.safetensors")
    made: Tensors = {}
    for key, weight in tensors.items():
        if weight.dtype == torch.float8_e4m3fn:
            scale = next(tensors[key + end] for end in ("_scale_inv", "_scale") if key + end in tensors)
            made[key] = weight.float() * scale.flatten()[0]
        elif "scale" not in key:
            made[key] = weight.float()
    (tmp_path / "plain").mkdir()
    plain = checkpoint_of(tmp_path / "plain", lambda _: made)
    return logits(load_engine(plain, device="cpu"))


@pytest.mark.parametrize(
    ("change", "quantisation"),
    [
        (lambda w: quantised(w, "_scale_inv", blocks=True), BLOCK_FP8),
        (lambda w: quantised(w, "_scale_inv", extra="activation_scale"), TENSOR_FP8),
    ],
    ids=["blocks", "per tensor"],
)
def test_load_fp8_on_a_cpu_serves_the_dequantised_model_and_says_so(
    change: Callable[[Tensors], Tensors], quantisation: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = checkpoint_of(tmp_path, change, quantisation)
    with caplog.at_level(logging.WARNING):
        engine = load_engine(given, device="cpu")
    assert torch.allclose(logits(engine), reference(tmp_path, given), atol=1e-4)
    assert engine.kernel.endswith("fp8 weights dequantised to float32")
    assert "fp8 weights dequantised to float32" in caplog.text
    half = load_engine(given, device="cpu", dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    assert half.kernel.endswith("fp8 weights dequantised to bfloat16")


def scaled_inputs(tensors: Tensors) -> Tensors:
    return quantised(tensors, "_scale", extra="input_scale")


def unchanged(tensors: Tensors) -> Tensors:
    return tensors


REFUSED: list[tuple[Callable[[Tensors], Tensors], Any, str]] = [
    (scaled_inputs, MODELOPT, r"quantised by 'modelopt'.*it reads .*awq.*gptq"),
    (scaled_inputs, None, r"42 weights without a place .*down_proj\.input_scale"),
    # Under these names transformers finds no scales, and takes the FP8 numbers as they are.
    (scaled_inputs, TENSOR_FP8, r"without a place .*input_scale"),
    (lambda w: quantised(w, ""), BLOCK_FP8, r"down_proj\.weight is stored as F8_E4M3, without a scale"),
    (lambda w: quantised(w, "_scale_inv"), {**BLOCK_FP8, "weight_block_size": 3}, r"."),
    *((unchanged, one, r".") for one in ([], "fp8", {"quant_method": 4}, {"bits": 4}, {"quant_method": []})),
    (
        lambda w: {**w, "model.norm.weight": torch.ones(7)},
        None,
        r"norm\.weight: got .*\[7\], allowed: \[64\]",
    ),
    (lambda w: {k: w[k] for k in w if ".0.mlp." not in k}, None, r"lacks 3 .* as .*down_proj.*up_proj"),
    *(
        (lambda w, key=key: {**w, key: torch.ones(7)}, None, f"1 weight without a place in it: {key}")
        for key in (
            "model.layers.1.self_attn.q_proj.bias",
            "model.layers.2.mlp.gate_proj.weight_scale",
            "model.layers.0.self_attn.q_norm.weight",
            "final_logits_bias",
        )
    ),
]


@pytest.mark.parametrize(("change", "quantisation", "reason"), REFUSED)
def test_load_of_wrong_tensors_or_methods_is_refused_with_the_reason(
    change: Callable[[Tensors], Tensors], quantisation: Any, reason: str, tmp_path: Path
) -> None:
    given = checkpoint_of(tmp_path, change, quantisation)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_engine(given, device="cpu")


def test_load_older_modelopt_refused_by_its_own_file(tmp_path: Path) -> None:
    given = checkpoint_of(tmp_path, scaled_inputs)
    described = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (Path(given) / "hf_quant_config.json").write_text(json.dumps(described))
    with pytest.raises(UnsupportedModelError, match="quantised by 'modelopt'"):
        load_engine(given, device="cpu")


@pytest.mark.parametrize(
    ("quantisation", "package"),
    [
        ({"quant_method": "awq", "bits": 4}, "gptqmodel"),
        ({"quant_method": "gptq", "bits": 4}, "optimum"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "torchao", "quant_type": "int8"}, "torchao"),
        ({"quant_method": "quanto", "weights": "int8"}, "optimum-quanto"),
    ],
)
def test_load_without_the_package_names_it(quantisation: Any, package: str, tmp_path: Path) -> None:
    if find_spec(package.replace("optimum-quanto", "optimum").replace("-", "_")) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(UnsupportedModelError, match=package):
        load_engine(checkpoint_of(tmp_path, lambda w: w, quantisation), device="cpu")


@pytest.mark.parametrize(
    ("capability", "has_kernels", "expands"),
    [((9, 0), True, False), ((8, 9), True, False), ((8, 6), True, True), ((9, 0), False, True)],
)
def test_choose_expansion_of_fp8_needs_a_card_and_kernels(
    capability: tuple[int, int], has_kernels: bool, expands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card is a stand-in: `device_capability` answers for it."""
    monkeypatch.setattr(checkpoint, "device_capability", lambda device: capability)
    monkeypatch.setattr(checkpoint, "is_kernels_available", lambda: has_kernels)
    config = LlamaConfig(quantization_config=dict(BLOCK_FP8))
    checkpoint.choose_expansion(config, "fp8", torch.device("cuda", 0))
    assert config.quantization_config.get("dequantize", False) is expands


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
def test_load_tensors_that_change_no_logit_accepted(key: str, tmp_path: Path) -> None:
    load_model(checkpoint_of(tmp_path, lambda w: {**w, key: torch.ones(7)}), device="cpu")


@pytest.mark.parametrize("same", [True, False])
def test_load_tied_head_in_the_checkpoint_accepted(same: bool, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        head = "model.embed_tokens.weight" if same else "lm_head.weight"
        return {**tensors, "lm_head.weight": tensors[head].clone()}

    load_model(checkpoint_of(tmp_path, change, tie_word_embeddings=True), device="cpu")


def torchao_checkpoint(tmp_path: Path) -> str:
    """The tiny Llama in torchao's int8, as transformers saves it."""
    quantization = pytest.importorskip("torchao.quantization")
    plain = checkpoint_of(tmp_path, lambda w: w)
    how = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, quantization_config=how, device_map={"": "cpu"}
    )
    model.save_pretrained(tmp_path / "torchao")
    return str(tmp_path / "torchao")


def test_load_torchao_int8_served_by_transformers_layers(tmp_path: Path) -> None:
    given = torchao_checkpoint(tmp_path)
    engine = load_engine(given, device="cpu")
    assert engine.kernel == "none: torchao weights are not covered, torchao weights"
    plain = logits(load_engine(str(tmp_path / "llama-0"), device="cpu"))
    found = logits(engine)
    assert 0 < (found - plain).abs().mean() < 0.05 * plain.abs().mean()
    with pytest.raises(InvalidArgumentError, match="torchao weights already"):
        load_engine(given, device="cpu", weights="int8", draft_for="")
    with pytest.raises(UnsupportedModelError, match="deterministic mode needs the compiled CPU kernel"):
        load_engine(given, device="cpu", deterministic=True)


def test_load_bitsandbytes_served_by_transformers_layers(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    plain = checkpoint_of(tmp_path, lambda w: w)
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    model = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, quantization_config=how, device_map={"": "cpu"}
    )
    model.save_pretrained(tmp_path / "bnb")
    engine = load_engine(str(tmp_path / "bnb"), device="cpu")
    assert engine.kernel == "none: bitsandbytes weights are not covered, bitsandbytes weights"
    expected = logits(load_engine(plain, device="cpu"))
    assert 0 < (logits(engine) - expected).abs().mean() < 0.5 * expected.abs().mean()


@pytest.mark.parametrize("activations", [True, False])
def test_load_compressed_tensors_fp8_serves_the_dequantised_model(activations: bool, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
    }
    if activations:
        group["input_activations"] = {**group["weights"], "strategy": "token", "dynamic": True}
    how = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    given = checkpoint_of(tmp_path, lambda w: quantised(w, "_scale"), how)
    engine = load_engine(given, device="cpu")
    assert torch.allclose(logits(engine), reference(tmp_path, given), atol=1e-4)
    assert engine.kernel.endswith("compressed-tensors weights dequantised to float32")


@pytest.mark.parametrize(
    ("capability", "kinds", "keeps"),
    [
        ((9, 0), ("float", "float"), True),
        ((8, 6), ("float", "float"), False),
        ((9, 0), ("int", "int"), False),
    ],
)
def test_choose_expansion_of_compressed_tensors_follows_the_card(
    capability: tuple[int, int], kinds: tuple[str, str], keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card is a stand-in: FP8 stays FP8 where it multiplies FP8, all else is dequantised."""
    monkeypatch.setattr(checkpoint, "device_capability", lambda device: capability)
    weights, inputs = ({"num_bits": 8, "type": kind} for kind in kinds)
    given = {"config_groups": {"group_0": {"weights": weights, "input_activations": inputs}}}
    config = LlamaConfig(quantization_config=given)
    checkpoint.choose_expansion(config, "compressed-tensors", torch.device("cuda", 0))
    expected = "use_optimized_inference" if keeps else "dequantize"
    assert config.quantization_config == {**given, expected: True}


def test_load_model_that_fails_in_its_first_forward_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a package for quantised weights lacks a kernel for the device."""
    given = checkpoint_of(tmp_path, lambda w: quantised(w, "_scale_inv", blocks=True), BLOCK_FP8)

    def fail(*_: Any, **__: Any) -> None:
        raise ImportError("no such kernel")

    monkeypatch.setattr("services.engine.loader.probe_model", fail)
    with pytest.raises(UnsupportedModelError, match="do not run on cpu: no such kernel"):
        load_engine(given, device="cpu")
