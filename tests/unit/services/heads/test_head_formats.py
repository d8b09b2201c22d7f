"""Heads of the published formats give the logits of their own library, or are refused with the reason."""

import pytest
import torch
from safetensors.torch import load_file

from gammaray.errors import InvalidArgumentError, NotFoundError
from services.engine.core.batch import SequenceInput
from services.engine.core.drafter import NOT_DRAFTED
from services.engine.core.errors import UnsupportedModelError
from services.engine.sampling.noise import Noise
from services.heads.loading import load_head
from services.heads.runner import head_engine
from tests.support.engine_helpers import VOCAB_SIZE, tiny_model
from tests.support.head_helpers import DATA, VARIANTS, as_official, changed


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(tiny_model("llama", tmp_path_factory.mktemp("target"), seed=3))


def engine_of(folder, target, **options):
    head, target_ids = load_head(str(folder), target)
    engine = head_engine(head, target_ids, name="head", max_context=128, **options)
    return engine, head, target_ids


def feed(start, token_ids, features=None):
    return SequenceInput("s", start, token_ids, len(token_ids), features=features)


def begin(engine, token_ids, features):
    """Return the rows of a new session's tokens after its first one, which a head does not read."""
    engine.skip("s", [0])
    (rows,) = engine.step([feed(1, token_ids, features)])
    return rows


def expected_of(folder):
    stored = load_file(folder / "expected.safetensors")
    return stored["states"].unflatten(1, (3, -1)), stored["token_ids"].tolist(), stored["logits"]


@pytest.mark.parametrize("uses_kernel", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_library(variant, uses_kernel, target):
    engine, head, target_ids = engine_of(DATA / variant, target, uses_kernel=uses_kernel)
    assert engine.kernel.startswith("none") is not uses_kernel
    states, token_ids, logits = expected_of(DATA / variant)
    features = head.fuse(states)
    first = begin(engine, token_ids, features)
    torch.testing.assert_close(first[:, target_ids], logits[0], rtol=1e-4, atol=1e-4)
    assert (first[:, [token for token in range(VOCAB_SIZE) if token not in target_ids]] == NOT_DRAFTED).all()

    for row in range(len(token_ids) - 2):  # the library's tokens after each row, on the head's own states
        engine.truncate("s", 0)
        begin(engine, token_ids[: row + 1], features[: row + 1])
        for step in (1, 2):
            (made,) = engine.step([feed(row + 1 + step, [token_ids[row + step]])])
            torch.testing.assert_close(made[0, target_ids], logits[step, row], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("noisy", [False, True])
def test_chain_from_features_equals_single_steps(noisy, target):
    """One call feeds committed tokens with their features, then tokens on the head's own states."""
    states, token_ids, _ = expected_of(DATA / "llama")
    (ours, head, target_ids), (theirs, _, _) = (engine_of(DATA / "llama", target) for _ in range(2))
    features, known = head.fuse(states), len(token_ids) - 3
    noise = Noise(7, 0, VOCAB_SIZE).gumbel(known + 1, 3) if noisy else None
    for engine in (ours, theirs):
        begin(engine, token_ids[:2], features[:2])
    first = token_ids[2:known]
    drafting = SequenceInput("s", 3, [*first, 0, 0], 3, features=features[2:known])
    made, logits = ours.chain(drafting, noise, scale=2.0)

    following, drawn, given = first, list[int](), features[2:known]
    for index in range(3):
        row = theirs.step([SequenceInput("s", 3 + len(drawn), following, 1, features=given)])[0][0]
        assert torch.equal(logits[index], row)
        drawn, given = drawn + following, None
        following = [int((row if noise is None else row.double() * 2.0 + noise[index]).argmax())]
        assert following[0] in target_ids
    assert made == drawn
    assert list(ours.tokens("s")) == list(theirs.tokens("s"))
    (one,), (other,) = (engine.step([feed(3 + len(drawn), following)]) for engine in (ours, theirs))
    assert torch.equal(one, other)


def test_quantised_head_is_near_the_stored_one(target):
    states, token_ids, _ = expected_of(DATA / "llama")
    rows = []
    for weights in ("auto", "int8"):
        engine, head, _ = engine_of(DATA / "llama", target, weights=weights)
        rows.append(begin(engine, token_ids, head.fuse(states)))
    drafted = rows[0][0] != NOT_DRAFTED
    difference = (rows[0] - rows[1])[:, drafted].abs()
    assert 0 < difference.mean() < 0.1
    with pytest.raises(InvalidArgumentError, match="draft_weights"):
        engine_of(DATA / "llama", target, weights="int8", uses_kernel=False)


def test_official_format_is_the_same_head(tmp_path, target):
    official, theirs, official_ids = engine_of(as_official(tmp_path), target)
    ours, own, target_ids = engine_of(DATA / "llama", target)
    assert torch.equal(official_ids, target_ids)
    states, token_ids, _ = expected_of(DATA / "llama")
    rows = []
    for engine, head in ((official, theirs), (ours, own)):
        assert head.config.taps == (1, 2, 3)
        rows.append(begin(engine, token_ids, head.fuse(states)))
    assert torch.equal(*rows)


def drop(key):
    return lambda stored: {name: value for name, value in stored.items() if name != key}


def put(**values):
    return lambda stored: {**stored, **values}


def layer(**values):
    return lambda stored: {
        **stored,
        "transformer_layer_config": {**stored["transformer_layer_config"], **values},
    }


def nan(stored):
    stored["fc.weight"][0, 0] = torch.nan


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        ("config", put(speculators_model_type="dflash"), "a DFlash head, served by the engine vllm only"),
        ("config", put(speculators_model_type="eagle9"), "speculators_model_type is 'eagle9'"),
        ("config", put(norm_after_everything=True), "flag 'norm_after_everything' is not known"),
        ("config", drop("norm_before_residual"), "lacks norm_before_residual"),
        ("config", drop("transformer_layer_config"), "lacks transformer_layer_config"),
        ("config", put(norm_output="yes"), "norm_output is 'yes'"),
        ("config", put(eagle_aux_hidden_state_layer_ids=[1, 2, 4]), r"layers \[1, 2, 4\], allowed: \[0, 3\]"),
        ("config", put(eagle_aux_hidden_state_layer_ids="all"), "layer ids are 'all'"),
        ("config", put(eagle_aux_hidden_state_layer_ids=[1, 2]), r"fc.weight: got the shape \[32, 96\]"),
        ("config", put(target_hidden_size=64), "states of width 64"),
        ("config", put(norm_before_fc=True, fc_norm=True), "exclude each other"),
        ("config", put(draft_vocab_size=41), r"d2t: got the shape \[40\]"),
        ("config", layer(vocab_size=98), "98 token ids"),
        ("config", layer(num_hidden_layers=2), "2 layers"),
        ("config", layer(hidden_act="gelu"), "hidden_act is 'gelu'"),
        ("config", layer(model_type="mamba"), "type 'mamba'"),
        ("config", layer(intermediate_size=64), "mlp"),
        ("config", layer(layer_types=["sliding_attention"]), "slides"),
        ("weights", drop("fc.weight"), "lacks 1 weights, such as fc.weight"),
        ("weights", drop("d2t"), "d2t: got no tensor"),
        ("weights", drop("lm_head.weight"), "lacks lm_head.weight"),
        (
            "weights",
            lambda stored: stored | {"layers.1.mlp.up_proj.weight": torch.ones(2)},
            "no place for 1 weights",
        ),
        ("weights", lambda stored: stored | {"d2t": torch.zeros(40, dtype=torch.int64) - 1}, "ascending ids"),
        ("weights", nan, "fc.weight: got numbers that are not finite"),
    ],
)
def test_files_that_are_not_served_are_refused(tmp_path, target, file, change, reason):
    folder = changed("llama", tmp_path, **{file: change})
    with pytest.raises(UnsupportedModelError, match=reason):
        load_head(str(folder), target)


def test_damaged_files_are_refused(tmp_path, target):
    folder = changed("llama", tmp_path)
    stored = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(stored[:-100])
    with pytest.raises(UnsupportedModelError, match="truncated or damaged"):
        load_head(str(folder), target)
    (folder / "model.safetensors").write_bytes(stored)
    (folder / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match=r"config\.json cannot be read"):
        load_head(str(folder), target)


def test_head_without_an_embedding_takes_the_targets(tmp_path, target):
    folder = changed("llama", tmp_path, weights=drop("embed_tokens.weight"))
    head, _ = load_head(str(folder), target)
    stored = load_file(f"{target}/model.safetensors")
    assert torch.equal(head.embed_tokens.weight, stored["model.embed_tokens.weight"])
    with pytest.raises(NotFoundError):
        load_head(str(folder), str(tmp_path / "absent"))


def test_model_is_no_head(target):
    with pytest.raises(UnsupportedModelError, match="no head"):
        load_head(target, target)
