"""Every launch of a step compiles for cards that are not here, within their shared memory and registers."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    pytest.skip("Triton is not installed; to enable: make gpu-checks", allow_module_level=True)

from benchmarks.gpu.compiled import CARDS, SHAPES, Launch, compile_launch, launches

LARGEST = max(CARDS.values())

MOST_SPILLED = 64
"""Bytes per thread: some registers of a loop's start do no harm, an accumulator would."""


@pytest.mark.parametrize("name", SHAPES)
def test_kernels_fit_the_card_with_the_least_shared_memory(name):
    made = [compile_launch(launch, 86) for launch in launches(name, CARDS[86])]
    assert {one.kernel for one in made} == {
        "combine_kernel",
        "norm_kernel",
        "pick_kernel",
        "product_kernel",
        "rotate_kernel",
        "split_kernel",
        "stripe_kernel",
    }
    assert [one for one in made if not one.fits] == []
    assert [one for one in made if one.spilled_bytes > MOST_SPILLED] == []


@pytest.mark.parametrize("card", sorted(set(CARDS) - {86}))
def test_kernels_fit_every_card(card):
    made = [compile_launch(launch, card) for launch in launches("llama-3.1-8b", CARDS[card])]
    assert [one for one in made if not one.fits or one.spilled_bytes > MOST_SPILLED] == []


def products(shared_bytes: int, rows: int) -> list[Launch]:
    """Return the launches of products with that many rows, for a card with that much shared memory."""
    found = launches("llama-3.1-8b", shared_bytes, [rows])
    return [one for one in found if one.kernel.fn.__name__ == "product_kernel"]


def test_tiles_of_a_large_card_are_found_too_large_for_a_small_one():
    """The fault of one setting for all cards: 147,456 of 101,376 bytes at 17 to 32 rows."""
    made = [compile_launch(launch, 86) for launch in products(LARGEST, 32)]
    assert max(one.shared_bytes for one in made) == 147_456
    assert not all(one.fits for one in made)


def test_sums_of_a_product_are_taken_in_the_same_order_for_all_rows():
    """All numbers of rows have the same matrix instruction, and the same steps over the inner dimension."""
    found = {rows: products(CARDS[90], rows) for rows in (1, 8, 17, 32)}
    depths = {tuple(one.options["DEPTH"] for one in launches_) for launches_ in found.values()}
    assert len(depths) == 1
    instructions = set()
    for launches_ in found.values():
        made = launches_[0].kernel
        compile_launch(launches_[0], 90)
        code = newest_code(made)
        instructions.add(tuple(sorted({line.split()[0] for line in code.splitlines() if "mma.sync" in line})))
        assert "wgmma" not in code
    assert len(instructions) == 1


def newest_code(kernel) -> str:
    """Return the PTX of the kernel that was compiled last."""
    (cache, *_) = kernel.device_caches[90]
    return list(cache.values())[-1].asm["ptx"]
