"""Completions that repeat themselves are found, counted and left out of the figures."""

import pytest

from gammaray.bench.loops import loops_line, repeated_share, without_loops
from gammaray.bench.measure import PLAIN, Turn
from gammaray.bench.systems import Sample

READ = tuple(range(60))
LOOP = (1, 2, 3, 4, 5, 6, 7, 8) * 8


def turn(*texts: tuple[int, ...]) -> Turn:
    return Turn(tuple(Sample(text, 1.0) for text in texts), 1.0)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ((), 0.0),
        ((5,) * 6, 0.0),
        ((5,) * 7, 0.5),
        (READ, 0.0),
        (LOOP, 1 - 8 / 59),
        ((*READ, *READ[:12]), 7 / 67),
    ],
    ids=[
        "empty",
        "one 6-gram",
        "two equal 6-grams",
        "no repetition",
        "a loop of eight",
        "twelve tokens again",
    ],
)
def test_repeated_share_counts_6_grams_that_occurred_before(text, share):
    assert repeated_share(text) == pytest.approx(share)


def test_turns_whose_plain_completion_is_a_loop_are_left_out_of_every_system():
    samples = {
        PLAIN: [[turn(READ), turn(LOOP)], [turn(READ), turn(LOOP)]],
        "other": [[turn(LOOP), turn(READ)], [turn(LOOP), turn(READ)]],
    }
    kept, loops = without_loops(samples)
    assert {name: [len(turns) for turns in found] for name, found in kept.items()} == {
        PLAIN: [1, 1],
        "other": [1, 1],
    }
    assert kept["other"][0][0].samples[0].token_ids == LOOP
    assert loops["kept"] == [0]
    assert loops["num_loops"] == 1
    assert loops["repeated_share"] == [[0.0], [pytest.approx(0.864, abs=1e-3)]]
    assert loops_line(loops) == "1 of 2 completions repeat themselves (loops): left out of the figures"


def test_figures_of_loops_alone_keep_them():
    kept, loops = without_loops({PLAIN: [[turn(LOOP), turn(LOOP)]]})
    assert len(kept[PLAIN][0]) == 2
    assert loops_line(loops) == "2 of 2 completions repeat themselves (loops): in the figures"
    assert loops_line(without_loops({PLAIN: [[turn(READ)]]})[1]) == ""
