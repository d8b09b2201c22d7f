"""One session's keys and values: the slots of its chain, followed by those of tree nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class SessionCache:
    """One session's slots: those of its chain, then until `keep_path` those of a tree's nodes."""

    data: Tensor  # [num_layers, rows, capacity, dim]
    tokens: list[int] = field(default_factory=list)  # the cached chain; token i is in slot i
    tree_tokens: list[int] = field(default_factory=list)
    tree_parents: list[int] = field(default_factory=list)  # by index; -k: the k-th last token of the chain
    first: int = 0  # slots before it are empty: their tokens were not fed, and no row attends to them

    @property
    def capacity(self) -> int:
        """Number of slots of the buffer."""
        return self.data.shape[2]

    @property
    def num_slots(self) -> int:
        """Number of slots in use, tree nodes included."""
        return len(self.tokens) + len(self.tree_tokens)

    def truncate(self, length: int, num_nodes: int = 0) -> None:
        """Keep the first `length` tokens of the chain and the first `num_nodes` nodes of the tree."""
        del self.tokens[length:]
        self.first = min(self.first, len(self.tokens))
        del self.tree_tokens[num_nodes:], self.tree_parents[num_nodes:]

    def keep_path(self, base: int, path: Sequence[int], keep: Sequence[int] = ()) -> None:
        """Make the chain its first `base` tokens and the nodes `path`, as `CacheStore.keep_path` does.

        ValueError if `base` is past the chain, `path` is not a path from there, or the parent of a node in
        `keep` is dropped.
        """
        if not self.tree_tokens:
            self._keep_chain(base, path)
            return
        length, num_nodes = len(self.tokens), len(self.tree_tokens)
        if not 0 <= base <= length or (not path and base < length and not keep):
            raise ValueError(f"base: got {base}, the tree's nodes start at {length}")
        previous = base - 1 - length
        for node in path:
            if not 0 <= node < num_nodes or self.tree_parents[node] != previous:
                raise ValueError(f"path: got {list(path)}, not a path from position {base}")
            previous = node
        parents = self._parents_after(base, path, keep)
        staying = [*path, *keep]
        if base != length or staying != list(range(len(staying))):
            self._move([length + node for node in staying], base)
        del self.tokens[base:]
        self.tokens.extend(self.tree_tokens[node] for node in path)
        self.tree_tokens, self.tree_parents = [self.tree_tokens[node] for node in keep], parents

    def _move(self, slots: Sequence[int], base: int) -> None:
        if self.data.is_cpu:
            # NOTE: a draft waits for this; numpy takes a third of torch's time. Bytes: numpy has no bfloat16.
            data = self.data.view(torch.uint8).numpy()
            data[:, :, base : base + len(slots)] = data.take(slots, axis=2)
        else:
            chosen = torch.tensor(slots, device=self.data.device)
            self.data[:, :, base : base + len(slots)] = self.data.index_select(2, chosen)

    def _parents_after(self, base: int, path: Sequence[int], keep: Sequence[int]) -> list[int]:
        """The parents of `keep`, as indices after the move."""
        length, new_length = len(self.tokens), base + len(path)
        places = {node: base + index - new_length for index, node in enumerate(path)}
        parents = []
        for index, node in enumerate(keep):
            parent = self.tree_parents[node]
            if parent in places:
                parents.append(places[parent])
            elif parent < 0 and length + parent < base:
                parents.append(length + parent - new_length)
            else:
                raise ValueError(f"keep: the parent of node {node} does not stay")
            places[node] = index
        return parents

    def _keep_chain(self, base: int, path: Sequence[int]) -> None:
        end = base + len(path)
        if list(path) != list(range(len(path))) or not 0 <= base <= end <= len(self.tokens):
            allowed = f"not a path of the {len(self.tokens)} cached tokens"
            raise ValueError(f"path: got {list(path)} from base {base}, {allowed}")
        self.truncate(end)


def common_prefix(left: list[int], right: list[int], beyond: int = 0) -> int:
    """Length of the common prefix, 0 when it is not longer than `beyond`.

    Slices compare at C speed, so a binary search beats a loop; the token at `beyond` rules out most others.
    """
    high = min(len(left), len(right))
    if high <= beyond or left[beyond] != right[beyond] or left[:beyond] != right[:beyond]:
        return 0
    low = beyond + 1
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
