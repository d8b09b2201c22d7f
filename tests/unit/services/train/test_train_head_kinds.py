"""`gammaray train --kind medusa|eagle1|dflash`: learns, resumes, and serves what it predicted."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from gammaray.errors import FailedPreconditionError, InvalidArgumentError
from services.demo_pair import TARGET_DIR
from services.engine.core.model import load_model
from services.engine.engine import SequenceInput
from services.engine.loader import load_engine
from services.heads.block_runners import dflash_engine, medusa_engine
from services.heads.dflash_formats import load_dflash
from services.heads.loading import load_head
from services.heads.medusa_formats import load_medusa
from services.heads.runner import head_engine
from services.train.answers.states import StateStore
from services.train.answers.store import AnswerStore
from services.train.dflash import DFlashDrafter
from services.train.eagle1 import Eagle1Drafter
from services.train.medusa import MedusaDrafter
from services.train.run import run
from tests.support.engine_helpers import tiny_model
from tests.support.train_helpers import losses, make_sequence, make_task, overlaps, run_until

pytestmark = pytest.mark.slow

NUM_LAYERS, DEPTH = 16, 3
TAPS = {"medusa": (NUM_LAYERS,), "eagle1": (NUM_LAYERS,), "dflash": (2, 8, 13, 15)}
LOADERS = {"medusa": load_medusa, "eagle1": load_head, "dflash": load_dflash}
ENGINES = {"medusa": medusa_engine, "eagle1": head_engine, "dflash": dflash_engine}


@pytest.fixture(scope="module", params=["medusa", "eagle1", "dflash"])
def trained(request, tmp_path_factory):
    """A head after some steps: its kind and folder, and what was told before and after an interruption."""
    folder = tmp_path_factory.mktemp(request.param)
    task = make_task(folder, kind=request.param, minutes=0.7, unroll=2, steps_per_report=10)
    first, done = run_until(task, "steps 10 ")
    assert not done
    second = []
    assert run(task, second.append, lambda: False)
    return request.param, folder, first, second


def drafter_of(kind, folder):
    """Return the drafter with the trained weights, and a sequence of the answers."""
    answers, drafter_dir = folder / "work" / "answers", str(folder / "drafter")
    identity = json.loads((answers / "meta.json").read_text())
    identity = {key: identity[key] for key in ("target", "tokenizer")}
    store = AnswerStore(answers, identity, 32, 2048)
    sequence = next(one for one in store.sequences() if len(one.token_ids) - one.num_prompt > 12)
    target = load_model(str(TARGET_DIR), device="cpu", dtype="float32").module
    states = StateStore(folder, identity, target, TAPS[kind], store.num_tokens, len(store))
    if kind == "eagle1":
        drafter = Eagle1Drafter(target, TAPS[kind], torch.arange(2048), DEPTH, states)
    else:
        ids = LOADERS[kind](drafter_dir, str(TARGET_DIR))[1]
        make = MedusaDrafter if kind == "medusa" else DFlashDrafter
        drafter = make(target, TAPS[kind], ids, DEPTH, states)
    drafter.start_from(drafter_dir, str(TARGET_DIR))
    return drafter.eval(), sequence


def test_training_learns_and_resumes(trained):
    kind, folder, first, second = trained
    assert re.match("continues at step 1[01]", second[0])
    assert losses(second)[-1] < losses(first)[0]
    assert len(overlaps(second)[-1]) == DEPTH
    assert overlaps(second)[-1][0] > overlaps(first)[0][0] + 0.05
    config = json.loads((folder / "drafter" / "config.json").read_text())
    names = set(load_file(folder / "drafter" / "model.safetensors"))
    assert not names & {"feature_norm.weight", "embed_tokens.weight"}
    if kind == "dflash":
        assert config["speculators_model_type"] == "dflash"
        assert (config["block_size"], config["draft_vocab_size"]) == (DEPTH, 512)
        assert config["aux_hidden_state_layer_ids"] == list(TAPS[kind])
        assert {"d2t", "lm_head.weight", "layers.1.self_attn.q_norm.weight"} < names
    elif kind == "medusa":
        assert (config["model_type"], config["num_heads"], config["truncated_vocab_size"]) == (
            "medusa",
            3,
            512,
        )
        assert "token_map" in names
    else:
        assert (config["num_hidden_layers"], config["bias"]) == (1, True)
        assert {"fc.weight", "fc.bias"} < names
        assert not names & {"lm_head.weight", "embed_tokens.weight"}
    card = json.loads((folder / "drafter" / "gammaray.json").read_text())["measured"]
    assert len(card["greedy"]) == DEPTH
    assert "held-out" in (folder / "drafter" / "README.md").read_text()


def test_head_serves_what_was_trained(trained):
    """Its logits in the engine, on the target's tapped states, are those of the training."""
    kind, folder, _, _ = trained
    drafter, sequence = drafter_of(kind, folder)
    batch = drafter.batch([sequence], keep=1.0)
    with torch.no_grad():
        expected = drafter(batch)
    engine = load_engine(str(TARGET_DIR))
    engine.tap(TAPS[kind])
    token_ids = sequence.token_ids.tolist()
    engine.step([SequenceInput("t", 0, token_ids, 1)])
    loaded = LOADERS[kind](str(folder / "drafter"), str(TARGET_DIR))
    serving = ENGINES[kind](*loaded, name="head", max_context=512)
    serving.keep_reduced()
    features = serving.fuse(engine.taps[0])

    def served(anchor, depth, features):
        serving.release("s")
        if kind == "dflash":
            block = [token_ids[anchor], *[serving.mask_token] * (DEPTH - 1)]
            feed = SequenceInput("s", 0, token_ids[:anchor] + block, DEPTH, features=features[:anchor])
            return serving.step([feed])[0][depth - 1].log_softmax(-1)
        if kind == "medusa":
            serving.skip("s", token_ids[:anchor])
            masked = [token_ids[anchor], *[serving.mask_token] * (depth - 1)]
            feed = SequenceInput("s", anchor, masked, depth, features=features[anchor - 1 : anchor])
            return serving.step([feed])[0][-1].log_softmax(-1)
        serving.skip("s", token_ids[:1])
        feed = SequenceInput("s", 1, token_ids[1 : anchor + 1], 1, features=features[:anchor])
        made = serving.step([feed])[0]
        for position in range(anchor + 1, anchor + depth):
            made = serving.step([SequenceInput("s", position, [token_ids[position]], 1)])[0]
        return made[0].log_softmax(-1)

    chosen = list(zip(batch.place.tolist(), expected, strict=True))[::7]
    assert {depth for (_, _, depth), _ in chosen} == {1, 2, 3}
    # Stored states have half the precision of the engine's.
    assert all(
        (served(anchor, depth, features) - rows).abs().max() < 0.1 for (_, anchor, depth), rows in chosen
    )
    for shift in (1, -1):  # features of the position before or after
        assert any(
            (served(anchor, depth, features.roll(shift, 0)) - rows).abs().max() > 0.4
            for (_, anchor, depth), rows in chosen
        )


def test_training_goes_on_from_a_trained_head(trained, tmp_path):
    kind, folder, _, _ = trained
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "answers").symlink_to(folder / "work" / "answers")
    changes = {"kind": kind, "init": str(folder / "drafter"), "steps_per_report": 10}
    told, _ = run_until(make_task(tmp_path, **changes), "tokens_per_cycle")
    begun = next(iter(overlaps(told)))
    saved = json.loads((folder / "drafter" / "gammaray.json").read_text())["measured"]["overlap"]
    assert begun == pytest.approx(saved, abs=0.02)
    if kind != "eagle1":
        (tmp_path / "work" / "state.pt").unlink()
        other = {"medusa": "4 heads of 2 layers", "dflash": "a block of 4 tokens"}[kind]
        with pytest.raises(InvalidArgumentError, match=rf"init: got .* {other}"):
            run(make_task(tmp_path, depth=4, **changes), print, lambda: False)


@pytest.mark.parametrize("kind", ["medusa", "eagle1"])
@pytest.mark.parametrize("layers", [(2,), (2, NUM_LAYERS)])
def test_other_states_are_refused(kind, layers, tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"layers: .*last state"):
        run(make_task(tmp_path, kind=kind, layers=layers), print, lambda: False)


@pytest.mark.parametrize("kind", [MedusaDrafter, Eagle1Drafter])
def test_target_with_another_norm_is_refused(kind, tmp_path):
    target = load_model(str(tiny_model("gemma2", tmp_path)), device="cpu", dtype="float32").module
    with pytest.raises(FailedPreconditionError, match="model_type gemma2"):
        kind(target, (3,), torch.arange(10), 2, None)


def test_rows_of_the_state_before_the_anchor_are_read(tmp_path):
    """A change of any other state changes no prediction of Medusa's heads."""
    target = load_model(str(tiny_model("llama", tmp_path)), device="cpu", dtype="float32").module
    torch.manual_seed(0)

    class States:
        def of(self, sequences):
            return [torch.randn(len(one.token_ids), 1, 32).bfloat16() for one in sequences]

    drafter = MedusaDrafter(target, (3,), torch.arange(0, 64, 2), DEPTH, States())
    for parameter in drafter.module.blocks.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    batch = drafter.batch([make_sequence(0, 4, 9)], keep=1.0)
    logs = drafter(batch)
    batch.states[0, 6] += 1.0
    is_changed = (drafter(batch) - logs).abs().amax(-1) > 1e-4
    assert torch.equal(is_changed, batch.place[:, 1] == 7)


@pytest.mark.parametrize(
    ("options", "field"),
    [({"layers": (2, NUM_LAYERS)}, "layers"), ({"depth": 1}, "depth")],
)
def test_shapes_that_dflash_cannot_have_are_refused(options, field, tmp_path):
    with pytest.raises(InvalidArgumentError, match=rf"{field}: .*allowed"):
        run(make_task(tmp_path, kind="dflash", **options), print, lambda: False)


def test_dflash_blocks_see_the_states_before_their_anchor(tmp_path):
    """A change of a state changes the predictions of later anchors, one of a token those of its block."""
    target = load_model(str(tiny_model("llama", tmp_path)), device="cpu", dtype="float32").module
    torch.manual_seed(0)

    class States:
        def of(self, sequences):
            return [torch.randn(len(one.token_ids), 2, 32).bfloat16() for one in sequences]

    drafter = DFlashDrafter(target, (1, 2), torch.arange(0, 64, 2), DEPTH, States()).eval()
    batch = drafter.batch([make_sequence(0, 4, 9), make_sequence(1, 3, 5)], keep=1.0)
    number, anchor, _ = batch.place.unbind(1)
    with torch.no_grad():
        logs = drafter(batch)
        batch.states[0, 6] += 1.0
        changed = (drafter(batch) - logs).abs().amax(-1) > 1e-5
        assert torch.equal(changed, (number == 0) & (anchor > 6))
        logs = drafter(batch)
        batch.token_ids[0, 7] = (batch.token_ids[0, 7] + 1) % 64
        changed = (drafter(batch) - logs).abs().amax(-1) > 1e-5
        assert torch.equal(changed, (number == 0) & (anchor == 7))


def test_dflash_trains_some_blocks_whole(tmp_path):
    target = load_model(str(tiny_model("llama", tmp_path)), device="cpu", dtype="float32").module

    class States:
        def of(self, sequences):
            return [torch.zeros(len(one.token_ids), 2, 32).bfloat16() for one in sequences]

    drafter = DFlashDrafter(target, (1, 2), torch.arange(0, 64, 2), DEPTH, States())
    sequence = make_sequence(0, 4, 60)
    every = drafter.batch([sequence], keep=1.0).place[:, 1:].tolist()
    some = drafter.batch([sequence], generator=torch.Generator().manual_seed(1)).place[:, 1:].tolist()
    anchors = {anchor for anchor, _ in some}
    assert 10 < len(anchors) < 50
    begin = min(anchors)
    assert sorted(some) == sorted(pair for pair in every if pair[0] in anchors and pair[0] >= begin)


def test_eagle_1_learns_the_next_state_and_the_next_token(tmp_path):
    target = load_model(str(tiny_model("llama", tmp_path)), device="cpu", dtype="float32").module
    sequence = make_sequence(0, 4, 9, vocab=97)
    states = torch.randn(13, 1, 32).bfloat16()

    class States:
        def of(self, sequences):
            return [states for _ in sequences]

    drafter = Eagle1Drafter(target, (3,), torch.arange(97), DEPTH, States())
    batch = drafter.batch([sequence])
    features = drafter.module.fuse(states.float())

    def attend(query, key, value):
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2)

    tokens = torch.from_numpy(sequence.token_ids.astype("int64"))[None]
    hidden, _ = drafter.module(tokens[:, 1:], features[None, :-1], torch.arange(1, 13)[None], attend)
    rows = batch.place[:, 1] - 1
    wanted, found = drafter.common(batch, drafter(batch))
    of_tokens = -(wanted * found).sum(-1).mean()
    for shift in (0, 1, 2):
        next_states = features[(rows + shift).clamp_max(12)]
        expected = F.smooth_l1_loss(hidden[0, rows], next_states) + 0.1 * of_tokens
        assert torch.isclose(drafter.loss(batch, "kl"), expected, atol=1e-5) == (shift == 1)
