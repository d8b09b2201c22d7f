"""Writes tiny heads with `speculators`' own classes, and the logits that these give.

    HF_HUB_OFFLINE=1 python -m tests.data.heads.make

needs `speculators` 0.9.0, which is no dependency of the project: it brings packages of other models. The
results are committed; `tests/unit/services/heads/test_head_formats.py` reads them, and the tests of vLLM use
the DFlash head.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

from tests.support.engine_helpers import VOCAB_SIZE

HERE = Path(__file__).parent
NUM_TOKENS, STEPS, DRAFT_VOCAB = 14, 3, 40
LAYER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {"norm_before_residual": False}),
    "llama-residual": (LlamaConfig, {"norm_before_residual": True, "norm_before_fc": True}),
    "qwen3": (Qwen3Config, {"norm_before_residual": False, "fc_norm": True, "norm_output": True}),
}
BLOCK_SIZE = 5


def main() -> None:
    _write_dflash(HERE / "dflash", 20)
    for number, (variant, (layer, flags)) in enumerate(VARIANTS.items()):
        _write(HERE / variant, number, layer(**LAYER, attn_implementation="eager"), flags)


def _write(folder: Path, seed: int, layer: Any, flags: dict[str, Any]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(seed)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="target", architectures=["LlamaForCausalLM"]),
        ),
        **flags,
    )
    head = Eagle3DraftModel(config)
    for parameter in head.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1)
    drafted = torch.randperm(VOCAB_SIZE)[:DRAFT_VOCAB].sort().values
    head.d2t = drafted - torch.arange(DRAFT_VOCAB)
    head.t2d = torch.isin(torch.arange(VOCAB_SIZE), drafted)
    head.save_pretrained(folder)
    (folder / "config.py").unlink()  # a copy of the library's code

    states = torch.randn(1, NUM_TOKENS, 3 * 32)
    token_ids = torch.randint(VOCAB_SIZE, (1, NUM_TOKENS))
    logits: list[torch.Tensor] = []
    head.lm_head.register_forward_hook(lambda _module, _given, out: logits.append(out[0].clone()))
    with torch.no_grad():
        head.eval()(
            hidden_states=states,
            input_ids=token_ids,
            document_ids=torch.zeros_like(token_ids),
            ttt_steps=STEPS,
        )
    # Entry [step, row]: after the row's feature, its token and `step` further ones.
    save_file(
        {"states": states[0].contiguous(), "token_ids": token_ids[0], "logits": torch.stack(logits)},
        folder / "expected.safetensors",
    )


def _write_dflash(folder: Path, seed: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(seed)
    config = DFlashSpeculatorConfig(
        transformer_layer_config=Qwen3Config(**LAYER | {"num_hidden_layers": 2}, attn_implementation="eager"),
        block_size=BLOCK_SIZE,
        mask_token_id=VOCAB_SIZE - 1,
        aux_hidden_state_layer_ids=[0, 1, 2],
        draft_vocab_size=VOCAB_SIZE,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK_SIZE - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="target", architectures=["LlamaForCausalLM"]),
        ),
    )
    head = DFlashDraftModel(config)
    for parameter in head.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1)
    head.save_pretrained(folder)
    for copy in folder.glob("*.py"):
        copy.unlink()  # of the library's code
    # The library leaves out what is the target's.
    shared = {"embed_tokens": head.embed_tokens.weight.data, "lm_head": head.lm_head.weight.data}
    save_file({key: tensor.clone() for key, tensor in shared.items()}, folder / "shared.safetensors")


if __name__ == "__main__":
    main()
