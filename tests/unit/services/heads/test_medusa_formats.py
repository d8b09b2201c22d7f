"""Medusa heads give the logits of the published formula in both formats, or are refused with the reason."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from gammaray.errors import InvalidArgumentError
from services.engine.core.errors import UnsupportedModelError
from services.engine.engine import SequenceInput
from services.heads.block_runners import medusa_engine
from services.heads.loading import names_head
from services.heads.medusa_formats import load_medusa, names_medusa
from tests.support.engine_helpers import VOCAB_SIZE, tiny_model
from tests.support.medusa_helpers import HEADS, LAYERS, random_heads, reference, write_own, write_vllm

STATES = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("target"), seed=3)


@pytest.fixture(scope="module")
def weights(target):
    return random_heads(target)


def loaded(folder, target):
    heads, target_ids = load_medusa(str(folder), str(target))
    return heads, target_ids, heads(heads.fuse(STATES[:, None]), HEADS)


def close(made, expected):
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("write", [write_own, write_vllm])
def test_logits_are_those_of_the_published_formula(write, tmp_path, target, weights):
    folder = write(tmp_path, weights)
    assert names_medusa(str(folder))
    assert not names_head(str(folder))
    heads, target_ids, made = loaded(folder, target)
    assert target_ids is None
    assert heads.config.last_layer == 3
    close(made, reference(weights, target, STATES))


@pytest.mark.parametrize("fault", ["head", "layer", "norm", "bias"])
def test_comparison_catches_faults(fault, tmp_path, target, weights):
    heads, _, _ = loaded(write_own(tmp_path, weights), target)
    expected = reference(weights, target, STATES)
    features = heads.fuse(STATES[:, None])
    if fault == "head":
        heads.blocks = torch.nn.ModuleList([heads.blocks[1], heads.blocks[0], heads.blocks[2]])
    if fault == "layer":
        layers = heads.blocks[0]["layers"]
        heads.blocks[0]["layers"] = torch.nn.ModuleList([layers[1], layers[0]])
    if fault == "norm":
        features = STATES
    if fault == "bias":
        heads.blocks[2]["layers"][1].bias.data.zero_()
    assert (heads(features, HEADS) - expected).abs().max() > 1e-2


def test_engine_answers_feeds_of_several_sessions(tmp_path, target, weights):
    heads, target_ids, made = loaded(write_own(tmp_path, weights), target)
    engine = medusa_engine(heads, target_ids, name="medusa", max_context=64)
    features = engine.fuse(STATES[:, None])
    assert engine.mask_token == VOCAB_SIZE
    engine.skip("a", [1, 2, 3])
    engine.skip("b", [4])
    first, second = engine.step(
        [
            SequenceInput("a", 3, [5, VOCAB_SIZE, VOCAB_SIZE], 3, features=features[1:2]),
            SequenceInput("b", 1, [6], 1, features=features[4:]),
        ]
    )
    close(first, made[1])
    close(second, made[4, :1])
    with pytest.raises(ValueError, match="features: a session has none"):
        engine.step([SequenceInput("b", 1, [6], 1)])
    with pytest.raises(InvalidArgumentError, match="draft_weights"):
        medusa_engine(heads, target_ids, name="medusa", max_context=64, weights="int8")


def test_layers_without_biases_and_a_scale(tmp_path, target, weights):
    plain = {key: tensor for key, tensor in weights.items() if "bias" not in key}
    _, _, made = loaded(write_vllm(tmp_path, plain, medusa_fc_bias=None, logit_scale=0.5), target)
    close(made, reference(plain, target, STATES) * 0.5)


@pytest.mark.parametrize("stored", ["lm_head.weight", "0.2.weight", None])
def test_shared_output_matrix(stored, tmp_path, target, weights):
    """It is the stored one under either name, else the target's."""
    matrix = load_file(target / "model.safetensors")["lm_head.weight"]
    given = {key: tensor for key, tensor in weights.items() if "linear" in key}
    if stored is not None:
        matrix = given[stored] = torch.randn_like(matrix)
    _, _, made = loaded(write_vllm(tmp_path, given, original_lm_head=True), target)
    expected = given | {f"{head}.{LAYERS}.weight": matrix for head in range(HEADS)}
    close(made, reference(expected, target, STATES))


@pytest.mark.parametrize("is_whole", [True, False])
def test_map_of_tokens_selects_rows(is_whole, tmp_path, target, weights):
    ids = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(2))[:20]
    given = {
        key: tensor[ids].contiguous() if key.endswith(f"{LAYERS}.weight") and not is_whole else tensor
        for key, tensor in weights.items()
    }
    folder = write_vllm(tmp_path, given | {"token_map": ids}, truncated_vocab_size=20)
    _, target_ids, made = loaded(folder, target)
    assert target_ids.tolist() == sorted(ids.tolist())
    close(made, reference(weights, target, STATES)[:, :, target_ids])


@pytest.mark.parametrize(
    ("write", "changes", "reason"),
    [
        (write_own, {"medusa_num_heads": None}, r"medusa_num_heads is .*, allowed: 1 to 64"),
        (write_own, {"medusa_num_layers": 0}, "medusa_num_layers: got 0"),
        (write_own, {"medusa_num_heads": 2}, "no place for 5 weights"),
        (write_own, {"medusa_num_layers": 3}, "weights"),
        (write_own, {"medusa_mixer": True}, "flag 'medusa_mixer' is not known"),
        (write_own, {"hidden_size": 64}, "hidden_size is 64, the target's is 32"),
        (write_own, {"vocab_size": 96}, "vocab_size is 96"),
        (write_vllm, {"num_heads": None}, "medusa_num_heads is missing"),
        (write_vllm, {"medusa_num_heads": 2}, "medusa_num_heads is"),
        (write_vllm, {"num_hidden_layers": None}, "medusa_num_layers is missing"),
        (write_vllm, {"num_hidden_layers": 10**9}, "num_hidden_layers: got 1000000000"),
        (write_vllm, {"medusa_fc_bias": None}, "no place for 6 weights"),
        (write_vllm, {"original_lm_head": True}, "no place for 2 weights"),
        (write_vllm, {"original_lm_head": "yes"}, "original_lm_head is 'yes'"),
        (write_vllm, {"logit_scale": -1}, "logit_scale is -1"),
        (write_vllm, {"truncated_vocab_size": 20}, "only one of token_map"),
        (write_vllm, {"truncated_vocab_size": 2000}, "truncated_vocab_size is 2000"),
        (write_vllm, {"truncated_vocab_size": "all"}, "truncated_vocab_size: got all"),
        (write_vllm, {"dropout": 0.1}, "flag 'dropout' is not known"),
    ],
)
def test_configuration_that_is_not_served_is_refused(write, changes, reason, tmp_path, target, weights):
    folder = write(tmp_path, weights, **changes)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_medusa(str(folder), str(target))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"0.0.linear.bias": None}, "lacks 1 weights, such as blocks.0.layers.0.bias"),
        ({"0.2.weight": torch.ones(VOCAB_SIZE, 31)}, "lm_heads.0.weight: got the shape"),
        ({"1.0.linear.weight": torch.full((32, 32), torch.nan)}, "not finite"),
        ({"norm.weight": torch.ones(32)}, "no place for 1 weights"),
        ({"token_map": torch.arange(VOCAB_SIZE)}, "only one of token_map"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change, reason, tmp_path, target, weights):
    given = {key: tensor for key, tensor in (weights | change).items() if tensor is not None}
    with pytest.raises(UnsupportedModelError, match=reason):
        load_medusa(str(write_own(tmp_path, given)), str(target))


@pytest.mark.parametrize(
    ("token_map", "reason"),
    [
        (torch.zeros(20, dtype=torch.int64), "no different tokens"),
        (torch.arange(20) - 1, "no different tokens"),
        (torch.arange(20.0), "token_map: got numbers of type torch.float32"),
        (torch.arange(20) + VOCAB_SIZE - 19, f"names {VOCAB_SIZE}"),
        (torch.arange(19), r"token_map: got the shape \[19\]"),
    ],
)
def test_map_that_names_no_tokens_is_refused(token_map, reason, tmp_path, target, weights):
    folder = write_vllm(tmp_path, weights | {"token_map": token_map}, truncated_vocab_size=20)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_medusa(str(folder), str(target))


def test_pickled_and_damaged_weights_are_refused(tmp_path, target, weights):
    folder = write_own(tmp_path, weights)
    path = folder / "medusa_lm_head.safetensors"
    stored = path.read_bytes()
    path.write_bytes(stored[:-100])
    with pytest.raises(UnsupportedModelError, match="truncated or damaged"):
        load_medusa(str(folder), str(target))
    path.unlink()
    with pytest.raises(UnsupportedModelError, match=r"it has no medusa_lm_head\.safetensors$"):
        load_medusa(str(folder), str(target))
    torch.save(weights, folder / "medusa_lm_head.pt")
    with pytest.raises(UnsupportedModelError, match="pickled: to read it can run any code"):
        load_medusa(str(folder), str(target))


def test_target_with_another_norm_is_refused(tmp_path, weights):
    other = tiny_model("gemma2", tmp_path / "target")
    with pytest.raises(UnsupportedModelError, match="Medusa is served for targets of types llama"):
        load_medusa(str(write_own(tmp_path / "heads", weights)), str(other))


def test_other_directories_are_no_medusa_heads(tmp_path, target):
    assert not names_medusa(str(target))
    assert not names_medusa(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert not names_medusa(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    assert not names_medusa(str(tmp_path))
    save_file({}, tmp_path / "model.safetensors")
    assert not names_medusa(str(tmp_path))
