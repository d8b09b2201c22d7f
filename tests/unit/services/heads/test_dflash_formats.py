"""DFlash heads of both formats give the logits of `speculators`, or are refused with the reason."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from gammaray.errors import InvalidArgumentError
from services.engine.core.errors import UnsupportedModelError
from services.engine.engine import SequenceInput
from services.heads.block_runners import dflash_engine
from services.heads.dflash_formats import load_dflash, names_dflash
from services.heads.loading import load_head
from tests.support.engine_helpers import VOCAB_SIZE, tiny_model
from tests.support.head_helpers import DATA, as_official_dflash, changed, complete_dflash

KINDS = ("dflash", "dflash-anchor")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(tiny_model("llama", tmp_path_factory.mktemp("target"), seed=3))


def engine_of(folder, target):
    head, target_ids = load_dflash(str(folder), target)
    return dflash_engine(head, target_ids, name="head", max_context=128), head, target_ids


def expected_of(kind):
    stored = load_file(DATA / kind / "expected.safetensors")
    states = stored["states"].unflatten(1, (3, -1))
    return states, stored["token_ids"].tolist(), stored["anchors"].tolist(), stored["logits"]


def block(engine, token_ids, anchor, features, start=0):
    """Return the logits of the block after `anchor`, with features from `start` on."""
    fed = [*token_ids[start:anchor], token_ids[anchor], *[engine.mask_token] * (engine.config.block_size - 1)]
    feed = SequenceInput("s", start, fed, engine.config.block_size, features=features[start:anchor])
    return engine.step([feed])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_library(kind, tmp_path, target):
    engine, head, target_ids = engine_of(complete_dflash(kind, tmp_path), target)
    assert engine.config.taps == (0, 1, 2)
    assert engine.config.first_row == (kind == "dflash")
    states, token_ids, anchors, logits = expected_of(kind)
    features = head.fuse(states)
    assert len(set(anchors)) == 4
    columns = slice(None) if target_ids is None else target_ids
    for anchor, rows in zip(anchors, logits, strict=True):
        engine.release("s")
        made = block(engine, token_ids, anchor, features)
        torch.testing.assert_close(made[:, columns], rows, rtol=1e-4, atol=1e-4)


def test_entries_of_earlier_feeds_are_read(tmp_path, target):
    """A session drafts after each of its tokens as the library does after all of them."""
    engine, head, _ = engine_of(complete_dflash("dflash", tmp_path), target)
    states, token_ids, anchors, logits = expected_of("dflash")
    features, fed = head.fuse(states), 0
    for anchor in range(max(anchors) + 1):
        made = block(engine, token_ids, anchor, features, fed)
        engine.truncate("s", anchor + 1)
        fed = anchor
        if anchor in anchors:
            rows = logits[anchors.index(anchor)]
            torch.testing.assert_close(made, rows, rtol=1e-4, atol=1e-4)


def test_sessions_of_one_step_do_not_see_each_other(tmp_path, target):
    engine, head, _ = engine_of(complete_dflash("dflash", tmp_path), target)
    states, token_ids, anchors, logits = expected_of("dflash")
    features, masks = head.fuse(states), [engine.mask_token] * 4
    feeds = [
        SequenceInput(str(anchor), 0, token_ids[: anchor + 1] + masks, 5, features=features[:anchor])
        for anchor in anchors
    ]
    for made, rows in zip(engine.step(feeds), logits, strict=True):
        torch.testing.assert_close(made, rows, rtol=1e-4, atol=1e-4)


def test_skipped_positions_are_not_seen(tmp_path, target):
    engine, head, _ = engine_of(complete_dflash("dflash", tmp_path), target)
    states, token_ids, anchors, _ = expected_of("dflash")
    features, anchor = head.fuse(states), max(anchors)
    made = []
    for first in (0, 1):
        features[:2] += first  # seen by none
        engine.skip("s", token_ids[:2])
        made.append(block(engine, token_ids, anchor, features, 2))
    assert torch.equal(*made)
    engine.release("s")
    assert not torch.allclose(block(engine, token_ids, anchor, features), made[0], atol=1e-2)


@pytest.mark.parametrize("fault", ["feature", "state", "position", "causal", "mask", "norm"])
def test_comparison_with_the_library_catches_faults(fault, tmp_path, target):
    engine, head, _ = engine_of(complete_dflash("dflash", tmp_path), target)
    states, token_ids, anchors, logits = expected_of("dflash")
    anchor = max(anchors)
    features = head.fuse(states.roll(1, 1) if fault == "state" else states)
    if fault == "feature":
        features = features.roll(1, 0)
    if fault == "norm":
        head.hidden_norm.weight = torch.nn.Parameter(torch.ones(32))
        features = head.fuse(states)
    if fault == "mask":
        engine.mask_token -= 1
    if fault == "causal":
        made = torch.cat([one_more(engine, token_ids, anchor, features, count) for count in range(1, 6)])
    elif fault == "position":
        engine.skip("s", token_ids[:1])
        fed = SequenceInput(
            "s", 1, [*token_ids[: anchor + 1], *[engine.mask_token] * 4], 5, features=features[:anchor]
        )
        # Rotations are relative: the shift of all is none, that of the context alone is one.
        made = engine.step([fed])[0]
        assert torch.allclose(made, logits[anchors.index(anchor)], atol=1e-3)
        engine.release("s")
        made = block(engine, token_ids, anchor, features[1:].repeat(2, 1))
    else:
        made = block(engine, token_ids, anchor, features)
    assert (made - logits[anchors.index(anchor)]).abs().max() > 1e-2


def one_more(engine, token_ids, anchor, features, count):
    """Return the last row of a block of `count` tokens, which sees none after it."""
    engine.release("s")
    fed = [*token_ids[: anchor + 1], *[engine.mask_token] * (count - 1)]
    return engine.step([SequenceInput("s", 0, fed, 1, features=features[:anchor])])[0]


def test_official_format_is_the_same_head(tmp_path, target):
    official, theirs, _ = engine_of(as_official_dflash(tmp_path / "a"), target)
    ours, own, _ = engine_of(complete_dflash("dflash", tmp_path / "b", taps=[1, 2]), target)
    states, token_ids, anchors, _ = expected_of("dflash")
    rows = []
    for engine, head in ((official, theirs), (ours, own)):
        assert engine.config.taps == (1, 2)  # the outputs of layers 0 and 1
        rows.append(block(engine, token_ids, max(anchors), head.fuse(states[:, :2])))
    assert torch.equal(*rows)


def test_embedding_and_output_are_the_targets(target):
    head, target_ids = load_dflash(str(DATA / "dflash"), target)
    stored = load_file(f"{target}/model.safetensors")
    assert target_ids is None
    assert torch.equal(head.embed_tokens.weight, stored["model.embed_tokens.weight"])
    assert torch.equal(head.lm_head.weight, stored["lm_head.weight"])


def drop(key):
    return lambda stored: {name: value for name, value in stored.items() if name != key}


def put(**values):
    return lambda stored: {**stored, **values}


def layer(**values):
    return lambda stored: {
        **stored,
        "transformer_layer_config": {**stored["transformer_layer_config"], **values},
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put(convolution=3), "flag 'convolution' is not known"),
        (drop("transformer_layer_config"), "lacks transformer_layer_config"),
        (drop("block_size"), "block_size is None, allowed: 2 to 65"),
        (put(block_size=1), "block_size is 1"),
        (put(block_size=10**9), "block_size is 1000000000"),
        (drop("mask_token_id"), "mask_token_id is None"),
        (put(mask_token_id=VOCAB_SIZE), f"mask_token_id is {VOCAB_SIZE}, allowed: 0 to {VOCAB_SIZE - 1}"),
        (drop("aux_hidden_state_layer_ids"), "aux_hidden_state_layer_ids is None, no list"),
        (put(aux_hidden_state_layer_ids=[0, 1, 3]), r"enter layers \[0, 1, 3\], allowed: \[0, 3\)"),
        (put(aux_hidden_state_layer_ids=[0, 1]), r"fc.weight: got the shape \[32, 96\]"),
        (put(draft_vocab_size=40), "d2t: got no tensor"),
        (put(sample_from_anchor="yes"), "sample_from_anchor is 'yes'"),
        (put(draft_vocab_size=1000), "draft_vocab_size is 1000"),
        (put(draft_vocab_size="x"), "draft_vocab_size: got x, allowed: an integer"),
        (layer(model_type="mamba"), "layers are of type 'mamba'"),
        (layer(vocab_size=98), "vocab_size is 98, the target's is 97"),
        (layer(hidden_size=64), "hidden_size is 64"),
        (layer(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (layer(layer_types=["sliding_attention", "full_attention"]), "slides"),
        (layer(num_hidden_layers=3, layer_types=None), "lacks 11 weights"),
        (layer(num_hidden_layers=500, layer_types=None), "num_hidden_layers is 500"),
        (layer(num_attention_heads="many"), "num_attention_heads: got many, allowed: an integer"),
    ],
)
def test_configuration_that_is_not_served_is_refused(tmp_path, target, change, reason):
    folder = changed("dflash", tmp_path, config=change)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_dflash(str(folder), target)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put(num_target_layers=4), "for 4 layers, the target has 3"),
        (put(dflash_config=[]), "no object"),
        (put(dflash_config={"target_layer_ids": [0, 1], "mask_token_id": 96, "x": 1}), "dflash_config 'x'"),
        (put(dflash_config={"target_layer_ids": [0, 2], "mask_token_id": 96}), r"enter layers \[1, 3\]"),
        (put(dflash_config={"mask_token_id": 96}), "target_layer_ids is None"),
        (put(markov_rank=256), "flag 'markov_rank' is not known"),
    ],
)
def test_official_configuration_that_is_not_served_is_refused(tmp_path, target, change, reason):
    folder = as_official_dflash(tmp_path)
    stored = change(json.loads((folder / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(stored))
    with pytest.raises(UnsupportedModelError, match=reason):
        load_dflash(str(folder), target)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop("hidden_norm.weight"), "lacks 1 weights, such as hidden_norm.weight"),
        (lambda stored: stored | {"confidence_head.proj.weight": torch.ones(2)}, "no place for 1 weights"),
        (lambda stored: stored | {"norm.weight": torch.full((32,), torch.nan)}, "not finite"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, target, change, reason):
    folder = changed("dflash", tmp_path, weights=change)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_dflash(str(folder), target)


def test_reduced_vocabulary_needs_its_output(tmp_path, target):
    folder = changed("dflash-anchor", tmp_path, weights=drop("lm_head.weight"))
    with pytest.raises(UnsupportedModelError, match=r"it lacks lm_head\.weight"):
        load_dflash(str(folder), target)


def test_weights_are_computed_as_stored(target):
    head, target_ids = load_dflash(str(DATA / "dflash"), target)
    with pytest.raises(InvalidArgumentError, match="draft_weights"):
        dflash_engine(head, target_ids, name="head", max_context=128, weights="int8")


def test_names_of_heads(tmp_path, target):
    assert names_dflash(str(DATA / "dflash"))
    assert names_dflash(str(as_official_dflash(tmp_path)))
    assert not names_dflash(str(DATA / "llama"))
    assert not names_dflash(target)
    assert not names_dflash(str(tmp_path / "absent"))
    with pytest.raises(UnsupportedModelError, match="DFlash head, which drafts in the target worker only"):
        load_head(str(tmp_path), target)
