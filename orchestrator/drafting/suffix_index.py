"""An index of token sequences that finds earlier occurrences of the latest tokens, and what followed them.

The longest suffix of a context that occurs in the text is found, and its continuation is chosen by counts: at
each token the one that followed most often, with count of child / count of node as its probability.

Structure. For suffixes of 1, 2, 4, 8 and 16 tokens there is a hash table from a suffix to the latest position
after it, and for each position a link to the position before that had the same slot, as in LZ77 compressors.
Tables belong to blocks of a fixed number of positions: their entries have 16 bits, the tables never grow, and
the oldest block can be dropped as a whole. A token takes 24 bytes in all; a suffix tree takes hundreds, in
Python thousands. Slots may collide, so each occurrence is compared with the context before it counts.

Reference: SuffixDecoding, arXiv 2411.04975.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gammaray.types import DrafterKind
from orchestrator.cycle.types import Match

LEVELS = (1, 2, 4, 8, 16)
"""Lengths of the suffixes that are indexed."""

LONGEST = 64
"""Upper bound of a match, in tokens."""

MAX_OCCURRENCES = 16
"""Latest occurrences of a suffix that are counted."""

MAX_STEPS = 64
"""Links that are followed in one table, so that a slot shared by frequent suffixes does not cost more."""

MIN_PROBABILITY = 0.1
"""A chain ends before a token that is reached with a lower estimated probability."""

LENGTH_FACTOR = 4
"""Most tokens of a chain per token of its match (docs/lab.md)."""

SEPARATOR = 2**32 - 1
"""Stands between sequences, and for erased tokens; it is no token id and is never proposed."""

_BULK = 48
"""From this many tokens on, indexing them with numpy is faster."""

_BULK_LIMIT = 4096
"""Tokens that are indexed at once: the arrays for it fit the processor's cache."""

# A polynomial hash modulo 2^30, the range in which Python's integers are fastest; its upper 16 bits are used.
_MODULUS = 2**30
_MASK = _MODULUS - 1
_BASE = 0x2C9277B5
_SPREAD = 0x1E3779B1
_SHIFT = 14
_POWERS = tuple(pow(_BASE, length, _MODULUS) for length in LEVELS)
_WINDOW = LEVELS[-1]


@dataclass(frozen=True)
class Context:
    """The end of a token sequence, to be looked up."""

    tokens: array[int]  # the latest tokens, at most `LONGEST`
    slots: tuple[int, ...]  # 16-bit hash per suffix of `LEVELS`; without meaning where `tokens` is shorter

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> Context:
        tokens = array("I", token_ids[-LONGEST:])
        return cls(tokens, _slots(_sums(tokens[-_WINDOW:])))


class _Block:
    """Hash tables of the positions [start, start + size); entries are offsets plus 1, 0 for none."""

    __slots__ = ("heads", "previous", "start")

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self.heads = tuple(array("H", bytes(2 * size)) for _ in LEVELS)
        self.previous = tuple(array("H", bytes(2 * size)) for _ in LEVELS)

    def link(self, sums: deque[int], mask: int, offset: int) -> None:
        """Index one position by the suffixes before it; `sums` are those of `_sums`."""
        last = sums[-1]
        for length, power, head, previous in zip(LEVELS, _POWERS, self.heads, self.previous, strict=True):
            slot = ((last - sums[-1 - length] * power) & _MASK) >> _SHIFT & mask
            previous[offset] = head[slot]
            head[slot] = offset + 1

    def link_many(self, level: int, slots: npt.NDArray[np.uint16], offset: int) -> None:
        """Index consecutive positions from `offset` on; the result is that of `link` for each in turn."""
        head = np.frombuffer(self.heads[level], np.uint16)
        previous = np.frombuffer(self.previous[level], np.uint16)
        order = np.argsort(slots, kind="stable")
        ordered, entries = slots[order], (order + (offset + 1)).astype(np.uint16)
        is_first = np.ones(len(slots), np.bool_)
        is_first[1:] = ordered[1:] != ordered[:-1]
        before = np.empty_like(entries)
        before[1:] = entries[:-1]
        before[is_first] = head[ordered[is_first]]
        previous[order + offset] = before
        is_last = np.append(is_first[1:], True)
        head[ordered[is_last]] = entries[is_last]


class SuffixIndex:
    """Token sequences that grow at the end and are dropped from the `start`, in blocks.

    Positions are absolute: position p stands before the p-th token that was added since the beginning. A
    block has `block_size` positions, and slots in each of its tables: a power of 2, at most 2^15.
    """

    def __init__(self, block_size: int = 4096) -> None:
        self.block_size, self._slot_mask = block_size, block_size - 1
        self._tokens = array("I")
        self._blocks: deque[_Block] = deque()
        self._prefix_sums = _sums(())
        self.start = 0

    @property
    def end(self) -> int:
        """Position after the latest token."""
        return self.start + len(self._tokens)

    @property
    def num_blocks(self) -> int:
        """Number of blocks held, which decides the memory in use."""
        return len(self._blocks)

    @property
    def context(self) -> Context:
        """The latest tokens, to be looked up in this index or in another one."""
        return Context(self._tokens[-LONGEST:], _slots(self._prefix_sums))

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens: some microseconds for one, some tenths of a microsecond for each of many."""
        if len(token_ids) >= _BULK:
            for start in range(0, len(token_ids), _BULK_LIMIT):
                self._extend_many(token_ids[start : start + _BULK_LIMIT])
            return
        sums, mask = self._prefix_sums, self._slot_mask
        for end, token_id in enumerate(token_ids, self.end):
            self._block_of(end).link(sums, mask, end & mask)
            self._tokens.append(token_id)
            sums.append((sums[-1] * _BASE + (token_id + 1) * _SPREAD) & _MASK)

    def erase(self, start: int, stop: int) -> None:
        """Overwrite the tokens in [start, stop): they are not found any more."""
        first, last = max(start, self.start) - self.start, min(stop, self.end) - self.start
        if first < last:
            self._tokens[first:last] = array("I", [SEPARATOR]) * (last - first)

    def drop_oldest(self) -> None:
        """Drop the tokens of the oldest block and what was indexed in it."""
        self._blocks.popleft()
        start = self._blocks[0].start if self._blocks else self.end
        del self._tokens[: start - self.start]
        self.start = start

    @property
    def oldest_stop(self) -> int:
        """Position at which the oldest block ends."""
        return self._blocks[0].start + self.block_size

    def look_up(self, context: Context, depth: int, shortest: int = 1) -> Match | None:
        """Return the most frequent continuation of the longest suffix of a context that occurs here.

        A chain has at most `depth` tokens and `LENGTH_FACTOR` per matched one: a short match, of at least
        `shortest`, says little of what is far. Of the suffix of `LEVELS` that is found, the latest
        `MAX_OCCURRENCES` are compared further back. Where the context is the end of this index and an
        occurrence overlaps it, the chain continues with its own first tokens, so that a repetition is
        proposed to the full depth.
        """
        occurrences, length = self._occurrences(context.tokens, context.slots, shortest)
        if not occurrences:
            return None
        occurrences, length = self._longest(occurrences, length, context.tokens)
        return self._continuation(occurrences, length, min(depth, LENGTH_FACTOR * length))

    def _occurrences(self, context: array[int], slots: Sequence[int], shortest: int) -> tuple[list[int], int]:
        """Return where the longest suffix of `LEVELS` occurred, latest first, and its length."""
        blocks, found_level = list(reversed(self._blocks)), -1
        for level, length in enumerate(LEVELS):
            if length < shortest:
                continue
            if length > len(context):
                break
            wanted, slot = context[-length:], slots[level] & self._slot_mask
            having = [
                block
                for block in blocks
                if block.heads[level][slot] and self._ends(block, level, slot, wanted, 1)
            ]
            if not having:
                break
            blocks, found_level = having, level
        if found_level < 0:
            return [], 0
        length, slot, found = LEVELS[found_level], slots[found_level] & self._slot_mask, list[int]()
        for block in blocks:
            found += self._ends(block, found_level, slot, context[-length:], MAX_OCCURRENCES - len(found))
            if len(found) == MAX_OCCURRENCES:
                break
        return found, length

    def _ends(self, block: _Block, level: int, slot: int, wanted: array[int], limit: int) -> list[int]:
        """Return the indexes in `_tokens` after the latest occurrences of a suffix in a block."""
        tokens, length, last, found = self._tokens, len(wanted), wanted[-1], list[int]()
        previous, entry = block.previous[level], block.heads[level][slot]
        before = block.start - 1 - self.start
        for _ in range(MAX_STEPS):
            if not entry:
                break
            end = before + entry
            if end >= length and tokens[end - 1] == last and tokens[end - length : end] == wanted:
                found.append(end)
                if len(found) == limit:
                    break
            entry = previous[entry - 1]
        return found

    def _longest(self, ends: list[int], length: int, context: array[int]) -> tuple[list[int], int]:
        """Return the occurrences that match furthest back, and the length of their match."""
        tokens, kept = self._tokens, list[int]()
        for end in ends:
            if tokens[max(0, end - length) : end] != context[-length:]:
                continue
            limit, longer = min(end, len(context)), length
            while longer < limit and tokens[end - longer - 1] == context[-longer - 1]:
                longer += 1
            if longer > length:
                kept, length = [], longer
            kept.append(end)
        return kept, length

    def _continuation(self, ends: list[int], length: int, max_tokens: int) -> Match | None:
        tokens, size = self._tokens, len(self._tokens)
        chain: list[int] = []
        probabilities: list[float] = []
        path = 1.0
        while len(chain) < max_tokens:
            shift = len(chain)
            following = [
                tokens[end + shift] if end + shift < size else chain[end + shift - size] for end in ends
            ]
            chosen = _most_frequent(following)
            if chosen == SEPARATOR:
                break
            probability = following.count(chosen) / len(ends)
            path *= probability
            if path < MIN_PROBABILITY:
                break
            chain.append(chosen)
            probabilities.append(probability)
            if probability < 1:
                ends = [end for end, token_id in zip(ends, following, strict=True) if token_id == chosen]
        return Match(DrafterKind.SUFFIX, tuple(chain), length, tuple(probabilities)) if chain else None

    def _extend_many(self, token_ids: Sequence[int]) -> None:
        old_end = self.end
        self._tokens.extend(token_ids)
        end = self.end
        first = max(self.start, old_end - _WINDOW)  # token from which on the suffixes are hashed
        tokens = np.array(self._tokens[first - self.start : -1], np.uint32)
        hashes = (tokens + np.uint32(1)) * np.uint32(_SPREAD)  # modulo 2^32, so also modulo 2^30
        begin = max(old_end, first + 1)  # no suffix ends before the first token
        for level, half in enumerate((0, *LEVELS[:-1])):
            if half:
                longer = hashes.copy()
                longer[half:] += hashes[:-half] * np.uint32(_POWERS[level - 1])
                hashes = longer
            slots = (hashes >> np.uint32(_SHIFT) & np.uint32(self._slot_mask)).astype(np.uint16)
            for position in range(begin - begin % self.block_size, end, self.block_size):
                low, high = max(begin, position), min(end, position + self.block_size)
                block = self._block_of(low)
                block.link_many(level, slots[low - 1 - first : high - 1 - first], low - block.start)
        self._prefix_sums = _sums(self._tokens[-_WINDOW:])

    def _block_of(self, position: int) -> _Block:
        """Return the block of a position, which is at or after the start of the latest block."""
        start = position - (position & self._slot_mask)
        if self._blocks and self._blocks[-1].start == start:
            return self._blocks[-1]
        for block in reversed(self._blocks):
            if block.start <= start:
                if block.start == start:
                    return block
                break
        self._blocks.append(_Block(start, self.block_size))
        return self._blocks[-1]


def _most_frequent(token_ids: list[int]) -> int:
    """Return the most frequent token, of equals the first; SEPARATOR if there is no other."""
    first = token_ids[0]
    if token_ids.count(first) == len(token_ids):
        return first
    distinct = dict.fromkeys(token_id for token_id in token_ids if token_id != SEPARATOR)
    return max(distinct, key=token_ids.count)


def _sums(tokens: Sequence[int]) -> deque[int]:
    """Return the prefix sums of the hash, up to each of the last `_WINDOW` tokens.

    The hash of a suffix is the last sum less the sum before the suffix, shifted by the suffix's length.
    """
    sums = deque([0] * (_WINDOW + 1), maxlen=_WINDOW + 1)
    for token_id in tokens:
        sums.append((sums[-1] * _BASE + (token_id + 1) * _SPREAD) & _MASK)
    return sums


def _slots(sums: deque[int]) -> tuple[int, ...]:
    last = sums[-1]
    return tuple(
        [
            ((last - sums[-1 - length] * power) & _MASK) >> _SHIFT
            for length, power in zip(LEVELS, _POWERS, strict=True)
        ]
    )
