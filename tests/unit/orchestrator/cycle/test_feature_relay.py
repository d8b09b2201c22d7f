"""Features between the workers of a session: what is kept, sent and dropped."""

import itertools

import pytest

from gammaray.blocks import MAX_FEATURE_BYTES, MAX_FEATURES, Features
from orchestrator.cycle.features import FeatureRelay

WIDTH = 4


def features(start, count, width=WIDTH):
    """Features whose bytes name their positions."""
    positions = range(start, start + count)
    data = b"".join(bytes([position % 251]) * width for position in positions)
    scales = b"".join((position % 251).to_bytes(4, "little") for position in positions)
    return Features(start, count, width, data, scales)


@pytest.fixture
def relay():
    made = FeatureRelay()
    made.serve("a head")
    return made


def test_parts_are_joined_in_order(relay):
    for start, count in ((0, 20), (20, 1), (21, 5)):
        relay.take(features(start, count))
    assert relay.waiting() == features(0, 26)
    assert (relay.count, relay.end) == (26, 26)
    assert relay.num_received == 26 * (WIDTH + 4)


def test_only_what_was_acknowledged_is_dropped(subtests):
    for held in range(28):
        with subtests.test(held=held):
            relay = FeatureRelay()
            relay.serve("a head")
            relay.take(features(3, 20))
            relay.delivered(held)
            relay.take(features(23, 3))
            first = min(max(held, 3), 23)
            assert relay.waiting() == features(first, 26 - first)
            assert relay.end == 26


def test_nothing_waits_after_all_was_acknowledged(relay):
    relay.take(features(0, 5))
    relay.delivered(5)
    assert relay.waiting() is None
    assert (relay.count, relay.end) == (0, 5)


def test_after_a_gap_only_the_later_ones_are_kept(relay):
    relay.take(features(0, 5))
    relay.take(features(9, 2))
    assert relay.waiting() == features(9, 2)


def test_positions_that_came_before_are_not_kept_twice(relay):
    relay.take(features(0, 5))
    relay.take(features(2, 5))
    assert relay.waiting() == features(0, 7)
    relay.take(features(1, 3))
    assert relay.waiting() == features(0, 7)


def test_another_width_begins_anew(relay):
    relay.take(features(0, 5))
    relay.take(features(5, 2, width=8))
    assert relay.waiting() == features(5, 2, width=8)


def test_another_head_begins_anew(relay):
    relay.take(features(0, 5))
    relay.serve("a head")
    assert relay.count == 5
    relay.serve("another")
    assert (relay.count, relay.end, relay.waiting()) == (0, 0, None)


def test_refused_ones_are_dropped_and_later_ones_kept(relay):
    relay.take(features(0, 5))
    relay.drop()
    assert (relay.waiting(), relay.end) == (None, 5)
    relay.take(features(5, 1))
    assert relay.waiting() == features(5, 1)


@pytest.mark.parametrize("width", [WIDTH, 4096])
def test_the_newest_are_kept_up_to_a_bound(relay, width):
    most = min(MAX_FEATURES, MAX_FEATURE_BYTES // (width + 4))
    relay.take(features(0, most, width))
    relay.take(features(most, 7, width))
    kept = relay.waiting()
    assert (kept.start, kept.end) == (7, most + 7)
    assert kept == features(7, most, width)
    assert kept.num_bytes <= MAX_FEATURE_BYTES


def test_relayed_bytes_are_those_that_came(relay):
    """However they are cut into messages, every position arrives once."""
    starts, sent = [0, 1, 4, 5, 17, 18, 30, 31], []
    for number, (start, end) in enumerate(itertools.pairwise(starts)):
        relay.take(features(start, end - start))
        if number % 2:
            sent.append(relay.waiting())
            relay.delivered(sent[-1].end)
    sent.append(relay.waiting())
    assert b"".join(part.data for part in sent) == features(0, 31).data
    assert b"".join(part.scales for part in sent) == features(0, 31).scales
