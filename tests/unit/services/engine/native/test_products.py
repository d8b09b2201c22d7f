"""Products of rows and a matrix: the same bits for a row, whatever rows come with it."""

from ctypes import byref
from typing import Any

import pytest
import torch
from torch import Tensor

from services.engine.core.quantised import quantise
from services.engine.native.library import open_kernel, usable_variants
from services.engine.native.weights import Packer

OUTPUTS = 97
"""No whole number of panels on any instruction set."""

MOST_ROWS = 60
"""More than two groups of rows."""


def random(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(size[-1]))


def packed(library: Any, kind: str, inputs: int, kept: list[object]) -> tuple[Any, Tensor]:
    """Return a matrix with biases for the kernel, and the weights and biases that it stands for."""
    weight, bias = random(OUTPUTS, inputs) * 0.1, random(OUTPUTS)
    if kind == "bfloat16":
        weight = weight.bfloat16().float()
    quantised = {}
    if kind == "int8":
        quantised[weight.data_ptr()] = quantise(weight)
    matrix = Packer(library, kept, quantised).matrix([(weight, bias)])
    exact = quantised[weight.data_ptr()].dequantised() if quantised else weight
    return matrix, torch.cat((exact, bias[:, None]), 1)


def mapped(library: Any, matrix: Any, rows: Tensor, threads: int) -> Tensor:
    """Return the products of some rows, and one row more, which is left as NaN."""
    made = torch.full((len(rows) + 1, OUTPUTS), torch.nan)
    scratch = torch.empty(library.gr_map_scratch_size(byref(matrix), len(rows)))
    places = rows.data_ptr(), made.data_ptr(), scratch.data_ptr()
    library.gr_map(byref(matrix), len(rows), *places, threads)
    return made


# Below one block of inputs, exactly one, a little more, and several with a rest.
# 45 and 303 leave one and three inputs beyond a panel's cache lines.
@pytest.mark.parametrize("variant", usable_variants())
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("inputs", [45, 96, 100, 303])
def test_products_do_not_depend_on_the_other_rows_or_the_number_of_threads(variant, kind, inputs):
    """More threads than panels, and panels that do not divide evenly."""
    library = open_kernel(variant).library
    kept: list[object] = []
    matrix, exact = packed(library, kind, inputs, kept)

    def product(rows: Tensor, threads: int = 1) -> Tensor:
        made = mapped(library, matrix, rows, threads)
        assert made[-1].isnan().all()  # nothing is written behind the last row
        return made[:-1]

    rows = random(MOST_ROWS, inputs)
    alone = torch.cat([product(row[None].contiguous()) for row in rows])
    expected = torch.cat((rows, torch.ones(MOST_ROWS, 1)), 1).double() @ exact.double().T
    assert torch.allclose(alone.double(), expected, atol=1e-4)
    for count in range(2, MOST_ROWS + 1):
        assert torch.equal(product(rows[:count].contiguous()), alone[:count])
    for threads in range(2, 21):
        assert torch.equal(product(rows[:7].contiguous(), threads), alone[:7])
