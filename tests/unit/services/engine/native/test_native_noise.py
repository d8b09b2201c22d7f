"""The kernel's Philox words against those of torch's integers."""

from __future__ import annotations

import pytest
import torch
from test_engine_native import variants

from services.engine.native.library import Kernel, open_kernel
from services.engine.sampling import noise
from services.engine.sampling.noise import Noise, exponential

PLACES = ((0, 0), (2**64 - 1, 7), (0x299F31D0A4093822, 2**32 - 2), (5, -2))


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("ids", [None, [70_001, 0, 5, 6, 1_000, 5]])
def test_compiled_noise_equals_torchs_to_the_bit(
    variant: str, ids: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids = None if ids is None else torch.tensor(ids)
    count = 1_003 if ids is None else len(ids)

    def rows() -> torch.Tensor:
        made = [
            exponential(*place, 3, count, sample_index=9, stream=3, token_ids=token_ids) for place in PLACES
        ]
        return torch.stack(made)

    kernel = open_kernel(variant)
    assert kernel.library is not None
    monkeypatch.setattr(noise, "load_kernel", lambda: kernel)
    ours = rows()
    monkeypatch.setattr(noise, "load_kernel", lambda: Kernel(None))
    assert torch.equal(ours, rows())


@pytest.mark.parametrize("variant", variants())
def test_rows_of_a_session_equal_torchs(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = open_kernel(variant)
    monkeypatch.setattr(noise, "load_kernel", lambda: kernel)
    ours = Noise(42, 1, 2_050).gumbel(30, 20)
    monkeypatch.setattr(noise, "load_kernel", lambda: Kernel(None))
    assert torch.equal(ours, Noise(42, 1, 2_050).gumbel(30, 20))
