"""Times of passes from data sheets: those that the project's design computed, and what bounds them."""

import pytest

from gammaray.errors import InvalidArgumentError
from gammaray.maths.hardware import BITS, DEVICES, MODELS, Model, Placement, find_device, find_model

CARDS = ("T4", "L4", "A10", "L40S", "RTX-4090")
# Milliseconds of one pass at 80 % of the bandwidth. A parallel draft's pass is a whole block.
PASSES = [
    ("llama-3.2-1b", "bf16", (9.6, 10.3, 5.1, 3.6, 3.1)),
    ("llama-3.2-1b", "int4", (2.9, 3.1, 1.6, 1.1, 0.9)),
    ("0.4B", "bf16", (3.1, 3.3, 1.7, 1.2, 1.0)),  # an EAGLE-3 head of an 8B model
    ("0.4B", "int8", (1.6, 1.7, 0.8, 0.6, 0.5)),
]
TARGETS = [
    ("llama-3.1-8b", "bf16", "H100", 6),
    ("llama-3.3-70b", "fp8", "4xH100", 7),
    ("llama-3.3-70b", "bf16", "4xH100", 13),
    ("llama-3.1-405b", "fp8", "8xH100", 19),
]


@pytest.mark.parametrize(("model", "weights", "expected"), PASSES)
def test_passes_of_drafters(model, weights, expected):
    found = [Placement(find_model(model), weights, DEVICES[card]).pass_ms() for card in CARDS]
    assert found == pytest.approx(expected, abs=0.051)


@pytest.mark.parametrize(("model", "weights", "on", "expected"), TARGETS)
def test_passes_of_targets(model, weights, on, expected):
    assert round(Placement(find_model(model), weights, *find_device(on)).pass_ms()) == expected


def test_caches_are_read_too_and_take_memory():
    target = Placement(MODELS["llama-3.1-8b"], "bf16", DEVICES["H100"])
    # 2 x 32 layers x 8 heads x 128 x 2 bytes are 128 KiB per token
    read_gb = 32 * 1000 * 131_072e-9
    assert target.pass_ms(32, 1000) - target.pass_ms() == pytest.approx(1e3 * read_gb / (3350 * 0.8))
    assert target.max_sessions(1000) == int((80 * 0.9 - 16.06) / (1000 * 131_072e-9))
    assert Placement(MODELS["llama-3.3-70b"], "bf16", DEVICES["H100"]).max_sessions(1) == 0


@pytest.mark.parametrize("weights", BITS)
def test_free_tokens_are_where_arithmetic_takes_as_long(weights):
    target = Placement(MODELS["llama-3.1-8b"], weights, DEVICES["H100"], 2)
    arithmetic_ms = 1e3 * 2 * 8.03e9 * target.free_tokens() / (2 * 989e12 * 0.6)
    assert arithmetic_ms == pytest.approx(target.pass_ms(), rel=0.02)


def test_early_exit_has_its_share_of_the_layers_and_the_head():
    model = MODELS["llama-3.1-8b"].first_layers(8)
    assert model.parameters == pytest.approx((8.03 - 2 * 0.525) / 4 + 0.525)
    assert model.kv_bytes == 131_072 / 4
    tied = MODELS["qwen3-0.6b"].first_layers(14)
    assert tied.parameters == pytest.approx((0.596 - 0.156) / 2 + 0.156)


def test_eagle_head_has_the_size_of_published_ones():
    # yuhuili/EAGLE3-LLaMA3.1-Instruct-8B has 0.42 billion parameters without an embedding.
    head = MODELS["llama-3.1-8b"].eagle_head()
    assert head.parameters == pytest.approx(0.425, abs=0.005)
    assert head.kv_bytes == 131_072 / 32
    assert find_model("8B").eagle_head() is None


def test_names_and_sizes():
    assert find_device("4xh100") == (DEVICES["H100"], 4)
    assert find_device("RTX 4090") == (DEVICES["RTX-4090"], 1)
    assert find_model("Llama-3.1-8B") is MODELS["llama-3.1-8b"]
    assert find_model("135M") == Model("135M", 0.135)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: find_device("K80"), "device: got 'K80', allowed: one of T4"),
        (
            lambda: find_device("0xH100") and Placement(find_model("1B"), "bf16", *find_device("0xH100")),
            "devices",
        ),
        (lambda: find_model("0B"), "model: got '0B'"),
        (lambda: find_model("eight"), "model: got 'eight', allowed: one of qwen3-0.6b"),
        (
            lambda: Placement(find_model("1B"), "int3", DEVICES["L4"]),
            "weights: got int3, allowed: one of bf16",
        ),
        (lambda: find_model("1B").first_layers(2), "for an early exit one of"),
        (lambda: MODELS["llama-3.1-8b"].first_layers(32), "early exit"),
    ],
)
def test_wrong_values_are_refused_by_name(make, words):
    with pytest.raises(InvalidArgumentError, match=words):
        make()
