"""Triton kernels of norms, products and draws."""

# Triton's decorators have no types.
# mypy: allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["norm_kernel", "pick_kernel", "product_kernel", "stripe_kernel"]


@triton.jit
def norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    epsilon: tl.tensor,
    size: tl.tensor,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row of `out`: RMSNorm of x [any, size] float32."""
    target = tl.program_id(0)
    row = target
    if HAS_ROWS:
        row = tl.maximum(tl.load(rows + target), 0).to(tl.int32)  # a spare one takes some row
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row * size + column, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(value * value, 0) / size + epsilon)
    value = value * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + target * size + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    GATES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """One program per TILE outputs, all rows: x W^T (+ b), added to `out`, or silu(x G^T) * (x U^T).

    TILE stays below 64, so that all numbers of rows take the same kind of matrix instruction.
    """
    output = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.arange(0, ROWS)
    step = tl.arange(0, DEPTH)
    is_output, is_row = output < num_outputs, row < num_rows
    # Clamped and not masked: whole vectors without a mask, and nothing wrong is stored below.
    source = tl.minimum(output, num_outputs - 1).to(tl.int64)
    weights = weight + source[:, None] * SIZE + step[None, :]
    inputs = x + row[None, :] * SIZE + step[:, None]
    total = tl.zeros([TILE, ROWS], dtype=tl.float32)
    raised = tl.zeros([TILE, ROWS], dtype=tl.float32)
    for start in range(0, SIZE, DEPTH):
        block = tl.load(inputs + start, mask=is_row[None, :], other=0.0)
        matrix = tl.load(weights + start)
        total = tl.dot(matrix, block, total, input_precision="ieee")
        if GATES:
            upper = tl.load(weights + num_outputs.to(tl.int64) * SIZE + start)
            raised = tl.dot(upper, block, raised, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    if GATES:
        total = total / (1.0 + tl.exp(-total)) * raised
    target = out + row[None, :] * num_outputs + output[:, None]
    inside = is_output[:, None] & is_row[None, :]
    if ADDS:
        total += tl.load(target, mask=inside, other=0.0)
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def stripe_kernel(
    logits: tl.tensor,
    wanted: tl.tensor,
    session_of: tl.tensor,
    position_of: tl.tensor,
    seed_of: tl.tensor,
    sample_of: tl.tensor,
    is_drawn_of: tl.tensor,
    inverse_temperature_of: tl.tensor,
    sharpness_of: tl.tensor,
    score: tl.tensor,
    token: tl.tensor,
    mass: tl.tensor,
    vocab_size: tl.tensor,
    STRIPE: tl.constexpr,
) -> None:
    """One program per wanted row and stripe: perturb its logits and keep the best, lowest id on ties."""
    index, stripe = tl.program_id(0), tl.program_id(1)
    row = tl.load(wanted + index)
    if row < 0:
        return
    session = tl.load(session_of + row)
    inverse_temperature = tl.load(inverse_temperature_of + session)
    lane = tl.arange(0, 4)
    group = stripe * (STRIPE // 4) + tl.arange(0, STRIPE // 4)
    token_id = group[:, None] * 4 + lane[None, :]
    inside = token_id < vocab_size
    value = tl.load(logits + index.to(tl.int64) * vocab_size + token_id, mask=inside, other=float("-inf"))
    value = value.to(tl.float64) * inverse_temperature
    if tl.load(is_drawn_of + session) != 0:
        # Of `services.engine.sampling.noise`: counter [group, position, sample, stream 0], a word per lane.
        position = (tl.load(position_of + row) + 1).to(tl.uint32)
        sample = tl.load(sample_of + session).to(tl.uint32)
        zero = tl.zeros_like(group).to(tl.uint32)
        first, second, third, fourth = tl.philox(
            tl.load(seed_of + session), group.to(tl.uint32), zero + position, zero + sample, zero, 10
        )
        word = tl.where(
            lane[None, :] < 2,
            tl.where(lane[None, :] == 0, first[:, None], second[:, None]),
            tl.where(lane[None, :] == 2, third[:, None], fourth[:, None]),
        )
        # 1 - (word + 0.5) / 2^32 is exact in float64, so its logarithm is precise near 1 as well.
        above = (4294967295.0 - word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
        value -= tl.log(-tl.log(above))
    best = tl.max(tl.max(value, 1), 0)
    # The largest of several numbers leaves out those that are none.
    num_bad = tl.sum(tl.sum((inside & (value != value)).to(tl.int32), 1), 0)
    # No number among them: some token, and never one outside the vocabulary.
    chosen = tl.where(value == best, token_id, vocab_size - 1)
    place = index.to(tl.int64) * tl.num_programs(1) + stripe
    tl.store(score + place, tl.where(num_bad > 0, float("nan"), best))
    tl.store(token + place, tl.min(tl.min(chosen, 1), 0).to(tl.int64))
    weight = tl.exp(((value - best) * tl.load(sharpness_of + session)).to(tl.float32))
    tl.store(mass + place, tl.sum(tl.sum(tl.where(inside, weight, 0.0), 1), 0))


@triton.jit
def pick_kernel(
    score: tl.tensor,
    token: tl.tensor,
    chosen: tl.tensor,
    num_stripes: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row: the token of the best stripe, the lowest on ties; -1 without a finite score."""
    row = tl.program_id(0)
    stripe = tl.arange(0, BLOCK)
    inside = stripe < num_stripes
    value = tl.load(score + row * num_stripes + stripe, mask=inside, other=float("-inf"))
    token_id = tl.load(token + row * num_stripes + stripe, mask=inside, other=0)
    best = tl.max(value, 0)
    token_id = tl.min(tl.where(inside & (value == best), token_id, 2147483647), 0)
    # The largest of several numbers leaves out those that are none.
    num_bad = tl.sum((inside & (value != value)).to(tl.int32), 0)
    is_good = (num_bad == 0) & (tl.abs(best) < float("inf"))
    tl.store(chosen + row, tl.where(is_good, token_id, -1))
