"""Replays of text drafters on known outputs: chains and trees of their matches."""

from __future__ import annotations

import pytest

from benchmarks.match_trees import Replay, nodes_of, replay
from gammaray.types import DrafterKind
from orchestrator.cycle.types import Match


class Proposes:
    """A text drafter that always proposes the same tokens."""

    kind = DrafterKind.NGRAM

    def __init__(self, *token_ids: int, length: int = 1) -> None:
        self.token_ids, self.length = token_ids, length

    def look_up(self, session, depth):
        found = self.token_ids[:depth]
        return Match(self.kind, found, self.length, (1.0,) * len(found)) if found else None


def test_chain_is_the_longest_match_and_tree_is_all_of_them():
    texts = [Proposes(7, 8, length=1), Proposes(9, 9, length=3)]
    chain = replay((1,), (7, 8, 1), texts, 2, as_tree=False)
    # Longest match 9 9, 9, nothing (the last token is never drafted): one token per cycle.
    assert (chain.cycles, chain.tokens, chain.rows) == (3, 3, 2 + 1 + 0)
    tree = replay((1,), (7, 8, 1), texts, 2, as_tree=True)
    assert (tree.cycles, tree.tokens, tree.rows) == (1, 3, 4)


def test_common_beginnings_are_one_node():
    matches = [Match(DrafterKind.NGRAM, ids, 1, (1.0,) * len(ids)) for ids in ((1, 2, 3), (1, 2, 4), (5,))]
    assert nodes_of(matches) == 5


def test_speed_counts_rows_by_their_cost():
    assert Replay(cycles=10, tokens=20, rows=30).speed(0.1) == pytest.approx(20 / 13)
