"""Where transformers models pass their hidden states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from services.engine.core.batch import Taps
from services.engine.core.errors import UnsupportedModelError
from services.engine.core.model import LoadedModel, load_model
from services.engine.hf.probe import probe_model
from services.engine.hf.taps import TapPoints, find_tap_points
from tests.support.engine_helpers import tiny_model


def found(loaded: LoadedModel) -> TapPoints:
    points = find_tap_points(loaded, probe_model(loaded))
    assert isinstance(points, TapPoints)
    return points


def test_find_passes_over_lists_of_other_modules(tmp_path: Path) -> None:
    """A list of as many other modules, and one in another order, are not the layers."""
    loaded = load_model(str(tiny_model("llama", tmp_path)), device="cpu")
    layout = probe_model(loaded)
    layers = loaded.module.model.layers
    loaded.module.model.experts = nn.ModuleList(nn.Identity() for _ in layers)
    points = find_tap_points(loaded, layout)
    assert isinstance(points, TapPoints)
    assert points.layers is layers
    loaded.module.model.layers = nn.ModuleList(reversed(layers))
    assert isinstance(find_tap_points(loaded, layout), str)


def test_recording_removes_its_hooks(tmp_path: Path) -> None:
    loaded = load_model(str(tiny_model("llama", tmp_path)), device="cpu")
    points = found(loaded)
    taps = Taps((0,), torch.full((2, 1, 32), 7.0))
    with pytest.raises(ZeroDivisionError), points.recording(taps):
        raise ZeroDivisionError
    # Its other arguments are missing, which it finds out after its hooks ran.
    with pytest.raises(TypeError):
        points.layers[0](torch.zeros(1, 2, 32))
    assert (taps.states == 7.0).all()


def test_recording_bypassed_modules_raises(tmp_path: Path) -> None:
    """A forward that does not call the modules would leave the states unwritten."""
    points = found(load_model(str(tiny_model("llama", tmp_path)), device="cpu"))
    with (
        pytest.raises(UnsupportedModelError, match="bypasses the modules of the hidden states \\[1, 3\\]"),
        points.recording(Taps((1, 3), torch.empty(2, 2, 32))),
    ):
        pass
