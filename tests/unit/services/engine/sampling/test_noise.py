"""Published test vectors of the generator, golden values, and noise that depends on its position only."""

import gc

import pytest
import torch
from torch import Tensor

from services.engine.sampling.noise import Noise, exponential, philox4x32, philox_word

KNOWN_ANSWERS = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_philox_known_answers_match(counter, key, words):
    tensors = tuple(torch.tensor([word], dtype=torch.int64) for word in counter)
    assert tuple(int(word) for word in philox4x32(tensors, key)) == words
    assert philox_word(counter, key) == words[0]


def test_philox_broadcast_counter_equals_scalars():
    index, position = torch.arange(5)[None, :], torch.arange(2**32 - 3, 2**32)[:, None]
    constant = torch.tensor([[9]])
    words = philox4x32((index, position, constant, constant), 2**63 + 5)[0]
    expected = [[philox_word((i, int(t), 9, 9), 2**63 + 5) for i in range(5)] for t in position]
    assert words.tolist() == expected


def test_exponential_seed_42_position_7_is_golden():
    golden = [1.47724484790, 0.52067659153, 1.38653856742, 1.00013291022]
    assert exponential(42, 7, 1, 4)[0].tolist() == pytest.approx(golden, abs=1e-11)


def test_exponential_smallest_and_largest_are_finite():
    noise = exponential(1, 0, 200, 2048)
    assert bool((noise > 0).all())
    assert bool(noise.isfinite().all())
    assert float(noise.mean()) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 5, 2048, 50_257])
def test_gumbel_any_window_equals_direct_computation(vocab_size):
    noise = Noise(7, 3, vocab_size)
    for start, count in ((100, 1), (101, 9), (90, 3), (112, 30), (100, 4), (3, 2), (0, 1)):
        direct = -exponential(7, start, count, vocab_size, sample_index=3).log()
        assert torch.equal(noise.gumbel(start, count), direct)


def test_gumbel_many_positions_keeps_bounded_memory():
    noise = Noise(7, 0, 152_000)
    for start in range(0, 60, 5):
        noise.gumbel(start, 5)
    kept = [held for held in gc.get_objects() if type(held) is Tensor and held.shape[-1:] == (152_000,)]
    assert 0 < sum(rows.nbytes for rows in kept) <= 12 << 20


def test_residual_gumbel_is_a_row_of_the_independent_noise():
    noise = Noise(7, 0, 64)
    assert torch.equal(noise.residual_gumbel(9), noise.independent_gumbel(8, 3)[1])


def test_accept_uniform_counter_is_position_and_stream_2():
    word = philox_word((0, 11, 0, 3 << 8 | 2), 7)
    assert Noise(7, 3, 64).accept_uniform(11) == (word + 0.5) / 2**32


def test_draft_bits_depend_on_base_and_are_top_bits():
    noise = Noise(7, 3, 64)
    assert noise.draft_bits(10, 11, 12) == philox_word((0, 11, 10, 3 << 8 | 1), 7) >> 20
    assert len({noise.draft_bits(base, 11, 24) for base in range(12)}) == 12
    assert all(0 <= noise.draft_bits(0, t, 1) <= 1 for t in range(20))


def test_streams_at_the_same_place_draw_different_words():
    words = set[int]()
    for sample in (0, 1):
        noise = Noise(7, sample, 4)
        words.add(int(noise.accept_uniform(5) * 2**32))
        words |= {noise.draft_bits(base, 5, 32) for base in (0, 1)}
        for stream in (0, 3):
            first = exponential(7, 5, 1, 1, sample_index=sample, stream=stream)
            words.add(int(-torch.expm1(-first) * 2**32))
    assert len(words) == 10
