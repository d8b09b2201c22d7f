"""Drafter directories: parallel draft models, reduced vocabularies, shared embeddings, early exits."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gammaray.errors import InvalidArgumentError
from services.engine.core.batch import SequenceInput
from services.engine.core.drafter import NOT_DRAFTED
from services.engine.core.errors import UnsupportedModelError
from services.engine.engine import Engine
from services.engine.loader import load_engine
from services.engine.sampling.noise import Noise
from tests.support.drafter_helpers import EMBEDDING, HEAD, make_drafter
from tests.support.engine_helpers import (
    VOCAB_SIZE,
    chained,
    plain_logits,
    plain_model,
    random_tokens,
    tiny_model,
)
from tests.support.own_process import run_code

MASK = 4
TEXT = random_tokens(9, seed=1)
RUNNERS = pytest.mark.parametrize("choice", ["auto", "transformers"], ids=["kernel", "transformers"])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A tiny model, which is also the target whose embedding a drafter shares."""
    return tiny_model("llama", tmp_path_factory.mktemp("source"), seed=3)


def load(drafter: Path | str, target: Path | str = "", *, choice: str = "auto") -> Engine:
    return load_engine(str(drafter), draft_for=str(target), engine=choice)


def logits_of(engine: Engine, token_ids: list[int]) -> torch.Tensor:
    (logits,) = engine.step([SequenceInput("s", 0, token_ids, len(token_ids))])
    return logits


@RUNNERS
def test_rows_of_a_block_equal_transformers_forward_with_masks(source, tmp_path, choice):
    engine = load(make_drafter(source, tmp_path / "d", pard_token=MASK), choice=choice)
    assert engine.mask_token == MASK
    expected = plain_logits(plain_model(source), [*TEXT, *[MASK] * 3])
    assert torch.allclose(logits_of(engine, [*TEXT, *[MASK] * 3]), expected, atol=1e-4)


@RUNNERS
@pytest.mark.parametrize("tied", [False, True])
def test_mask_with_an_embedding_of_its_own_is_no_token(source, tmp_path, choice, tied):
    base = tiny_model("llama", tmp_path, seed=5, tie_word_embeddings=tied)
    options = {"pard_token": 10**6, "mask_embedding": True, "shares_embedding": not tied}
    drafter = make_drafter(base, tmp_path / "d", **options)
    engine = load(drafter, source, choice=choice)
    assert (engine.vocab_size, engine.mask_token) == (VOCAB_SIZE, VOCAB_SIZE)
    reference = plain_model(base)
    with torch.no_grad():
        rows = reference.get_input_embeddings().weight
        if not tied:
            rows.copy_(plain_model(source).get_input_embeddings().weight)
        embedded = torch.cat([rows[TEXT], load_file(drafter / "model.safetensors")["pard_embedding"]])[None]
        expected = reference(inputs_embeds=embedded, use_cache=False).logits[0]
    assert torch.allclose(logits_of(engine, [*TEXT, VOCAB_SIZE]), expected, atol=1e-4)


@RUNNERS
def test_reduced_vocabulary_is_expanded_to_the_targets(source, tmp_path, choice):
    drafter = make_drafter(source, tmp_path / "d", draft_vocab_size=40, shares_embedding=True)
    engine = load(drafter, source, choice=choice)
    assert engine.vocab_size == VOCAB_SIZE
    ids = load_file(drafter / "model.safetensors")["d2t"] + torch.arange(40)
    logits = logits_of(engine, TEXT)
    assert torch.allclose(logits[:, ids], plain_logits(plain_model(source), TEXT)[:, ids], atol=1e-4)
    others = [token_id for token_id in range(VOCAB_SIZE) if token_id not in ids]
    assert (logits[:, others] == NOT_DRAFTED).all()


@pytest.mark.parametrize("noisy", [False, True])
def test_chain_of_a_reduced_vocabulary_equals_single_steps(source, tmp_path, noisy):
    drafter = make_drafter(source, tmp_path / "d", draft_vocab_size=40, shares_embedding=True)
    noise = Noise(7, 0, VOCAB_SIZE).gumbel(21, 6) if noisy else None
    assert len(set(chained(load(drafter, source), load(drafter, source), noise))) > 2


@RUNNERS
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("arch", ["llama", "qwen2-sliding"])
def test_early_exit_equals_transformers_model_cut_to_its_first_layers(tmp_path, choice, num_layers, arch):
    target = tiny_model(arch, tmp_path, seed=8)
    engine = load(f"early-exit:{num_layers}", target, choice=choice)
    assert engine.num_layers == num_layers
    reference = plain_model(target)
    del reference.model.layers[num_layers:]
    reference.config.num_hidden_layers = num_layers
    assert torch.allclose(logits_of(engine, TEXT), plain_logits(reference, TEXT), atol=1e-4)


@pytest.mark.parametrize("number", ["0", "3", "99999", "x", ""])
def test_early_exit_out_of_range_is_refused_with_the_range(source, number):
    with pytest.raises(InvalidArgumentError, match=r"^model: got .*N with N from 1") as caught:
        load(f"early-exit:{number}", source)
    if number.isdecimal():
        assert "3 layers" in str(caught.value) or number == "0"


def test_early_exit_is_refused_without_its_target():
    with pytest.raises(InvalidArgumentError, match=r"^target: got"):
        load("early-exit:1")


@pytest.mark.parametrize("arch", ["gpt2", "gpt_neox", "opt", "gemma2"])
def test_embedding_is_found_by_the_name_that_the_model_gives_it(tmp_path, arch):
    """It is shared if it is absent, and not if it has another name than Llama's."""
    target = tiny_model(arch, tmp_path, seed=1)
    drafter = tiny_model(arch, tmp_path, seed=2)
    reference = plain_model(drafter)
    assert torch.allclose(logits_of(load(drafter), TEXT), plain_logits(reference, TEXT), atol=1e-4)
    file = drafter / "model.safetensors"
    weights = load_file(file)
    (name,) = [
        key for key in weights if key.endswith(("wte.weight", "embed_in.weight", "embed_tokens.weight"))
    ]
    del weights[name]
    save_file(weights, file, metadata={"format": "pt"})
    with torch.no_grad():
        reference.get_input_embeddings().weight.copy_(plain_model(target).get_input_embeddings().weight)
    made = logits_of(load(drafter, target), TEXT)
    assert torch.allclose(made, plain_logits(reference, TEXT), atol=1e-4)
    with pytest.raises(InvalidArgumentError, match=r"target: .* shares the target's embedding"):
        load(drafter)


def test_names_without_the_prefix_of_the_body_are_those_of_an_ordinary_draft(tmp_path):
    """GPT-2 is published so."""
    drafter = tiny_model("gpt2", tmp_path)
    expected = plain_logits(plain_model(drafter), TEXT)
    file = drafter / "model.safetensors"
    bare = {key.removeprefix("transformer."): weight for key, weight in load_file(file).items()}
    assert "wte.weight" in bare
    save_file(bare, file, metadata={"format": "pt"})
    assert torch.allclose(logits_of(load(drafter), TEXT), expected, atol=1e-4)


def test_target_of_another_width_is_refused(source, tmp_path):
    wide = tiny_model("llama", tmp_path, hidden_size=64)
    with pytest.raises(UnsupportedModelError, match="got the shape"):
        load(make_drafter(source, tmp_path / "d", shares_embedding=True), wide)


@pytest.mark.parametrize("pard_token", [-1, VOCAB_SIZE, "4"])
def test_pard_token_outside_the_vocabulary_is_refused(source, tmp_path, pard_token):
    with pytest.raises(UnsupportedModelError, match="pard_token"):
        load(make_drafter(source, tmp_path / "d", pard_token=pard_token))


@pytest.mark.parametrize("shares", [False, True])
def test_truncated_weights_are_refused(source, tmp_path, shares):
    file = make_drafter(source, tmp_path / "d", shares_embedding=shares) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UnsupportedModelError, match="truncated or damaged"):
        load(tmp_path / "d", source)


@pytest.mark.parametrize(
    ("key", "shares"),
    [("model.norm.weight", False), (HEAD, False), ("model.norm.weight", True), (HEAD, True), ("d2t", True)],
)
def test_missing_weights_are_refused(source, tmp_path, key, shares):
    file = make_drafter(source, tmp_path / "d", draft_vocab_size=40 if key == "d2t" else None)
    file /= "model.safetensors"
    weights = load_file(file)
    del weights[key]
    if shares:
        del weights[EMBEDDING]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"lacks|got no tensor"):
        load(tmp_path / "d", source)


LOADS_FROM_THE_HUB = """
import sys
from safetensors.torch import save_file
from services.engine.core.batch import SequenceInput
from services.engine.loader import load_engine
from services.process.fingerprints import check_drafter

try:
    check_drafter("org/drafter", "org/target")
except Exception as error:
    print(error)
check_drafter("early-exit:1", "org/target")
engine = load_engine("org/drafter", draft_for="org/target")
token_ids = [int(token_id) for token_id in sys.argv[2:]]
(logits,) = engine.step([SequenceInput("s", 0, token_ids, len(token_ids))])
save_file({"logits": logits.contiguous()}, sys.argv[1])
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_drafter_of_the_hub_in_shards_is_loaded_as_its_directory_is(source, tmp_path):
    drafter = make_drafter(source, tmp_path / "d", draft_vocab_size=40, shares_embedding=True)
    expected = logits_of(load(drafter, source), TEXT)
    weights = load_file(drafter / "model.safetensors")
    (drafter / "model.safetensors").unlink()
    names = {key: f"part-{number}.safetensors" for number, key in enumerate(sorted(weights))}
    for key, name in names.items():
        save_file({key: weights[key]}, drafter / name)
    (drafter / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    other = {"name": "another", "fingerprint": "f" * 64}
    (drafter / "gammaray.json").write_text(json.dumps({"format": 1, "target": other, "tokenizer": other}))
    for name, folder in (("drafter", drafter), ("target", source)):
        stored = tmp_path / "hub" / f"models--org--{name}"
        (stored / "refs").mkdir(parents=True)
        (stored / "refs" / "main").write_text("0" * 40)
        shutil.copytree(folder, stored / "snapshots" / ("0" * 40))
    hub = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    loaded = run_code(LOADS_FROM_THE_HUB, str(tmp_path / "out"), *map(str, TEXT), env=hub)
    assert "it was trained for another (ffffffffffff)" in loaded.stdout
    assert torch.equal(load_file(tmp_path / "out")["logits"], expected)
