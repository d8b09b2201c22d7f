"""Cores of the workers."""

from __future__ import annotations

import pytest

from orchestrator.launcher.preflight import worker_cores


@pytest.mark.parametrize(
    ("cores", "num_targets", "num_drafts", "threads", "wanted"),
    [
        ({1, 0}, 1, 1, 1, {"target": (0,), "draft": (1,)}),
        ({3, 4, 5, 9}, 2, 1, 1, {"target": (3, 4), "draft": (5,)}),
        ({0, 1}, 1, 0, 1, {"target": (0,), "draft": ()}),
        ({0}, 1, 1, 1, {"target": (), "draft": ()}),
        ({0, 1}, 2, 1, 1, {"target": (), "draft": ()}),
        ({0, 1, 2, 3, 4}, 1, 1, 2, {"target": (0, 1), "draft": (2, 3)}),
        ({0, 1, 2}, 1, 1, 2, {"target": (), "draft": ()}),
    ],
)
def test_worker_cores_are_disjoint_or_none(cores, num_targets, num_drafts, threads, wanted):
    assert worker_cores(cores, num_targets, num_drafts, threads) == wanted
