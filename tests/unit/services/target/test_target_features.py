"""The features of a block: which positions are kept, whatever order and failures come."""

import pytest
import torch

from gammaray.blocks import MAX_FEATURE_BYTES
from services.heads.features import read_features
from services.target.features import FeatureSource

WIDTH = 4


class Fusion:
    """Features that name their positions, as states do; fails where it is told to."""

    taps = (1,)

    def __init__(self, width=WIDTH):
        self.width = width
        self.fails = False
        self.num_rows = 0

    def __call__(self, states):
        if self.fails:
            raise RuntimeError("broken")
        self.num_rows += len(states)
        return states[:, 0, :1].repeat(1, self.width)


def states(start, count):
    return torch.arange(start, start + count).float()[:, None, None] + 1


def positions(features):
    rows = read_features(features, WIDTH)[:, 0].round().int() - 1
    assert rows.tolist() == list(range(features.start, features.end))
    return features.start, features.end


@pytest.fixture
def source():
    return FeatureSource(Fusion(), 16)


def test_chunks_follow_each_other(source):
    block = source.begin(12, 0)
    source.take(block, 0, states(0, 8))
    source.take(block, 8, states(8, 5))
    assert positions(source.finish(block, 13)) == (0, 13)


def test_only_asked_positions_of_the_window_are_made():
    fusion = Fusion()
    source = FeatureSource(fusion, 5)
    block = source.begin(12, 0)
    source.take(block, 0, states(0, 8))
    source.take(block, 8, states(8, 6))
    assert fusion.num_rows == 7
    assert positions(source.finish(block, 14)) == (9, 14)
    block = source.begin(12, 11)
    source.take(block, 8, states(8, 6))
    assert positions(source.finish(block, 14)) == (11, 14)


def test_positions_that_are_fed_again_replace_the_former(source):
    block = source.begin(12, 0)
    source.take(block, 0, states(90, 10))
    source.take(block, 4, states(4, 8))
    rows = read_features(source.finish(block, 12), WIDTH)[:, 0].round().int() - 1
    assert rows.tolist() == [90, 91, 92, 93, *range(4, 12)]


@pytest.mark.parametrize("failure", ["raises", "not finite", "gap"])
def test_after_a_failure_only_later_positions_are_of_use(failure):
    fusion = Fusion()
    source = FeatureSource(fusion, 16)
    block = source.begin(12, 0)
    source.take(block, 0, states(0, 4))
    fusion.fails = failure == "raises"
    if failure != "gap":
        source.take(block, 4, states(4, 4) * (float("nan") if failure == "not finite" else 1))
    fusion.fails = False
    source.take(block, 8, states(8, 4))
    assert positions(source.finish(block, 12)) == (8, 12)


@pytest.mark.parametrize("end", [11, 13])
def test_features_that_end_elsewhere_are_not_sent(source, end):
    block = source.begin(12, 0)
    assert source.finish(block, 12) is None
    source.take(block, 0, states(0, 12))
    assert source.finish(block, end) is None


def test_wide_features_are_bounded_by_their_bytes():
    fusion = Fusion(8192)
    source = FeatureSource(fusion, 4096)
    block = source.begin(600, 0)
    source.take(block, 0, states(0, 600))
    made = source.finish(block, 600)
    assert made.num_bytes <= MAX_FEATURE_BYTES
    assert (made.count, made.end) == (MAX_FEATURE_BYTES // 8196, 600)
