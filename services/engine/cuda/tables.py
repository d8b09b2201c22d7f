"""The inputs of a captured step: one flat buffer at a fixed address, filled by one copy per step.

A step's rows are packed: session after session, each with as many rows as it feeds. Spare rows and sessions
of a bucket are marked and do nothing. The kernels find keys and values through a table of each session's
pages, so that caches may grow, share pages and be evicted between replays of one graph.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from services.engine.core.batch import GREEDY, Batch, GumbelDraw, Segment, node_path
from services.engine.core.kv_cache import BLOCK
from services.engine.cuda.pages import PagedCache

__all__ = ["NO_TREE", "Bucket", "Tables", "bucket_of", "fill", "new_tables", "slot_levels"]

NO_TREE = 1 << 40
_MASK_BITS = 64
_MIN_SLOTS = 2048
_SIGN = 1 << (_MASK_BITS - 1)
# Rows beyond these come in multiples of 32; up to 8 rows every number has its bucket.
_ROW_BUCKETS: tuple[int, ...] = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96)


@dataclass(frozen=True)
class Bucket:
    """The sizes that a captured step is made for.

    Attributes:
        sessions: Sessions.
        rows: Packed rows of all sessions.
        wanted: Rows whose logits are computed.
        words: Words of 64 bits in a row's mask over its session's tree.
        max_rows: Rows of one session.
        max_slots: Cached slots that a row may see, itself included.
    """

    sessions: int
    rows: int
    wanted: int
    words: int
    max_rows: int
    max_slots: int

    @property
    def pages(self) -> int:
        """Pages of a session's table."""
        return -(-self.max_slots // BLOCK)


@dataclass
class Tables:
    """Views into `flat`, all int64 but for `inverse_temperature`.

    Attributes:
        token: [rows].
        position: [rows], absolute.
        slot: [rows] where the row's key and value go; -1 marks a spare row. Slots after it are not seen.
        prefix: [rows] how many leading slots the row sees: a chain's all up to its own.
        session: [rows].
        bits: [rows, words]: which slots from `tree_base` on the row sees as well, itself included.
        wanted: [wanted] rows.
        first_row: [sessions].
        count: [sessions] rows; 0 marks a spare session.
        tree_base: [sessions] first slot of the tree's nodes, NO_TREE for a chain.
        seed: [sessions], the 64 bits as a signed number.
        sample_index: [sessions].
        is_drawn: [sessions], 0 for greedy.
        inverse_temperature: [sessions] float64.
        page: [sessions, pages of the bucket], first number of each of the session's pages, counted from the
            anchor in numbers; those that it does not have are undefined.
        flat: What is copied to the device in one go.
        caches: Of the sessions of this step, for kernels that do not go by addresses.
    """

    token: Tensor
    position: Tensor
    slot: Tensor
    prefix: Tensor
    session: Tensor
    bits: Tensor
    wanted: Tensor
    first_row: Tensor
    count: Tensor
    tree_base: Tensor
    seed: Tensor
    sample_index: Tensor
    is_drawn: Tensor
    inverse_temperature: Tensor
    page: Tensor
    flat: Tensor
    caches: list[PagedCache]


_VIEWS = tuple(f.name for f in fields(Tables) if f.name not in ("flat", "caches"))


def bucket_of(batch: Batch) -> Bucket:
    """The smallest bucket that a step fits."""
    segments = batch.segments
    rows = len(batch.token_ids)
    wanted = rows if batch.logit_rows is None else len(batch.logit_rows)
    most_nodes = max(segment.num_kept + len(segment.parents or ()) for segment in segments)
    return Bucket(
        sessions=_power(len(segments)),
        rows=_row_bucket(rows),
        wanted=_row_bucket(wanted) if wanted else 0,
        words=max(1, -(-most_nodes // _MASK_BITS)),
        max_rows=_power(max(segment.count for segment in segments)),
        max_slots=_power(max(_MIN_SLOTS, *(segment.slot + segment.count for segment in segments))),
    )


def slot_levels(max_context: int) -> list[int]:
    """Return all `max_slots` of the buckets of a model."""
    levels = [_MIN_SLOTS]
    while levels[-1] < max_context:
        levels.append(2 * levels[-1])
    return levels


def new_tables(bucket: Bucket, device: torch.device) -> Tables:
    """Tables in which every row and session is spare."""
    sizes = _sizes(bucket)
    padded = [_aligned(size) for size in sizes]
    flat = torch.zeros(sum(padded), dtype=torch.int64, device=device)
    columns = zip(flat.split_with_sizes(padded), sizes, strict=True)
    views = dict(zip(_VIEWS, (column[:size] for column, size in columns), strict=True))
    views["bits"] = views["bits"].view(bucket.rows, bucket.words)
    views["inverse_temperature"] = views["inverse_temperature"].view(torch.float64)
    views["page"] = views["page"].view(bucket.sessions, bucket.pages)
    views["slot"].fill_(-1)
    return Tables(**views, flat=flat, caches=[])


def fill(
    tables: Tables, bucket: Bucket, batch: Batch, gumbel_draws: Sequence[GumbelDraw | None], anchor: int
) -> None:
    """Write a step's inputs: one copy to the device.

    Args:
        tables: Of `bucket`.
        bucket: That the batch fits.
        batch: The step.
        gumbel_draws: One per segment, None where the tokens do not matter; or none when nothing is drawn.
        anchor: Address that pages are counted from.
    """
    segments = batch.segments
    wanted = range(len(batch.token_ids)) if batch.logit_rows is None else batch.logit_rows
    draws = [GREEDY if draw is None else draw for draw in gumbel_draws]
    rows, sessions = bucket.rows, bucket.sessions
    slots: list[int] = []
    prefixes: list[int] = []
    masks: list[int] = []
    row_sessions: list[int] = []
    for index, segment in enumerate(segments):
        slots.extend(range(segment.slot, segment.slot + segment.count))
        row_sessions.extend([index] * segment.count)
        _add_visible(segment, bucket.words, prefixes, masks)
    columns = (
        _padded(batch.token_ids, rows),
        _padded(batch.positions, rows),
        _padded(slots, rows, -1),
        _padded(prefixes, rows),
        _padded(row_sessions, rows),
        _padded(masks, rows * bucket.words),
        _padded(wanted, bucket.wanted),
        _padded([s.row for s in segments], sessions),
        _padded([s.count for s in segments], sessions),
        _padded([_tree_base(s) for s in segments], sessions, NO_TREE),
        _padded([_signed(draw.seed) for draw in draws], sessions),
        _padded([draw.sample_index for draw in draws], sessions),
        _padded([int(draw.temperature > 0) for draw in draws], sessions),
        _padded([_float_bits(1.0 / (draw.temperature or 1.0)) for draw in draws], sessions),
    )
    numbers = [number for column in columns for number in _padded(column, _aligned(len(column)))]
    # A fresh pinned block each time: torch keeps it until the copy is through.
    source = torch.empty(tables.flat.shape, dtype=torch.int64, pin_memory=tables.flat.is_cuda)
    source[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    caches = [_paged(segment) for segment in segments]
    data = caches[0].data
    origin = (data.data_ptr() - anchor) // data.element_size()
    page_rows = source[len(numbers) :][: sessions * bucket.pages].view(sessions, bucket.pages)
    for row, cache in zip(page_rows, caches, strict=False):
        count = min(len(cache.pages), bucket.pages)
        torch.add(cache.offsets[:count], origin, out=row[:count])
    tables.flat.copy_(source, non_blocking=True)
    tables.caches[:] = caches


def _sizes(bucket: Bucket) -> list[int]:
    rows, sessions = bucket.rows, bucket.sessions
    return [*[rows] * 5, rows * bucket.words, bucket.wanted, *[sessions] * 7, sessions * bucket.pages]


def _aligned(size: int) -> int:
    """Return the length of a column with its padding: all begin at multiples of 16 bytes.

    Triton compiles a kernel again for pointers that are aligned otherwise.
    """
    return size + size % 2


def _paged(segment: Segment) -> PagedCache:
    assert isinstance(segment.cache, PagedCache)
    return segment.cache


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
        masks.extend(_signed(mask >> (word * _MASK_BITS) & (2 * _SIGN - 1)) for word in range(words))


def _signed(word: int) -> int:
    """The same 64 bits as a two's complement number."""
    return word - 2 * _SIGN if word >= _SIGN else word


def _float_bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _row_bucket(rows: int) -> int:
    for size in _ROW_BUCKETS:
        if rows <= size:
            return size
    return -(-rows // 32) * 32
