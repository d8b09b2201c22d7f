"""Drafters in training: steps are those of drafting; losses and measures are those of closed forms."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from gammaray.errors import InvalidArgumentError
from services.engine.core.model import load_model
from services.train.answers.store import Sequence
from services.train.batches import build_batch
from services.train.evaluate import evaluate
from services.train.head import TrainableHead
from services.train.losses import coupled, loss_of, overlap
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
    (states,) = States(len(drafter.config.taps), drafter.config.layer.hidden_size).of([sequence])
    features = module.fuse(states.roll(shift, 0).float())
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


PROMPT, ANSWER = [5, 6, 7, 8, 9, 5, 6], [7, 8, 3, 4]


class Scripted:
    """A draft model that is right after given positions of the text only."""

    depth = 1
    target_ids = torch.arange(16)
    head = torch.empty(0)

    def __init__(self, *right):
        self.right = right

    def __call__(self, batch):
        logs = torch.full((len(batch.labels), 16), -30.0)
        for row, (place, label) in enumerate(zip(batch.place.tolist(), batch.labels.tolist(), strict=True)):
            logs[row, label if place[1] in self.right else 15] = 0.0
        return logs

    def batch(self, sequences, num_depths):
        return build_batch(sequences, num_depths)

    def common(self, batch, logs):
        wanted = torch.zeros(len(logs), 16)
        wanted[torch.arange(len(logs)), batch.labels] = 0.8
        return wanted, logs

    def eval(self):
        pass

    def train(self):
        pass


def sequence(temperature=0.0):
    ids = torch.tensor(PROMPT + ANSWER).numpy()
    top = ids[len(PROMPT) :, None]
    return Sequence(ids, len(PROMPT), temperature, top, top.astype("float16"))


@pytest.mark.parametrize(
    ("right", "expected"), [((), 4 / 4), ((8, 9), 4 / 3), ((6, 7, 8), 4 / 1), ((6, 8), 4 / 2)]
)
def test_tokens_per_cycle(right, expected):
    found = evaluate(Scripted(*right), [sequence()])
    assert found["tokens_per_cycle"] == round(expected, 3)
    assert found["positions"] == 4


def test_acceptance_by_depth_counts_what_was_tested():
    # Anchors 6 to 9, depth 1: three of four. Depth 2 after 6, 7, 8: two of three. Depth 3 after 6, 7: one.
    # Depth 4 after 6: the text ends there.
    found = evaluate(Scripted(6, 7, 8), [sequence()])
    assert found["greedy"] == [0.75, 0.667, 0.5, 0.0, 0.0]
    assert found["overlap"] == found["coupled"] == [0.6]


P = [0.4, 0.3, 0.15, 0.0, 0.1, 0.05, 0.0, 0.0]
Q = [0.25, 0.05, 0.2, 0.3, 0.0, 0.0, 0.12, 0.08]
TOP = [0, 1, 2]
"""What is stored; what else the two have is apart, so that the lower bounds are exact."""


def stored(p, q, top):
    """Return what the drafters' `common` returns of one prediction."""
    wanted = torch.tensor([[p[token] for token in top]])
    return wanted, torch.tensor([[q[token] for token in top]]).log()


def exact(p, q):
    """Return how often the two take the same token under shared Gumbel noise."""
    tokens = [token for token in range(len(p)) if p[token] and q[token]]
    pairs = list(zip(p, q, strict=True))
    return sum(1 / sum(max(a / p[token], b / q[token]) for a, b in pairs) for token in tokens)


@pytest.mark.parametrize("share", [coupled, overlap])
def test_id_without_a_row_counts_as_never_drafted(share):
    wanted, found = stored(P, Q, TOP)
    wanted[0, 1] = 0  # the drafter has no row for it, and `found` holds another row's value
    without = [Q[0], 0.0, Q[2], Q[1] + Q[3], *Q[4:]]  # all that a drafter gives is given to its rows
    expected = exact(P, without) if share is coupled else sum(map(min, P, without))
    found[0, 1] = -0.1
    assert share(wanted, found).item() == pytest.approx(expected, abs=1e-6)


def test_loss_is_the_share_that_is_rejected():
    divergence = loss_of("kl", *stored(P, Q, TOP)).item()
    expected = 1 - exact(P, Q) + 0.1 * divergence
    assert loss_of("coupled", *stored(P, Q, TOP)).item() == pytest.approx(expected, abs=1e-6)


def test_impossible_tokens_leave_gradients_finite():
    wanted = torch.tensor([[1.0, 0.0, 1e-38]])
    found = torch.tensor([[-200.0, -1e4, 0.0]], requires_grad=True)
    loss_of("coupled", wanted, found).sum().backward()
    assert found.grad.isfinite().all()
