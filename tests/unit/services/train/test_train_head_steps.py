"""A head in training computes what it computes when it drafts, token after token, whatever it sees first."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from gammaray.errors import InvalidArgumentError
from services.engine.core.model import load_model
from services.train.head import TrainableHead
from tests.support.engine_helpers import tiny_model
from tests.support.train_helpers import make_sequence

IDENTITY = {"target": "t", "tokenizer": "t"}


class States:
    """Made-up states, a function of the sequence's number."""

    def __init__(self, taps, size):
        self._shape = (taps, size)

    def of(self, sequences):
        return [
            torch.randn(
                len(one.token_ids), *self._shape, generator=torch.Generator().manual_seed(one.number)
            ).bfloat16()
            for one in sequences
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("target"))


def make_drafter(folder, taps=(1, 2)):
    target = load_model(str(folder), device="cpu", dtype="float32").module
    torch.manual_seed(0)
    states = States(len(taps), target.config.hidden_size)
    drafter = TrainableHead(target, taps, torch.arange(0, 64, 2), states.of)
    for name in ("o_proj", "down_proj"):  # nearly silent at first
        part = drafter.module.layers[0]
        (part.self_attn if name == "o_proj" else part.mlp).get_submodule(name).weight.data.mul_(10)
    return drafter


def states_of(drafter, sequence):
    return States(len(drafter.config.taps), drafter.config.hidden_size).of([sequence])[0]


class Cache:
    """Attention over all that was fed before, one row at a time."""

    def __init__(self):
        self.keys, self.values = [], []

    def __call__(self, query, key, value):
        self.keys.append(key)
        self.values.append(value)
        keys, values = torch.cat(self.keys, 2), torch.cat(self.values, 2)
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True).transpose(1, 2)


def drafted(drafter, sequence, start, anchor, depth, shift=0):
    """Return the log-probabilities of the token at anchor + depth, computed row by row from `start` on."""
    module, attend = drafter.module, Cache()
    states = states_of(drafter, sequence).roll(shift, 0)
    features = module.fuse(states.float())
    token_ids = torch.from_numpy(sequence.token_ids.astype("int64"))
    feature = None
    for position in range(start + 1, anchor + depth):
        given = features[None, position - 1 : position] if position <= anchor else feature
        hidden, feature = module(
            token_ids[None, position : position + 1], given, torch.tensor([[position]]), attend
        )
    return module.logits(hidden)[0, 0].log_softmax(-1)


@torch.no_grad()
@pytest.mark.parametrize("is_windowed", [False, True])
def test_steps_of_training_are_those_of_drafting(folder, is_windowed):
    drafter = make_drafter(folder)
    sequences = [make_sequence(0, 4, 9), make_sequence(1, 2, 12), make_sequence(2, 6, 8)]
    generator = torch.Generator().manual_seed(1) if is_windowed else None
    batch = drafter.batch(sequences, 3, generator)
    assert bool(batch.starts.any()) == is_windowed
    places = batch.place.tolist()
    assert {depth for _, _, depth in places} == {1, 2, 3}
    found, wrong = drafter(batch), {1: 0, -1: 0}
    for (number, anchor, depth), rows, label in zip(places, found, batch.labels.tolist(), strict=True):
        sequence, start = sequences[number], int(batch.starts[number])
        assert label == sequence.token_ids[anchor + depth]
        assert torch.allclose(rows, drafted(drafter, sequence, start, anchor, depth), atol=1e-5)
        for shift in wrong:
            wrong[shift] += not torch.allclose(
                rows, drafted(drafter, sequence, start, anchor, depth, shift), atol=1e-2
            )
    assert all(count > 0.9 * len(places) for count in wrong.values())


def test_training_starts_from_a_head(folder, tmp_path):
    first, then = make_drafter(folder), make_drafter(folder)
    first.target_ids.copy_(torch.arange(1, 64, 2))
    for parameter in first.module.parameters():
        parameter.data.copy_(torch.randn_like(parameter).bfloat16())
    first.save(tmp_path, IDENTITY, "tiny", {})
    then.start_from(str(tmp_path), str(folder))
    assert torch.equal(then.target_ids, first.target_ids)
    assert then.row_of[1] == 0
    assert then.row_of[0] == -1
    named = dict(then.module.named_parameters())
    assert all(torch.equal(value, named[key]) for key, value in first.module.named_parameters())


@pytest.mark.parametrize("change", ["taps", "flag"])
def test_head_of_another_shape_is_no_start(folder, tmp_path, change):
    first, then = make_drafter(folder), make_drafter(folder)
    if change == "taps":
        first = make_drafter(folder, taps=(0, 2))
    if change == "flag":
        first.config = replace(first.config, norm_before_residual=True)
    first.save(tmp_path, IDENTITY, "tiny", {})
    with pytest.raises(
        InvalidArgumentError, match=r"init: .*a head of its kind on layers \[1, 2\] with 32 tokens"
    ):
        then.start_from(str(tmp_path), str(folder))
