"""Features on the wire: float8 with a scale per row, and what of them is refused."""

import struct
from dataclasses import replace

import pytest
import torch

from gammaray.blocks import MAX_FEATURES, Features
from gammaray.errors import InvalidArgumentError
from gammaray.wire.blocks import features_from_proto, features_to_proto
from services.heads.features import read_features, to_features


def rows(count, width, seed=0):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=made) * torch.logspace(-6, 6, count)[:, None]


def error_bound(x):
    """Half a step of float8: of the value itself, or the least step of its row."""
    return x.abs() / 16 + x.abs().amax(-1, keepdim=True) / 448 / 1024


@pytest.mark.parametrize(("count", "width"), [(1, 1), (7, 33), (64, 576)])
def test_values_come_back_within_half_a_step(count, width):
    sent = rows(count, width)
    features = to_features(5, sent)
    assert features.num_bytes == count * (width + 4)
    assert (features.start, features.count, features.end) == (5, count, 5 + count)
    got = read_features(features, width)
    assert got.dtype is torch.float32
    assert ((got - sent).abs() <= error_bound(sent) * (1 + 1e-5)).all()
    # The bound is tight: values of half the precision would break it.
    coarse = sent.view(torch.int32).bitwise_and(-(1 << 21)).view(torch.float32)
    assert not ((coarse - sent).abs() <= error_bound(sent)).all() or count * width < 100


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-38, 1e38])
def test_rows_of_any_magnitude_stay_finite(scale):
    sent = torch.tensor([[1.0, -0.5, 0.25]]) * scale
    got = read_features(to_features(0, sent), 3)
    assert ((got - sent).abs() <= error_bound(sent) + 2e-38).all()


def test_the_largest_value_of_a_row_is_exact():
    sent = torch.tensor([[448.0, -448.0, 1.0], [7.0, 0.0, -7.0]])
    assert torch.equal(read_features(to_features(0, sent), 3), sent)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_not_sent(bad):
    sent = rows(3, 8)
    sent[1, 2] = bad
    assert to_features(0, sent) is None


def test_rows_in_other_types_are_sent_alike():
    sent = rows(3, 8).bfloat16()
    assert to_features(0, sent) == to_features(0, sent.float())


def test_later_rows_are_those_that_were_sent():
    sent = rows(6, 8)
    features = to_features(10, sent)
    for start in (0, 10, 12, 15):
        rest = features.after(start)
        first = max(0, start - 10)
        assert (rest.start, rest.count) == (10 + first, 6 - first)
        assert rest == replace(to_features(rest.start, sent[first:]))
    assert features.after(99).count == 0


def test_message_carries_them_unchanged():
    features = to_features(3, rows(4, 8))
    assert features_from_proto(features_to_proto(features), 7) == features


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"count": 0}, "features.count: got 0"),
        ({"count": MAX_FEATURES + 1}, "features.count: got 4097"),
        ({"count": 3}, "an end at 6"),
        ({"start": 4}, "features: got an end at 8, allowed: an end at 7"),
        ({"start": 2}, "features: got an end at 6, allowed: an end at 7"),
        ({"width": 7}, "features.data: got 32 bytes, allowed: 28 bytes for 4 rows of 7"),
        ({"width": 0, "data": b""}, "features.data: got 0 bytes"),
        ({"data": b"\0" * 31}, "features.data: got 31 bytes"),
        ({"scales": b"\0" * 15}, "features.scales: got 15 bytes"),
        ({"width": 1 << 21, "data": b"\0" * (1 << 23)}, "at most 4194304"),
    ],
)
def test_wrong_sizes_are_refused(change, reason):
    message = features_to_proto(to_features(3, rows(4, 8)))
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(InvalidArgumentError, match=reason):
        features_from_proto(message, 7)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_scales_that_make_no_finite_values_are_refused(value):
    features = to_features(0, rows(2, 8) + 1)
    bad = replace(features, scales=struct.pack("<2f", 1.0, value))
    with pytest.raises(InvalidArgumentError, match="not finite"):
        read_features(bad, 8)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_codes_that_are_no_number_are_refused(code):
    features = to_features(0, rows(2, 8))
    bad = replace(features, data=features.data[:-1] + bytes([code]))
    with pytest.raises(InvalidArgumentError, match="not finite"):
        read_features(bad, 8)


def test_another_width_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"features.width: got 8, allowed: 9"):
        read_features(to_features(0, rows(2, 8)), 9)
    assert isinstance(to_features(0, rows(2, 8)), Features)
