"""Checkpoints that vLLM loads quantised, on CPUs: log-probabilities are those of the dequantised model."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gammaray.config import TargetSettings
from gammaray.errors import InvalidArgumentError
from services.vllm.loading import load_target
from tests.support.engine_helpers import plain_logits, plain_model, tiny_model
from tests.support.processing_helpers import save_small_tokenizer
from tests.support.vllm_helpers import Session, answers, generate
from tests.vllm.conftest import LIMITS, start_vllm

Tensors = dict[str, Tensor]
GROUP = 32
PROMPT = [4 + 7 * at % 90 for at in range(24)]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def packed(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack eight neighbours of the last dimension, integers below 16, into one int32."""
    eights = values.to(torch.int64).unflatten(-1, (-1, 8))[..., list(order)]
    words = (eights << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def rounded(weight: Tensor, *, zero: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round [out, in] to 4 bits in groups along `in`; return values, scales, zeros and the result."""
    groups = weight.unflatten(-1, (-1, GROUP))
    if zero:
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(0, 15)
    else:
        scales = (groups.abs().amax(-1) / 7).half()
        zeros = torch.full_like(scales.float(), 8)
    wide = scales.float().unsqueeze(-1)
    values = (groups / wide + zeros.unsqueeze(-1)).round().clamp(0, 15)
    return values.flatten(-2), scales, zeros, ((values - zeros.unsqueeze(-1)) * wide).flatten(-2)


def awq(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    values, scales, zeros, result = rounded(weight, zero=True)
    return {
        f"{name}.qweight": packed(values.T, AWQ_ORDER),
        f"{name}.qzeros": packed(zeros.T, AWQ_ORDER),
        f"{name}.scales": scales.T.contiguous(),
    }, result


def gptq(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    values, scales, zeros, result = rounded(weight, zero=False)
    return {
        f"{name}.qweight": packed(values).T.contiguous(),
        f"{name}.qzeros": packed((zeros - 1).T),
        f"{name}.scales": scales.T.contiguous(),
        f"{name}.g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }, result


def w4a16(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    values, scales, _, result = rounded(weight, zero=False)
    return {
        f"{name}.weight_packed": packed(values),
        f"{name}.weight_scale": scales,
        f"{name}.weight_shape": torch.tensor(weight.shape),
    }, result


def w8a8(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = weight.abs().amax(-1, keepdim=True) / 127
    values = (weight / scales).round()
    return {f"{name}.weight": values.to(torch.int8), f"{name}.weight_scale": scales}, values * scales


def compressed(form: str, weights: dict, inputs: dict | None = None) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
KINDS = {
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    ),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "compressed-tensors w4a16": (
        w4a16,
        compressed(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
        ),
    ),
    "compressed-tensors w8a8": (
        w8a8,
        compressed(
            "int-quantized", {**INT8, "strategy": "channel"}, {**INT8, "strategy": "token", "dynamic": True}
        ),
    ),
}
HAS_KERNELS = torch.backends.cpu.get_cpu_capability() != "AVX2"

TOLERANCE = 0.1
"""Largest difference of a log-probability: the arithmetic is bfloat16."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Llama whose weights are those of bfloat16."""
    sizes = {"head_dim": 32, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 512}
    directory = tiny_model("llama", tmp_path_factory.mktemp("base"), **sizes)
    save_small_tokenizer(directory)
    file = directory / "model.safetensors"
    save_file({k: w.bfloat16() for k, w in load_file(file).items()}, file, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return directory


def written(base: Path, folder: Path, kind: str) -> tuple[Path, Path]:
    """Save the quantised checkpoint and its dequantised form."""
    quantise, quantisation = KINDS[kind]
    stored: Tensors = {}
    plain: Tensors = {}
    for key, weight in load_file(base / "model.safetensors").items():
        stored[key] = plain[key] = weight
        if key.endswith("proj.weight"):
            del stored[key]
            tensors, result = quantise(key.removesuffix(".weight"), weight.float())
            stored |= {name: tensor.contiguous() for name, tensor in tensors.items()}
            plain[key] = result
    paths = []
    for name, tensors in (("quantised", stored), ("plain", plain)):
        path = shutil.copytree(base, folder / name)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        paths.append(path)
    config = json.loads((paths[0] / "config.json").read_text())
    (paths[0] / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    return paths[0], paths[1]


def rounding(model: torch.nn.Module, kind: str) -> torch.nn.Module:
    """Have a model round the inputs of its projections as the kernels of a kind do."""
    if kind != "compressed-tensors w8a8":
        return model

    def round_inputs(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        scales = inputs[0].abs().amax(-1, keepdim=True) / 127
        return ((inputs[0] / scales).round() * scales,)

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(round_inputs)
    return model


def logprobs(logits: Tensor) -> Tensor:
    found = torch.log_softmax(logits.double(), -1)[: len(PROMPT) - 1]
    return found.gather(-1, torch.tensor(PROMPT[1:]).unsqueeze(-1)).squeeze(-1)


@pytest.mark.skipif(not HAS_KERNELS, reason="vLLM has no exact kernels for quantised weights without AVX-512")
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_checkpoint_is_served_as_its_dequantised_form(base, tmp_path, kind):
    quantised, plain = written(base, tmp_path, kind)
    wanted = logprobs(plain_logits(rounding(plain_model(plain), kind), PROMPT))
    unrounded = logprobs(plain_logits(plain_model(base), PROMPT))
    with closing(start_vllm(quantised, dtype="bfloat16")) as scheduler:
        session = Session(PROMPT)
        task = session.block(num_prompt_logprobs=0)
        (reply,) = answers(scheduler, [task])
        found = torch.tensor(session.take(task, reply).prompt_logprobs.logprobs)
        worst = (found - wanted).abs().max().item()
        assert worst < TOLERANCE
        if kind != "compressed-tensors w8a8":  # eight bits are too near to the model itself
            assert (found - unrounded).abs().max().item() > 3 * worst
        outputs = generate(scheduler, [Session(PROMPT)], 16)
        proposals = iter([[*outputs[0][:4]], [5, 6], [*outputs[0][6:10]]])
        assert generate(scheduler, [Session(PROMPT)], 16, lambda s: next(proposals, [])) == outputs


def test_quantised_weights_are_refused_where_vllm_has_no_kernels_for_them(base, tmp_path, monkeypatch):
    quantised, _ = written(base, tmp_path, "awq")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    with pytest.raises(InvalidArgumentError, match="AVX-512") as refused:
        load_target(str(quantised), TargetSettings(device="cpu"), LIMITS)
    assert refused.value.field == "model"
