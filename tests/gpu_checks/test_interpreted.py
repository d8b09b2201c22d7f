"""Every kernel in Triton's interpreter, by type, width of heads and group, against float32 and plain torch.

A step on the kernels may be about as far from the same step in float32 as one of torch's operations in the
kernels' type; a wrong slot, mask or head is far from both.
"""

from __future__ import annotations

import itertools
import os
import warnings
from dataclasses import fields, replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from services.engine.core.batch import GREEDY, GumbelDraw
from services.engine.core.model import load_model
from services.engine.cuda.torch_kernels import TorchKernels
from services.engine.cuda.weights import GraphLayer, GraphModel, GraphShape, has_graph_path
from services.engine.engine import SequenceInput
from services.engine.graph_engine import GraphEngine
from tests.support.engine_helpers import tiny_model

interpreted = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs in Triton's interpreter; to enable: make gpu-checks",
)
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
HIDDEN, INNER, VOCAB = 64, 96, 259
CACHED = 290
"""Cached tokens, in two splits of the kernels."""


@pytest.fixture(autouse=True)
def exact_dot(monkeypatch):
    """Make the interpreter right for bfloat16, and each sum of a product independent of other rows.

    Its product takes bfloat16 for integers, and sums in an order that depends on the shape, as numpy's does;
    its conversion to bfloat16 cuts digits off, where a card rounds.
    """
    if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    def wide(operand):
        if operand.dtype.scalar == tl.bfloat16:
            return (operand.data.astype(np.uint32) << 16).view(np.float32)
        return operand.data.astype(np.float32)

    def create_dot(_self, a, b, d, *_options):
        # The products of a sum one after another, whatever the other rows and columns are.
        found = d.data.astype(np.float32)
        left, right = wide(a), wide(b)
        for inner in range(left.shape[1]):
            found = found + left[:, inner : inner + 1] * right[inner : inner + 1]
        return interpreter.TensorHandle(found.astype(d.data.dtype), d.dtype.scalar)

    def create_fp_trunc(self, source, wanted):
        if source.dtype.scalar == tl.float32 and wanted.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(BF16).view(torch.int16)
            return interpreter.TensorHandle(rounded.numpy().view(np.uint16), wanted.scalar)
        return self.cast_impl(source, wanted)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fp_trunc", create_fp_trunc)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns about infinities under masks
        yield


def make_model(dtype, dim, group, kv_heads, *, has_bias=False, has_norm=False) -> GraphModel:
    """Return one random layer in a type."""
    torch.manual_seed(dim + group)

    def weight(*sizes):
        return (torch.randn(*sizes) * sizes[-1] ** -0.5).to(dtype)

    def norm(*sizes):
        return (1 + 0.1 * torch.randn(*sizes)).to(dtype)

    heads = group * kv_heads
    shape = GraphShape(HIDDEN, INNER, heads, kv_heads, dim, dim**-0.5, 1e-5, VOCAB)
    layer = GraphLayer(
        attention_norm=norm(HIDDEN),
        qkv=weight(shape.num_qkv_heads * dim, HIDDEN),
        qkv_bias=weight(shape.num_qkv_heads * dim) if has_bias else None,
        out=weight(HIDDEN, heads * dim),
        out_bias=weight(HIDDEN) if has_bias else None,
        mlp_norm=norm(HIDDEN),
        gate_up=weight(2 * INNER, HIDDEN),
        down=weight(HIDDEN, INNER),
        head_norm=norm(2, dim) if has_norm else None,
    )
    angles = torch.arange(512)[:, None] * 1e4 ** (-torch.arange(0, dim // 2) / (dim // 2))
    rotation = torch.stack((angles.cos(), angles.sin())).contiguous()
    return GraphModel(
        shape,
        (layer,),
        torch.randn(VOCAB, HIDDEN).to(dtype),
        norm(HIDDEN),
        3 * weight(VOCAB, HIDDEN),
        rotation,
    )


def in_float32(model: GraphModel) -> GraphModel:
    """Return the same numbers in float32."""

    def wide(part):
        return part.float() if isinstance(part, torch.Tensor) else part

    (layer,) = model.layers
    made = GraphLayer(**{field.name: wide(getattr(layer, field.name)) for field in fields(GraphLayer)})
    return replace(
        model,
        layers=(made,),
        embedding=model.embedding.float(),
        last_norm=model.last_norm.float(),
        head=model.head.float(),
    )


def engines(model: GraphModel) -> list[GraphEngine]:
    """Return Triton's kernels, torch's operations in the same type, and torch's in float32.

    All have the same long prompt, which torch's operations read: the interpreter would take minutes.
    """
    from services.engine.cuda.triton_kernels import TritonKernels

    made = [GraphEngine.of(one, name="check") for one in (model, model, in_float32(model))]
    text = tokens(CACHED, 1)
    for engine in made:
        assert isinstance(engine.runner.kernels, TorchKernels)
        engine.step([SequenceInput("long", 0, text, 0)])
    made[0].runner.kernels = TritonKernels(model)
    return made


def tokens(count, seed):
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


CASES = {
    "float32, 64 wide, one head a group, biases": (F32, 64, 1, 3, {"has_bias": True}),
    "float16, 128 wide, groups of 3, norms": (F16, 128, 3, 2, {"has_norm": True}),
    "bfloat16, 64 wide, groups of 7, biases": (BF16, 64, 7, 1, {"has_bias": True}),
    "bfloat16, 128 wide, groups of 8": (BF16, 128, 8, 1, {}),
    "float32, 256 wide, groups of 4, norms": (F32, 256, 4, 1, {"has_norm": True}),
    "float16, 256 wide, one head a group": (F16, 256, 1, 2, {}),
}


def assert_as_exact(made, feeds, name=""):
    """Compare a step of `engines` with float32."""
    own, torch_own, exact = (torch.cat(engine.step(feeds)) for engine in made)
    assert own.isfinite().all()
    error, usual = (own - exact).abs(), (torch_own - exact).abs()
    assert error.mean() <= 1.5 * usual.mean() + 1e-5, name
    assert error.max() <= 2 * usual.max() + 1e-4, name


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_steps_are_as_exact_as_those_of_torch(case):
    dtype, dim, group, kv_heads, options = CASES[case]
    made = engines(make_model(dtype, dim, group, kv_heads, **options))
    steps = {
        "a row behind two splits": [SequenceInput("long", CACHED, tokens(1, 2), 1)],
        "a chain across the splits, and two sessions": [
            SequenceInput("long", 250, tokens(8, 3), 5),
            SequenceInput("a", 0, tokens(3, 4), 3),
            SequenceInput("b", 0, tokens(2, 5), 1),
        ],
        "a tree, and a chain": [
            SequenceInput("long", 256, tokens(7, 6), 7, (-1, -1, 0, 0, 1, 3)),
            SequenceInput("a", 3, tokens(1, 7), 1),
        ],
        "17 rows": [SequenceInput("c", 0, tokens(17, 8), 17)],
    }
    for name, feeds in steps.items():
        assert_as_exact(made, feeds, name)


@interpreted
@pytest.mark.parametrize("splits", [8, 4])
def test_steps_of_many_rows_are_as_exact_with_longer_splits(splits, monkeypatch):
    from services.engine.cuda import triton_kernels

    monkeypatch.setattr(triton_kernels, "MAX_LONG_SPLITS", splits)  # of 256 or 512 slots
    made = engines(make_model(BF16, 64, 2, 1))
    feeds = [SequenceInput("long", CACHED, tokens(38, 13), 3), SequenceInput("a", 0, tokens(2, 14), 1)]
    assert_as_exact(made, feeds)


@interpreted
def test_draws_and_drafts_are_those_of_torch():
    made = engines(make_model(F32, 64, 2, 2))[:2]
    draws = [GumbelDraw(2**63 + 11), GumbelDraw(5, 3, 0.7), GREEDY]
    feeds = [
        SequenceInput(name, 0, tokens(count, count), 1) for name, count in (("d", 5), ("e", 3), ("f", 1))
    ]
    chosen = [engine.choose(feeds, draws) for engine in made]
    assert chosen[0] == chosen[1]
    more = [
        SequenceInput("d", 5, [1], 1),
        SequenceInput("long", CACHED, [2], 1),
        SequenceInput("f", 1, [3], 1),
    ]
    drafts = [engine.draft(more, draws, 3, num_guesses=3) for engine in made]
    tokens_of = [[[draft.token_id for draft in own] for own in found] for found in drafts]
    assert tokens_of[0] == tokens_of[1]
    assert len({tuple(own) for own in tokens_of[0]}) == 3
    for own, others in zip(itertools.chain(*drafts[0]), itertools.chain(*drafts[1]), strict=True):
        assert [token for token, _ in own.guesses] == [token for token, _ in others.guesses]
        shares = [[share for _, share in draft.guesses] for draft in (own, others)]
        assert shares[0] == pytest.approx(shares[1], rel=1e-3)


@interpreted
def test_long_chunks_beside_short_sessions_are_as_exact(monkeypatch):
    """A step that is not captured: attention of the short sessions in two launches, the chunks' by torch."""
    from services.engine.cuda import tables

    monkeypatch.setattr(tables, "MAX_TILED_ROWS", 6)
    made = engines(make_model(BF16, 64, 2, 1))
    feeds = [
        SequenceInput("a", 0, tokens(3, 21), 2),
        SequenceInput("b", 0, tokens(2, 22), 0),
        SequenceInput("long", CACHED - 4, tokens(9, 23), 3),
        SequenceInput("c", 0, tokens(4, 24), 4, (-1, -1, 0)),
        SequenceInput("d", 0, tokens(8, 25), 8, (-1, -1, 0, 1, 1, 2)),
    ]
    assert_as_exact(made, feeds)
    assert made[0].runner.programs == {}


@interpreted
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_row_has_the_same_bits_whatever_comes_with_it(dtype):
    engine = engines(make_model(dtype, 64, 2, 2))[0]
    text = tokens(7, 11)
    alone = [engine.step([SequenceInput("a", at, text[at : at + 1], 1)])[0].clone() for at in range(7)]
    engine.step([SequenceInput("b", 0, text[:2], 0)])
    many = engine.step([SequenceInput("b", 2, text[2:], 5), SequenceInput("c", 0, tokens(14, 12), 1)])[0]
    assert torch.equal(torch.cat(alone[2:]), many)


@interpreted
def test_a_wrong_slot_is_found(monkeypatch):
    """The check above fails when a kernel sees one slot too many."""
    from services.engine.cuda.triton_kernels import TritonKernels

    original = TritonKernels.attend

    def attend(self, qkv, layer, tables, scratch, mixed):
        original(self, qkv, layer, replace(tables, prefix=tables.prefix - 1), scratch, mixed)

    monkeypatch.setattr(TritonKernels, "attend", attend)
    with pytest.raises(AssertionError):
        test_steps_are_as_exact_as_those_of_torch("float16, 128 wide, groups of 3, norms")


@interpreted
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_with_a_bad_best_are_marked(bad):
    for engine in engines(make_model(F32, 64, 1, 1))[:2]:
        engine.choose([SequenceInput("a", 0, [1, 2], 2)], [GREEDY])
        program, kernels = list(engine.runner.programs.values())[-1], engine.runner.kernels
        logits = torch.zeros_like(program.buffers.logits)
        logits[0, 5] = 1.0
        logits[1, :] = bad
        if bad != float("-inf"):
            logits[1, 1:] = 2.0  # one bad score of a row is enough
        with torch.inference_mode():
            kernels.stripes(logits, program.tables, program.buffers.stripes)
            kernels.pick(program.buffers.stripes, program.buffers.tokens)
        assert program.buffers.tokens.tolist() == [5, -1]


@pytest.mark.parametrize("dim", [80, 96])
def test_heads_that_are_no_power_of_two_take_the_general_path(dim, tmp_path):
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1}
    wide = tiny_model("llama", tmp_path / "wide", head_dim=dim, **sizes)
    assert not has_graph_path(load_model(str(wide), device="cpu"))
    usual = tiny_model("llama", tmp_path / "usual", head_dim=64, **sizes)
    assert has_graph_path(load_model(str(usual), device="cpu"))
