"""The compiled kernel against the general path, also with quantised weights, on every instruction set."""

import gc
import weakref
from collections.abc import Mapping
from ctypes import c_int32
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gammaray.config import DraftSettings, TargetSettings
from gammaray.errors import InvalidArgumentError
from services.engine import loader as loading
from services.engine.checks import check_deterministic
from services.engine.core.batch import SequenceInput
from services.engine.core.errors import CacheGapError, EndedEarlyError, UnsupportedModelError
from services.engine.core.model import LoadedModel, load_model
from services.engine.core.quantised import QuantisedMatrix, quantise, quantise_model
from services.engine.hf.runner import TransformersRunner
from services.engine.loader import load_engine, load_worker_engine
from services.engine.native import library as guesses
from services.engine.native import weights as packing
from services.engine.native.build import AMX, BF16, VNNI
from services.engine.native.library import Kernel, open_kernel, top_k_tokens, usable_variants
from services.engine.native.runner import NativeRunner
from services.engine.sampling import noise as noise_module
from services.engine.sampling.noise import Noise, exponential
from tests.support.engine_helpers import (
    LEAN,
    MAX_CONTEXT,
    CheckedEngine,
    chained,
    plain_logits,
    plain_model,
    random_tokens,
    tiny_model,
)

ROUNDED = 2e-3
"""Largest difference of a logit where the inputs of int8 weights are rounded to 16 bits."""


@pytest.fixture(params=usable_variants())
def variant(request, monkeypatch):
    """An instruction set, for which models are laid out in a test."""
    for module in (packing, loading):
        monkeypatch.setattr(module, "load_kernel", lambda: open_kernel(request.param))
    return request.param


@pytest.mark.parametrize("bfloat16", [False, True])
def test_native_path_every_instruction_set_exact(variant, bfloat16, tmp_path):
    """Heads of 8 numbers and states of 20: shorter than a vector of AVX-512, or no whole ones."""
    directory = tiny_model("qwen3", tmp_path, bfloat16=bfloat16, hidden_size=20)
    engine = load_engine(str(directory), deterministic=True)
    assert isinstance(engine.runner, NativeRunner)
    assert engine.runner.model.weights.layer[0].qkv.kind == int(bfloat16)  # panels of half the size
    run = CheckedEngine(engine, plain_model(directory), taps=(2, 3, 0, 1, 2))
    run.step(SequenceInput("a", 0, random_tokens(70, 1), 70))
    run.step(SequenceInput("a", 70, random_tokens(3, 3), 3, (-1, -1, 1)), SequenceInput("b", 0, [5], 1))
    assert run.worst <= 1e-4
    assert run.worst_tap <= 1e-5


ROUNDED_INPUTS = 3
WITH_PAIRS = [name for name in usable_variants() if name in (BF16, AMX)]
needs_pairs = pytest.mark.skipif(not WITH_PAIRS, reason="the processor has no products of bfloat16")


@needs_pairs
@pytest.mark.parametrize("variant", WITH_PAIRS, indirect=True)
@pytest.mark.parametrize("arch", ["qwen3", "llama-bias"])
def test_bfloat16_in_the_kernel_is_nearer_to_float32_than_the_models_own(arch, variant, tmp_path):
    """Only inputs of products are rounded; 45 of them are no whole number of pairs."""
    directory = tiny_model(arch, tmp_path, bfloat16=True, hidden_size=20, intermediate_size=45)
    engine = load_engine(str(directory), device="cpu", dtype="bfloat16")
    assert isinstance(engine.runner, NativeRunner)
    assert (engine.dtype, engine.kernel) == (torch.bfloat16, variant)
    layer = engine.runner.model.weights.layer[0]
    assert {layer.qkv.kind, layer.down.kind, engine.runner.model.weights.head.kind} == {ROUNDED_INPUTS}
    check_deterministic(engine)  # alone, in chunks with other sessions, and in trees
    engine.tap([0, 3])
    text, nodes = random_tokens(60, 1), random_tokens(3, 3)
    got = engine.step([SequenceInput("a", 0, text, 60), SequenceInput("b", 0, nodes, 3)])
    got += engine.step([SequenceInput("a", 60, nodes, 3, (-1, -1, 1)), SequenceInput("b", 3, [5], 1)])
    assert {taps.dtype for taps in engine.taps} == {torch.float32}
    texts = [(text, 60), (nodes, 3), *(([*text, *path], 1) for path in (nodes[:1], nodes[1:2], nodes[1:]))]
    texts.append(([*nodes, 5], 1))

    def rows(model: PreTrainedModel) -> Tensor:
        return torch.cat([plain_logits(model, path)[-count:] for path, count in texts])

    own = rows(load_model(str(directory), device="cpu", dtype="bfloat16").module)
    exact = rows(plain_model(directory))
    assert 0 < (torch.cat(got) - exact).abs().mean() < 0.7 * (own - exact).abs().mean()


@needs_pairs
@pytest.mark.parametrize("variant", WITH_PAIRS, indirect=True)
def test_int8_draft_does_not_depend_on_the_dtype(variant, tmp_path):
    """All its matrices are integers."""
    directory = str(tiny_model("qwen3", tmp_path, bfloat16=True))
    both = [load_engine(directory, device="cpu", dtype=t, weights="int8") for t in ("bfloat16", "float32")]
    assert {engine.kernel for engine in both} == {f"{variant}, int8 weights"}
    one, other = (engine.step([SequenceInput("a", 0, random_tokens(20, 1), 20)])[0] for engine in both)
    assert torch.equal(one, other)


@pytest.mark.parametrize("variant", [v for v in usable_variants() if v not in WITH_PAIRS], indirect=True)
def test_bfloat16_without_its_instructions_is_left_to_transformers_layers(variant, tmp_path):
    directory, reason = str(tiny_model("llama", tmp_path)), f"bfloat16 is not covered on {variant}"
    engine = load_engine(directory, device="cpu", dtype="bfloat16")
    assert isinstance(engine.runner, TransformersRunner)
    assert (engine.dtype, engine.kernel) == (torch.bfloat16, f"none: {reason}")
    with pytest.raises(InvalidArgumentError) as refused:
        load_engine(directory, engine="native", dtype="bfloat16")
    assert refused.value.allowed == f"auto or transformers for {directory}: {reason}"


HEADS = [(4, 2, 64), (2, 1, 128), (20, 1, 8), (6, 2, 24), (3, 3, 40)]
"""Query heads, key heads and their numbers: groups in one part and in two, whole vectors and not."""


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("window", [5, 4096])
def test_native_path_attention_is_exact_and_independent_of_other_rows(
    variant, heads, kv_heads, head_dim, window, tmp_path
):
    """Rows that share keys are computed together; none may get another bit by that."""
    directory = tiny_model(
        "mistral",
        tmp_path,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        sliding_window=window,
    )
    engine = load_engine(str(directory))
    assert isinstance(engine.runner, NativeRunner)
    text = random_tokens(46, 1)
    run = CheckedEngine(engine, plain_model(directory))
    run.step(SequenceInput("whole", 0, text, 46))
    run.step(SequenceInput("whole", 46, random_tokens(6, 2), 6, (-1, -1, 0, 2, 1, 3)))
    assert run.worst <= 1e-4
    engine.release("whole")
    (whole,) = engine.step([SequenceInput("whole", 0, text, 46)])
    for index in range(46):
        (row,) = engine.step([SequenceInput("single", index, text[index : index + 1], 1)])
        assert torch.equal(row[0], whole[index]), index


def test_missing_native_path_uses_the_general_one(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "load_kernel", lambda *_: Kernel(None, reason="no C compiler"))
    engine = load_engine(str(tiny_model("llama", tmp_path)))
    assert isinstance(engine.runner, TransformersRunner)
    assert engine.kernel == "none: no C compiler"


def test_native_path_large_logits_of_attention_exact(tmp_path):
    """Scores far apart: the exponential's ends."""
    directory = tiny_model("llama", tmp_path, gain=6.0)
    text, plain = random_tokens(100, 1), plain_model(directory)
    run = CheckedEngine(load_engine(str(directory)), plain)
    run.step(SequenceInput("a", 0, text, 100))
    assert run.worst <= 1e-4 * plain(torch.tensor([text])).logits.abs().max()


def test_native_path_dynamic_rotation_stays_that_of_the_context(tmp_path):
    """Asked for positions past the context, dynamic rotary embedding would change all of them."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    directory = tiny_model("llama", tmp_path, rope_parameters=rope)
    run = CheckedEngine(load_engine(str(directory)), plain_model(directory))
    run.step(SequenceInput("a", 0, random_tokens(126, 1), 3))
    run.step(SequenceInput("a", 126, random_tokens(2, 2), 2))
    run.step(SequenceInput("a", 20, random_tokens(2, 2), 2))
    assert run.worst <= 1e-4


def test_native_path_does_not_keep_the_loaded_model(tmp_path, monkeypatch):
    """Only the laid out weights stay in memory."""
    loaded: list[weakref.ref[torch.nn.Module]] = []
    right = loading.load_model

    def load(name: str, **settings: str) -> LoadedModel:
        model = right(name, **settings)
        loaded.append(weakref.ref(model.module))
        return model

    monkeypatch.setattr(loading, "load_model", load)
    engine = load_engine(str(tiny_model("llama", tmp_path)))
    gc.collect()
    assert loaded[0]() is None
    assert engine.num_layers == 3


@pytest.mark.parametrize("variant", usable_variants())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 5, 16, 97, 2048])
def test_top_k_equals_a_sorted_softmax(size, dtype, variant, monkeypatch):
    monkeypatch.setattr(guesses, "load_kernel", lambda: open_kernel(variant))
    generator = torch.Generator().manual_seed(size)
    for temperature in (0.1, 1.0, 3.0):
        scores = torch.randn(size, generator=generator, dtype=dtype) * 4
        scores[size // 2] = scores.max()  # a tie: the lower index first
        scores[size // 3 :][:2] = float("-inf") if size > 5 else 0.0
        order = sorted(range(size), key=lambda i: (-scores[i].item(), i))[:6]
        shares = torch.softmax(scores.double() / temperature, 0)
        got = top_k_tokens(scores, 6, temperature)
        assert [token_id for token_id, _ in got] == order
        assert [share for _, share in got] == pytest.approx(shares[order].tolist(), rel=1e-4, abs=1e-12)


def test_top_k_is_the_same_without_the_kernel(monkeypatch):
    scores = torch.randn(500, generator=torch.Generator().manual_seed(1))
    with_kernel = top_k_tokens(scores, 4, 0.7)
    monkeypatch.setattr(guesses, "load_kernel", lambda: Kernel(None))
    without = top_k_tokens(scores, 4, 0.7)
    assert [token_id for token_id, _ in without] == [token_id for token_id, _ in with_kernel]
    assert [share for _, share in without] == pytest.approx([share for _, share in with_kernel], rel=1e-5)


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("first", [(5,), (9, 2, 5)])
def test_chain_equals_single_steps(first, variant, noisy, tmp_path):
    directory = str(tiny_model("qwen3", tmp_path))
    ours, theirs = load_engine(directory), load_engine(directory)
    noise = Noise(7, 0, ours.vocab_size).gumbel(20 + len(first), 6) if noisy else None
    chained(ours, theirs, noise, first=first)


def test_chain_ends_with_the_forward_during_which_it_is_stopped(tmp_path):
    directory = str(tiny_model("llama", tmp_path))
    ours, theirs = load_engine(directory), load_engine(directory)
    token_ids, logits = ours.chain(SequenceInput("a", 0, [5] * 4, 4), stop=c_int32(1))
    assert token_ids == [5]
    assert torch.equal(logits, theirs.step([SequenceInput("a", 0, [5], 1)])[0])
    assert ours.length("a") == 1
    (one,), (other,) = (engine.step([SequenceInput("a", 1, [7], 1)]) for engine in (ours, theirs))
    assert torch.equal(one, other)


def test_forward_that_ends_early_changes_nothing(tmp_path):
    directory = str(tiny_model("llama", tmp_path))
    ours, theirs = load_engine(directory), load_engine(directory)
    for engine in (ours, theirs):
        engine.step([SequenceInput("a", 0, [5, 6], 1)])
    with pytest.raises(EndedEarlyError):
        ours.step([SequenceInput("a", 2, [7], 1), SequenceInput("b", 0, [8], 1)], until=c_int32(1))
    assert (ours.length("a"), ours.length("b")) == (2, 0)
    feeds = [SequenceInput("a", 2, [9], 1), SequenceInput("b", 0, [3], 1)]
    for one, other in zip(ours.step(feeds, until=c_int32(0)), theirs.step(feeds), strict=True):
        assert torch.equal(one, other)


def test_chain_rejects_the_same_input_as_a_step(tmp_path):
    directory = str(tiny_model("llama", tmp_path))
    engine = load_engine(directory)
    assert engine.can_chain
    assert not load_engine(directory, engine="transformers").can_chain
    engine.step([SequenceInput("a", 0, random_tokens(MAX_CONTEXT - 2, 1), 1)])
    with pytest.raises(ValueError, match="token_ids"):
        engine.chain(SequenceInput("a", MAX_CONTEXT - 2, [5] * 3, 3))
    with pytest.raises(CacheGapError):
        engine.chain(SequenceInput("a", MAX_CONTEXT - 1, [5], 1))
    assert engine.length("a") == MAX_CONTEXT - 2
    assert len(engine.chain(SequenceInput("a", MAX_CONTEXT - 2, [5] * 2, 2))[0]) == 2


PLACES = ((0, 0), (2**64 - 1, 7), (0x299F31D0A4093822, 2**32 - 2), (5, -2))


@pytest.mark.parametrize("variant", usable_variants())
@pytest.mark.parametrize("ids", [None, [70_001, 0, 5, 6, 1_000, 5]])
def test_compiled_noise_equals_torchs_to_the_bit(variant, ids, monkeypatch):
    token_ids = None if ids is None else torch.tensor(ids)
    count = 1_003 if ids is None else len(ids)

    def rows() -> torch.Tensor:
        made = [
            exponential(*place, 3, count, sample_index=9, stream=3, token_ids=token_ids) for place in PLACES
        ]
        return torch.stack(made)

    kernel = open_kernel(variant)
    assert kernel.library is not None
    monkeypatch.setattr(noise_module, "load_kernel", lambda: kernel)
    ours = rows()
    monkeypatch.setattr(noise_module, "load_kernel", lambda: Kernel(None))
    assert torch.equal(ours, rows())


INT8 = 2


def dequantised(directory: Path) -> PreTrainedModel:
    """The quantised model as transformers runs it."""
    module = load_model(str(directory), device="cpu").module
    quantise_model(module)
    return module


def random_matrix(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs)) * 0.1


@pytest.mark.parametrize("arch", ["qwen3", "llama-bias"])
def test_every_instruction_set_runs_the_dequantised_model(arch, variant, tmp_path):
    """Rows in all numbers that have a product of their own; `deterministic` compares them bit by bit."""
    # 45 inputs are no whole number of steps, 97 outputs none of panels; with biases and tied embeddings.
    directory = tiny_model(arch, tmp_path, intermediate_size=45)
    engine = load_engine(str(directory), weights="int8", deterministic=True)
    assert isinstance(engine.runner, NativeRunner)
    weights = engine.runner.model.weights
    assert weights.layer[0].down.kind == weights.head.kind == INT8
    assert engine.kernel.endswith(", int8 weights")
    run = CheckedEngine(engine, dequantised(directory))
    run.step(SequenceInput("a", 0, random_tokens(40, 1), 40))
    for rows in range(1, 9):
        run.step(SequenceInput("a", 40, random_tokens(rows, rows), rows))
    run.step(SequenceInput("a", 40, random_tokens(3, 3), 3, (-1, -1, 1)), SequenceInput("b", 0, [5], 1))
    assert run.worst <= (ROUNDED if variant in (VNNI, BF16, AMX) else 1e-4)


@pytest.mark.parametrize("arch", LEAN)
def test_every_covered_architecture_is_quantised(arch, tmp_path):
    directory = tiny_model(arch, tmp_path, bfloat16=True)
    run = CheckedEngine(load_engine(str(directory), weights="int8"), dequantised(directory))
    run.step(SequenceInput("a", 0, random_tokens(50, 1), 50))
    assert 0 < run.worst <= ROUNDED


def test_int8_is_the_nearest_of_255_steps_of_a_row():
    weight = random_matrix(20, 70)
    weight[3] = 0
    matrix = quantise(weight)
    assert matrix.values.dtype == torch.int8
    assert matrix.values.abs().amax(1).tolist() == [127] * 3 + [0] + [127] * 16
    assert ((matrix.dequantised() - weight).abs() <= matrix.scales * 0.5001).all()
    assert not matrix.dequantised()[3].any()


def test_check_of_the_start_compares_with_the_dequantised_model(tmp_path, monkeypatch):
    """One wrong integer in a layer is refused."""
    right = loading.quantise_model

    def spoilt(module: PreTrainedModel) -> Mapping[int, QuantisedMatrix]:
        quantised = dict(right(module))
        address = module.get_parameter("model.layers.1.mlp.down_proj.weight").data_ptr()
        values = quantised[address].values.clone()
        values[3, 5] ^= 64
        return quantised | {address: replace(quantised[address], values=values)}

    directory = str(tiny_model("llama", tmp_path))
    load_engine(directory, weights="int8")
    monkeypatch.setattr(loading, "quantise_model", spoilt)
    with pytest.raises(UnsupportedModelError, match="differ from the model's own"):
        load_engine(directory, weights="int8")


def test_draft_setting_quantises_drafts_and_never_targets(tmp_path, monkeypatch):
    monkeypatch.setenv("GAMMARAY_DRAFT_WEIGHTS", "int8")
    directory = str(tiny_model("llama", tmp_path))
    draft = load_worker_engine(directory, DraftSettings(device="cpu"))
    target = load_worker_engine(directory, TargetSettings(device="cpu"))
    assert draft.kernel == f"{target.kernel}, int8 weights"
    feed = SequenceInput("a", 0, random_tokens(20, 1), 20)
    assert torch.equal(target.step([feed])[0], load_engine(directory).step([feed])[0])
    assert not torch.equal(draft.step([feed])[0], target.step([feed])[0])


@pytest.mark.parametrize(
    ("arch", "how", "reason"),
    [
        ("llama", {"engine": "transformers"}, "the engine is transformers"),
        ("gemma2", {}, "gemma2 is not covered"),
    ],
)
def test_weights_without_a_kernel_are_refused(arch, how, reason, tmp_path):
    with pytest.raises(InvalidArgumentError) as refused:
        load_engine(str(tiny_model(arch, tmp_path)), weights="int8", device="cpu", **how)  # type: ignore[arg-type]
    assert str(refused.value) == (
        f"draft_weights: got int8, allowed: auto: int8 needs the compiled CPU kernel ({reason})"
    )
