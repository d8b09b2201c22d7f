"""Features of a head on the wire: float8 values (e4m3fn), with one float32 scale per row.

A value x of a row whose largest magnitude is m comes back within |x| / 16 + m / 448 / 1024 of x. Values in
wider types are never sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gammaray.blocks import Features
from gammaray.errors import InvalidArgumentError

__all__ = ["read_features", "to_features"]

_TYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(_TYPE).max
_LEAST_SCALE = torch.finfo(torch.float32).tiny


def to_features(start: int, rows: Tensor) -> Features | None:
    """Return features as they are sent; None if a value is not finite.

    Args:
        start: Position of the first.
        rows: [positions, width].
    """
    rows = rows.detach().float().cpu()
    if not rows.isfinite().all():
        return None
    scales = (rows.abs().amax(-1, keepdim=True) / _LARGEST).clamp_min(_LEAST_SCALE)
    values = (rows / scales).clamp(-_LARGEST, _LARGEST).to(_TYPE)
    data = values.view(torch.uint8).numpy().tobytes()
    count, width = rows.shape
    return Features(start, count, width, data, scales.numpy().astype("<f4").tobytes())


def read_features(features: Features, width: int) -> Tensor:
    """Return features that came over the wire, [positions, width] in float32.

    Args:
        features: Of checked sizes, see `gammaray.wire.blocks.features_from_proto`.
        width: That of the head's features.

    Raises:
        InvalidArgumentError: They have another width, or values that are not finite.
    """
    if features.width != width:
        raise InvalidArgumentError("features.width", features.width, f"{width}, that of this head")
    values = torch.frombuffer(bytearray(features.data), dtype=torch.uint8).view(_TYPE)
    scales = torch.frombuffer(bytearray(features.scales), dtype=torch.float32)
    rows = values.view(features.count, width).float() * scales[:, None]
    if not rows.isfinite().all():
        raise InvalidArgumentError("features", "values that are not finite", "finite values")
    return rows
