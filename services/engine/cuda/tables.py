"""The inputs of a captured step: one flat buffer at a fixed address, filled by one copy per step.

A step's rows are packed: session after session, each with as many rows as it feeds. What a step is captured
for depends on its number of rows alone: as many sessions, as many tiles of attention and the longest contexts
that such a step can have are provided for. Spare rows, sessions and tiles are marked and do nothing. The
kernels find keys and values through a table of each session's pages, so that caches may grow, share pages and
be evicted between replays of one graph.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import torch
from torch import Tensor

from services.engine.core.batch import GREEDY, Batch, GumbelDraw, Segment, node_path
from services.engine.core.kv_cache import BLOCK
from services.engine.cuda.pages import PagedCache

__all__ = [
    "MASK_BITS",
    "MAX_CAPTURED_CONTEXT",
    "MAX_CAPTURED_ROWS",
    "MAX_TILED_ROWS",
    "NO_TREE",
    "TILE_ROWS",
    "Bucket",
    "Buckets",
    "Run",
    "Tables",
    "clear",
    "fill",
    "new_tables",
]

MAX_CAPTURED_ROWS = 320
"""Rows of the largest captured step."""

TILE_ROWS = 32
"""Rows of a tile of attention: the heads of a key head's group, stacked."""

MAX_CAPTURED_CONTEXT = 131_072
"""Steps of longer sessions are not captured: scratch for those would be provided for all steps."""

MAX_TILED_ROWS = 64
"""A session with more rows, such as a prompt's chunk, attends by itself, in a step that is not captured."""

NO_TREE = 1 << 40
MASK_BITS = 64
"""Nodes of a tree in a word of a row's mask."""

_SIGN = 1 << (MASK_BITS - 1)
# Rows beyond these come in multiples of 32; up to 8 rows every number has its bucket.
_ROW_BUCKETS: tuple[int, ...] = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96)


@dataclass(frozen=True)
class Bucket:
    """The sizes of a step's tables, which have room for as many sessions as rows.

    Attributes:
        rows: Packed rows of all sessions.
        wanted: Rows whose logits are computed.
        words: Words of 64 bits in a row's mask over its session's tree.
        tiles: Tiles of attention, each of one session.
        pages: Pages of all sessions together.
        max_slots: Cached slots that a row may see, itself included.
        is_captured: Whether all steps of this bucket are one graph.
    """

    rows: int
    wanted: int
    words: int
    tiles: int
    pages: int
    max_slots: int
    is_captured: bool


class Buckets:
    """All buckets of a model's captured steps, and what other steps need.

    Args:
        group: Heads per key head.
        max_context: Positions lie below it.
    """

    def __init__(self, group: int, max_context: int) -> None:
        self.group = group
        # A tree near the end of the context has more slots than positions.
        self.max_slots = -(-(min(max_context, MAX_CAPTURED_CONTEXT) + MAX_CAPTURED_ROWS) // BLOCK) * BLOCK

    def all(self) -> list[Bucket]:
        """Return the captured buckets, the largest first."""
        sizes = {_row_bucket(rows) for rows in range(1, MAX_CAPTURED_ROWS + 1)}
        return [self.captured(rows) for rows in sorted(sizes, reverse=True)]

    def captured(self, rows: int) -> Bucket:
        """Return the captured bucket for up to MAX_CAPTURED_ROWS rows."""
        size = _row_bucket(rows)
        pages = size * self.max_slots // BLOCK
        return Bucket(
            size, size, 1, size * _num_tiles(1, self.group), pages, self.max_slots, is_captured=True
        )

    def of(self, batch: Batch, more: int = 0) -> Bucket:
        """Return the captured bucket that a step and `more` slots fit, or else one of its own sizes."""
        segments, rows = batch.segments, len(batch.token_ids)
        most_rows = max(segment.count for segment in segments)
        most_nodes = max(segment.num_kept + len(segment.parents or ()) for segment in segments)
        last = max(segment.slot + segment.count for segment in segments) + more
        is_usual = most_rows <= MAX_TILED_ROWS and most_nodes <= MASK_BITS and last <= self.max_slots
        if is_usual and rows <= MAX_CAPTURED_ROWS:
            return self.captured(rows)
        wanted = rows if batch.logit_rows is None else len(batch.logit_rows)
        words = max(1, -(-most_nodes // MASK_BITS))
        tiles = sum(_num_tiles(segment.count, self.group) for segment in segments)
        pages = sum(_num_pages(segment, more) for segment in segments)
        return Bucket(rows, wanted, words, tiles, pages, last, is_captured=False)


@dataclass(frozen=True)
class Run:
    """Consecutive sessions whose attention is one launch: their rows and tiles."""

    first_row: int
    rows: int
    first_tile: int
    tiles: int


@dataclass
class Tables:
    """Views into `flat`, all int64 but for two of float64.

    Attributes:
        token: [rows].
        position: [rows], absolute.
        slot: [rows] where the row's key and value go; -1 marks a spare row. Slots after it are not seen.
        prefix: [rows] how many leading slots the row sees: a chain's all up to its own.
        session: [rows].
        bits: [rows, words]: which slots from `tree_base` on the row sees as well, itself included.
        wanted: [wanted] rows; -1 marks a spare one.
        tile_session: [tiles]; -1 marks a spare tile.
        tile: [tiles], number of the tile among those of its session.
        first_row: [sessions].
        count: [sessions] rows.
        tree_base: [sessions] first slot of the tree's nodes, NO_TREE for a chain.
        seed: [sessions], the 64 bits as a signed number.
        sample_index: [sessions].
        is_drawn: [sessions], 0 for greedy.
        inverse_temperature: [sessions] float64.
        sharpness: [sessions] float64.
        first_page: [sessions], index in `page` of the session's first page.
        page: [pages], first number of each page in the order of slots, counted from the anchor in numbers.
        flat: What is copied to the device in one go.
        bucket: The sizes.
        segments: The sessions of this step, for kernels that do not go by addresses.
        first_pages: `first_page` on the host.
        runs: The launches of attention.
        alone: Sessions that attend by themselves, in none of the runs.
    """

    token: Tensor
    position: Tensor
    slot: Tensor
    prefix: Tensor
    session: Tensor
    bits: Tensor
    wanted: Tensor
    tile_session: Tensor
    tile: Tensor
    first_row: Tensor
    count: Tensor
    tree_base: Tensor
    seed: Tensor
    sample_index: Tensor
    is_drawn: Tensor
    inverse_temperature: Tensor
    sharpness: Tensor
    first_page: Tensor
    page: Tensor
    flat: Tensor
    bucket: Bucket
    segments: list[Segment]
    first_pages: list[int]
    runs: list[Run]
    alone: list[int]

    def advance(self, tokens: Tensor) -> None:
        """Make it the step after one of a row per session, which feeds `tokens` [sessions]."""
        live = slice(len(tokens))
        self.token[live].copy_(tokens)
        for column in (self.position, self.slot, self.prefix):
            column[live].add_(1)
        self.segments[:] = [replace(segment, start=segment.start + 1) for segment in self.segments]


_ON_HOST = ("bucket", "segments", "first_pages", "runs", "alone")
_VIEWS = tuple(f.name for f in fields(Tables) if f.name not in ("flat", *_ON_HOST))


def new_tables(bucket: Bucket, device: torch.device, flat: Tensor | None = None) -> Tables:
    """Tables of a bucket, in the first numbers of `flat` if that is given; their contents are undefined."""
    sizes = _sizes(bucket)
    padded = [_aligned(size) for size in sizes]
    if flat is None:
        flat = torch.empty(sum(padded), dtype=torch.int64, device=device)
    flat = flat[: sum(padded)]
    columns = zip(flat.split_with_sizes(padded), sizes, strict=True)
    views = dict(zip(_VIEWS, (column[:size] for column, size in columns), strict=True))
    views["bits"] = views["bits"].view(bucket.rows, bucket.words)
    for name in ("inverse_temperature", "sharpness"):
        views[name] = views[name].view(torch.float64)
    runs = [Run(0, bucket.rows, 0, bucket.tiles)]
    return Tables(**views, flat=flat, bucket=bucket, segments=[], first_pages=[], runs=runs, alone=[])


def clear(tables: Tables) -> None:
    """Mark all rows, sessions and tiles as spare."""
    tables.flat.zero_()
    for column in (tables.slot, tables.wanted, tables.tile_session):
        column.fill_(-1)


def fill(
    tables: Tables,
    batch: Batch,
    gumbel_draws: Sequence[GumbelDraw | None],
    anchor: int,
    group: int,
    more: int = 0,
) -> None:
    """Write a step's inputs: one copy to the device.

    Args:
        tables: Of a bucket that the batch fits.
        batch: The step.
        gumbel_draws: One per segment, None where the tokens do not matter; or none when nothing is drawn.
        anchor: Address that pages are counted from.
        group: Heads per key head.
        more: Slots of each session that later steps on these tables see, after those of this step.
    """
    bucket, segments = tables.bucket, batch.segments
    rows = sessions = bucket.rows
    wanted = range(len(batch.token_ids)) if batch.logit_rows is None else batch.logit_rows
    draws = [GREEDY if draw is None else draw for draw in gumbel_draws]
    slots: list[int] = []
    prefixes: list[int] = []
    masks: list[int] = []
    row_sessions: list[int] = []
    for index, segment in enumerate(segments):
        slots.extend(range(segment.slot, segment.slot + segment.count))
        row_sessions.extend([index] * segment.count)
        _add_visible(segment, bucket.words, prefixes, masks)
    tile_sessions, tiles = _place_tiles(tables, segments, group)
    counts = [_num_pages(segment, more) for segment in segments]
    first_pages = list(accumulate(counts, initial=0))[:-1]
    columns = (
        _padded(batch.token_ids, rows),
        _padded(batch.positions, rows),
        _padded(slots, rows, -1),
        _padded(prefixes, rows),
        _padded(row_sessions, rows),
        _padded(masks, rows * bucket.words),
        _padded(wanted, bucket.wanted, -1),
        _padded(tile_sessions, bucket.tiles, -1),
        _padded(tiles, bucket.tiles),
        _padded([s.row for s in segments], sessions),
        _padded([s.count for s in segments], sessions),
        _padded([_tree_base(s) for s in segments], sessions, NO_TREE),
        _padded([_signed(draw.seed) for draw in draws], sessions),
        _padded([draw.sample_index for draw in draws], sessions),
        _padded([int(draw.temperature > 0) for draw in draws], sessions),
        _padded([_float_bits(1.0 / (draw.temperature or 1.0)) for draw in draws], sessions),
        _padded([_float_bits(draw.sharpness) for draw in draws], sessions),
        _padded(first_pages, sessions),
    )
    numbers = [number for column in columns for number in _padded(column, _aligned(len(column)))]
    # A fresh pinned block each time: torch keeps it until the copy is through.
    size = len(numbers) + sum(counts)
    source = torch.empty(size, dtype=torch.int64, pin_memory=tables.flat.is_cuda)
    source[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    data = segments[0].cache.data
    origin = (data.data_ptr() - anchor) // data.element_size()
    for segment, pages in zip(segments, source[len(numbers) :].split_with_sizes(counts), strict=True):
        assert isinstance(segment.cache, PagedCache)
        torch.add(segment.cache.offsets[: len(pages)], origin, out=pages)
    tables.flat[:size].copy_(source, non_blocking=True)
    tables.segments[:], tables.first_pages[:] = segments, first_pages


def _place_tiles(tables: Tables, segments: Sequence[Segment], group: int) -> tuple[list[int], list[int]]:
    """Return session and number of each tile; set the runs and the sessions that attend alone."""
    sessions: list[int] = []
    numbers: list[int] = []
    is_captured = tables.bucket.is_captured
    runs: list[Run] = []
    tables.alone.clear()
    for index, segment in enumerate(segments):
        if not is_captured and segment.count > MAX_TILED_ROWS:
            tables.alone.append(index)
            continue
        tiles = _num_tiles(segment.count, group)
        last = runs[-1] if runs else None
        if (
            last
            and last.first_row + last.rows == segment.row
            and last.rows + segment.count <= MAX_CAPTURED_ROWS
        ):
            runs[-1] = replace(last, rows=last.rows + segment.count, tiles=last.tiles + tiles)
        else:
            runs.append(Run(segment.row, segment.count, len(sessions), tiles))
        sessions += [index] * tiles
        numbers += range(tiles)
    if not is_captured:
        tables.runs[:] = runs
    return sessions, numbers


def _sizes(bucket: Bucket) -> list[int]:
    rows, tiles = bucket.rows, bucket.tiles
    return [*[rows] * 5, rows * bucket.words, bucket.wanted, tiles, tiles, *[rows] * 9, bucket.pages]


def _num_tiles(rows: int, group: int) -> int:
    """Tiles of a session's rows."""
    return -(-rows * group // TILE_ROWS)


def _num_pages(segment: Segment, more: int) -> int:
    """Pages of the slots that a segment's rows see, and of `more` after them."""
    return -(-(segment.slot + segment.count + more) // BLOCK)


def _aligned(size: int) -> int:
    """Return the length of a column with its padding: all begin at multiples of 16 bytes.

    Triton compiles a kernel again for pointers that are aligned otherwise.
    """
    return size + size % 2


def _padded(numbers: Sequence[int], size: int, spare: int = 0) -> list[int]:
    return [*numbers, *[spare] * (size - len(numbers))]


def _tree_base(segment: Segment) -> int:
    """Slot of the first node, kept ones included."""
    if segment.parents is None:
        return NO_TREE
    return segment.start + segment.count - len(segment.parents)


def _add_visible(segment: Segment, words: int, prefixes: list[int], masks: list[int]) -> None:
    """Append what each row of a segment sees."""
    num_nodes = len(segment.parents or ())
    num_chain = segment.count - num_nodes
    prefixes.extend(range(segment.slot + 1, segment.slot + 1 + num_chain))
    masks.extend([0] * (num_chain * words))
    base = _tree_base(segment)
    for node in range(segment.num_kept, segment.num_kept + num_nodes):
        prefix, slots = node_path(segment, node)
        prefixes.append(prefix)
        mask = sum(1 << (slot - base) for slot in slots)
        masks.extend(_signed(mask >> (word * MASK_BITS) & (2 * _SIGN - 1)) for word in range(words))


def _signed(word: int) -> int:
    """The same 64 bits as a two's complement number."""
    return word - 2 * _SIGN if word >= _SIGN else word


def _float_bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _row_bucket(rows: int) -> int:
    for size in _ROW_BUCKETS:
        if rows <= size:
            return size
    return -(-rows // 32) * 32
