"""Triton kernels of attention: rotation and cache writes, attention by splits, and their combination.

A session's pages are found by their distance from `anchor` in numbers; see `Tables.page`. What is spare in
the tables of a captured step does nothing. A page's layout is
[layers, 2 * KV_HEADS, PAGE, DIM], key heads before value heads.
"""

# Triton's decorators have no types.
# mypy: allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["combine_kernel", "rotate_kernel", "split_kernel"]


@triton.jit(do_not_specialize=["layer"])
def rotate_kernel(
    qkv: tl.tensor,
    rotation: tl.tensor,
    head_norm: tl.tensor,
    anchor: tl.tensor,
    page: tl.tensor,
    first_page_of: tl.tensor,
    position_of: tl.tensor,
    slot_of: tl.tensor,
    session_of: tl.tensor,
    layer: tl.tensor,
    max_context: tl.tensor,
    epsilon: tl.tensor,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
) -> None:
    """One program per row and head: norm and rotate queries in place, keys and values into the cache."""
    row, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_of + row)
    column = tl.arange(0, HALF)
    source = qkv + (row.to(tl.int64) * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF + column
    low, high = tl.load(source), tl.load(source + HALF)
    if head < HEADS + KV_HEADS:
        left, right = low.to(tl.float32), high.to(tl.float32)
        if HAS_NORM:
            weight = head_norm + tl.where(head < HEADS, 0, 2 * HALF) + column
            mean = (tl.sum(left * left, 0) + tl.sum(right * right, 0)) / (2 * HALF)
            scale = tl.rsqrt(mean + epsilon)
            left = left * scale * tl.load(weight).to(tl.float32)
            right = right * scale * tl.load(weight + HALF).to(tl.float32)
        turn = rotation + tl.load(position_of + row) * HALF + column
        cos, sin = tl.load(turn), tl.load(turn + max_context.to(tl.int64) * HALF)
        low = (left * cos - right * sin).to(qkv.dtype.element_ty)
        high = (right * cos + left * sin).to(qkv.dtype.element_ty)
    if head < HEADS:
        tl.store(source, low)
        tl.store(source + HALF, high)
    elif slot >= 0:
        session = tl.load(session_of + row)
        place = layer.to(tl.int64) * 2 * KV_HEADS + (head - HEADS)
        place = (place * PAGE + slot % PAGE) * 2 * HALF
        first_page = tl.load(first_page_of + session)
        target = anchor + tl.load(page + first_page + slot // PAGE) + place + column
        tl.store(target, low)
        tl.store(target + HALF, high)


@triton.jit(do_not_specialize=["layer", "first_row", "first_tile", "words", "max_splits"])
def split_kernel(
    qkv: tl.tensor,
    anchor: tl.tensor,
    outputs: tl.tensor,
    largest: tl.tensor,
    sums: tl.tensor,
    page: tl.tensor,
    first_page_of: tl.tensor,
    slot_of: tl.tensor,
    prefix_of: tl.tensor,
    bits_of: tl.tensor,
    tile_session: tl.tensor,
    tile_of: tl.tensor,
    first_row_of: tl.tensor,
    count_of: tl.tensor,
    tree_base_of: tl.tensor,
    layer: tl.tensor,
    first_row: tl.tensor,
    first_tile: tl.tensor,
    words: tl.tensor,
    max_splits: tl.tensor,
    scaling: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One program per tile of a session's query rows and key head, and residue of the split's index.

    The heads of a group are stacked: stacked row i is head i % group of the session's row i // group. The
    first row of the scratch tensors is that of `first_row`.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    index, kv_head = first_tile + tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    session = tl.load(tile_session + index)
    if session < 0:
        return
    stacked = tl.load(tile_of + index).to(tl.int32) * ROWS + tl.arange(0, ROWS)
    is_row = stacked < tl.load(count_of + session) * GROUP
    row = tl.load(first_row_of + session).to(tl.int32) + stacked // GROUP
    head = kv_head * GROUP + stacked % GROUP
    column = tl.arange(0, DIM)
    query = tl.load(
        qkv + (row * (HEADS + 2 * KV_HEADS) + head)[:, None] * DIM + column[None, :],
        mask=is_row[:, None],
        other=0.0,
    )
    # Numbers of 32 bits from here on: the rows' values lie in registers.
    last = tl.load(slot_of + row, mask=is_row, other=-1).to(tl.int32)
    prefix = tl.load(prefix_of + row, mask=is_row, other=0).to(tl.int32)
    tree_base = tl.minimum(tl.load(tree_base_of + session), 2147483647).to(tl.int32)
    end = tl.max(last, 0) + 1
    pages = page + tl.load(first_page_of + session)
    # Keys of the head's layer in a page, counted from its start; its values are KV_HEADS heads later.
    keys = anchor + (layer.to(tl.int64) * 2 * KV_HEADS + kv_head) * PAGE * DIM
    split = tl.program_id(1)
    while split * SPLIT < end:
        peak, total, mixed = _attend_split(
            query, keys, pages, bits_of, row, is_row, prefix, tree_base, end, split, words, scaling,
            KV_HEADS, DIM, SPLIT, PAGE, ROWS,
        )  # fmt: skip
        part = ((row - first_row) * HEADS + head) * max_splits + split
        tl.store(largest + part, peak, mask=is_row)
        tl.store(sums + part, total, mask=is_row)
        tl.store(outputs + part[:, None] * DIM + column[None, :], mixed, mask=is_row[:, None])
        split += tl.num_programs(1)


@triton.jit
def _attend_split(
    query: tl.tensor,
    keys: tl.tensor,
    pages: tl.tensor,
    bits_of: tl.tensor,
    row: tl.tensor,
    is_row: tl.tensor,
    prefix: tl.tensor,
    tree_base: tl.tensor,
    end: tl.tensor,
    split: tl.tensor,
    words: tl.tensor,
    scaling: tl.tensor,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the rows' largest score, sum of weights and weighted values of one split."""
    column = tl.arange(0, DIM)
    peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    mixed = tl.zeros([ROWS, DIM], dtype=tl.float32)
    for block in range(0, tl.cdiv(tl.minimum(end - split * SPLIT, SPLIT), PAGE)):
        first = split * SPLIT + block * PAGE
        slot = first + tl.arange(0, PAGE)
        held = (slot < end)[:, None]
        # Pages start at multiples of 16 numbers; the compiler cannot know.
        page = tl.multiple_of(tl.load(pages + first // PAGE), 16)
        # Slots count from the sequence's first one: a tensor of places in the page would cost registers.
        origin = keys + (page - first * DIM)
        place = slot[:, None] * DIM + column[None, :]
        key = tl.load(origin + place, mask=held, other=0.0)
        value = tl.load(origin + KV_HEADS * PAGE * DIM + place, mask=held, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
        seen = slot[None, :] < prefix[:, None]
        if first + PAGE > tree_base:
            seen = seen | _seen_nodes(bits_of, row, is_row, slot - tree_base, words)
        scores = tl.where(seen & is_row[:, None], scores, float("-inf"))
        peak, total, mixed = _add_block(scores, value, peak, total, mixed)
    return peak, total, mixed


@triton.jit
def _seen_nodes(
    bits_of: tl.tensor, row: tl.tensor, is_row: tl.tensor, node: tl.tensor, words: tl.tensor
) -> tl.tensor:
    """Return whether each row sees each node of its session's tree, [rows, nodes]."""
    is_node = (node >= 0) & (node < words * 64)
    word = tl.load(
        bits_of + row[:, None] * words + (node // 64)[None, :],
        mask=is_row[:, None] & is_node[None, :],
        other=0,
    )
    return ((word >> (node % 64)[None, :]) & 1) == 1


@triton.jit
def _add_block(
    scores: tl.tensor, value: tl.tensor, peak: tl.tensor, total: tl.tensor, mixed: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return `peak`, `total` and `mixed` with the scores and values of one more block."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # Rows that have seen nothing yet stay at zero instead of becoming no number.
    origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = tl.exp(scores - origin[:, None])
    decay = tl.exp(peak - origin)
    total = total * decay + tl.sum(weight, 1)
    mixed = mixed * decay[:, None]
    mixed = tl.dot(weight.to(value.dtype), value, mixed, input_precision="ieee")
    return new_peak, total, mixed


@triton.jit(do_not_specialize=["first_row", "max_splits"])
def combine_kernel(
    outputs: tl.tensor,
    largest: tl.tensor,
    sums: tl.tensor,
    slot_of: tl.tensor,
    mixed: tl.tensor,
    first_row: tl.tensor,
    max_splits: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """One program per row and head: the splits' outputs as one, in their order."""
    part_row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = first_row + part_row
    slot = tl.load(slot_of + row)
    column = tl.arange(0, DIM)
    first = (part_row * HEADS + head) * max_splits
    peak = tl.full([1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    output = tl.zeros([DIM], dtype=tl.float32)
    split = 0
    while split * SPLIT <= slot:
        part_peak = tl.load(largest + first + split)
        new_peak = tl.maximum(peak, part_peak)
        origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay, gain = tl.exp(peak - origin), tl.exp(part_peak - origin)
        total = total * decay + tl.load(sums + first + split) * gain
        part = tl.load(outputs + (first + split) * DIM + column)
        output = output * decay + part * gain
        peak = new_peak
        split += 1
    if slot >= 0:
        target = mixed + (row * HEADS + head) * DIM + column
        tl.store(target, (output / total).to(mixed.dtype.element_ty))
