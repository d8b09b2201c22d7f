"""Which drafter pays on which device: equal to the theory, and the command says it."""

import re
from dataclasses import replace

import pytest
from click.testing import CliRunner

from gammaray.cli import main
from gammaray.errors import InvalidArgumentError
from gammaray.maths import theory
from gammaray.maths.drafters import PARALLEL_BLOCK, Drafter, Kind, Load, drafters_for
from gammaray.maths.hardware import DEVICES, MODELS, Placement, find_model

SMALL, TARGET = MODELS["llama-3.2-1b"], MODELS["llama-3.1-8b"]
LOAD = Load(Placement(TARGET, "bf16", DEVICES["H100"]))
L4 = DEVICES["L4"]
PLAIN, PARALLEL, TEXT = Drafter(Kind.PLAIN, SMALL), Drafter(Kind.PARALLEL, SMALL), Drafter(Kind.TEXT)


def size(*arguments):
    result = CliRunner().invoke(main, ["size", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def speedup(drafter, card=L4, load=LOAD, sessions=1, drafters=1):
    return load.sizing(drafter, card, sessions, drafters).choose(drafters).speedup


def test_one_pass_per_block_is_the_theory_with_one_pass():
    load = replace(LOAD, rtt_ms=0.0, context=0)
    target_ms, draft_ms = 16.06 / 2.68, 2.47 / 0.24
    for gamma in range(1, PARALLEL_BLOCK + 1):
        cost = draft_ms / gamma / target_ms
        sizing = load.sizing(PARALLEL, L4)
        assert sizing.cycle_ms(0, 1) / sizing.cycle_ms(gamma, 1) * theory.expected_tokens(
            0.7, gamma
        ) == pytest.approx(theory.speedup(0.7, gamma, cost))
    sizing = load.sizing(PLAIN, L4)
    assert sizing.choose(1).gamma == theory.optimal_gamma(0.7, draft_ms / target_ms, max_gamma=16)


def test_one_pass_proposes_no_more_than_a_block():
    sizing = LOAD.sizing(PARALLEL, L4)
    jumps = [sizing.cycle_ms(gamma + 1, 1) - sizing.cycle_ms(gamma, 1) for gamma in range(1, 16)]
    assert [gamma for gamma, jump in enumerate(jumps, 1) if jump > 1.0] == [PARALLEL_BLOCK]


def test_ordinary_draft_on_a_small_card_never_pays_and_a_block_per_pass_does():
    assert LOAD.least_alpha(PLAIN, L4) is None
    assert speedup(PLAIN) == 1.0
    alpha = LOAD.least_alpha(PARALLEL, L4)
    assert 0.5 < alpha < 0.8
    assert speedup(PARALLEL, load=replace(LOAD, alpha=alpha)) > 1.0
    assert speedup(PARALLEL, load=replace(LOAD, alpha=alpha - 0.01)) == 1.0
    # as it does for a target whose pass is longer, and with quantised weights
    large = Load(Placement(MODELS["llama-3.3-70b"], "bf16", DEVICES["H100"], 4))
    assert large.least_alpha(PLAIN, L4) < 0.9
    assert LOAD.least_alpha(replace(PLAIN, weights="int4"), L4) < 0.7


def test_quantised_drafts_are_faster_and_faster_cards_better():
    for kind in (PLAIN, PARALLEL):
        gains = [
            speedup(replace(kind, weights=weights), DEVICES["A10"]) for weights in ("bf16", "int8", "int4")
        ]
        assert gains == sorted(gains)
        assert gains[0] < gains[-1]
    cards = [speedup(PARALLEL, DEVICES[name]) for name in ("L4", "A10", "L40S", "RTX-4090")]
    assert cards == sorted(set(cards))


def test_lookups_need_no_card_and_pay_from_the_first_accepted_token():
    assert LOAD.least_alpha(TEXT, L4) == 0.01
    assert speedup(TEXT) == pytest.approx(theory.expected_tokens(0.35, 16))
    assert LOAD.sizing(TEXT, L4, 10_000) is not None  # no memory of a card is needed


def test_head_in_the_target_takes_its_time_and_no_round_trip():
    head = Drafter(Kind.HEAD, TARGET.eagle_head())
    sizing = LOAD.sizing(head, L4, 8)
    assert sizing == LOAD.sizing(head, DEVICES["A10"], 8)  # the card of drafters does not matter
    own_ms = Placement(head.model, "bf16", DEVICES["H100"]).pass_ms(8, 1024)
    assert sizing.cycle_ms(3, 1) == pytest.approx(LOAD.target.pass_ms(8, 1024) + 3 * own_ms)
    remote = replace(PLAIN, model=head.model)
    assert speedup(head) > speedup(remote)
    far = replace(LOAD, rtt_ms=40.0)
    assert speedup(head, load=far) == speedup(head)
    assert speedup(remote, load=far) == 1.0
    capacity = LOAD.capacity(head, L4, 100.0, 4)
    assert (capacity.drafters, capacity.price_per_h) == (0, 2.69)
    assert capacity.sessions > LOAD.capacity(None, L4, 100.0, 4).sessions


def test_sessions_that_do_not_fit_a_card_are_not_sized():
    assert LOAD.sizing(PLAIN, L4, 2000, drafters=1) is None
    assert LOAD.sizing(PLAIN, L4, 2000, drafters=8) is not None


@pytest.mark.parametrize("drafter", [None, TEXT, PARALLEL], ids=["plain decoding", "text", "parallel"])
def test_capacity_is_the_last_load_at_which_all_get_their_rate(drafter):
    capacity = LOAD.capacity(drafter, L4, 100.0, 4)
    number = max(1, capacity.drafters)

    def rate(sessions):
        sizing = LOAD.sizing(drafter or TEXT, L4, sessions, number)
        return sizing.choose(0 if drafter is None else number).tokens_per_s / sessions

    assert rate(capacity.sessions) >= 100.0 > rate(capacity.sessions + 1)
    assert capacity.price_per_h == pytest.approx(2.69 + 0.44 * capacity.drafters)


def test_capacity_is_bounded_by_memory_and_zero_where_the_rate_cannot_be_had():
    assert LOAD.capacity(None, L4, 1.0, 4).sessions == LOAD.target.max_sessions(1024)
    assert LOAD.capacity(None, L4, 1000.0, 4).sessions == 0
    fast = DEVICES["RTX-4090"]
    assert LOAD.capacity(None, fast, 200.0, 4).sessions == 0
    assert LOAD.capacity(PARALLEL, fast, 200.0, 4).sessions > 10  # a rate that only speculation reaches


def test_drafters_are_compared_in_all_weight_types():
    names = [one.name for one in drafters_for(TARGET, SMALL)]
    assert len(names) == len(set(names)) == 11
    assert drafters_for(TARGET, SMALL, 4)[8].model == TARGET.first_layers(4)
    assert {one.kind for one in drafters_for(find_model("1B"), SMALL)} == {
        Kind.PLAIN,
        Kind.PARALLEL,
        Kind.TEXT,
    }


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"target": Placement(MODELS["llama-3.3-70b"], "bf16", DEVICES["H100"])}, "target"),
        ({"text_alpha": 1.0}, "text_alpha"),
        ({"context": -1}, "context"),
    ],
)
def test_wrong_load_is_refused_by_name(changed, field):
    with pytest.raises(InvalidArgumentError, match=field):
        replace(LOAD, **changed)


def test_command_compares_all_drafters_on_all_cards():
    output = size("--target", "llama-3.1-8b", "--on", "H100", "--cards", "L4,A100")
    assert "llama-3.1-8b bf16 on H100: 6.0 ms per pass" in output
    for title in (
        "One pass of the drafter",
        "Speedup of one stream",
        "32 sessions",
        "Alpha from",
        "Capacity",
    ):
        assert title in output
    row = r"plain llama-3.2-1b bf16\W+"
    assert re.search(row + r"10\.3\W+1\.5", output)
    assert re.search(row + r"-\W+1\.\d\d \(gamma \d\)", output)
    assert re.search(row + r"never\W+0\.\d\d", output)


def test_command_sizes_one_drafter_on_one_card():
    arguments = ("--target", "qwen3-32b", "--on", "H100", "--draft", "qwen3-0.6b", "--card", "L4")
    plain, parallel = size(*arguments), size(*arguments, "--drafter", "parallel", "--draft-weights", "int8")
    assert "target 24.4 ms (qwen3-32b bf16 on H100), draft 5.0 ms (plain qwen3-0.6b bf16 on L4)" in plain
    assert "draft 2.5 ms (parallel qwen3-0.6b int8 on L4)" in parallel
    for title in ("Drafters per target", "Speedup by draft pass", "Speedup by network time"):
        assert title in plain


def test_prices_of_the_user_decide_how_many_drafters_are_worth_it():
    arguments = ("--target", "qwen3-32b", "--on", "H100", "--draft", "qwen3-0.6b", "--card", "L4")
    assert re.search(r"^0 .* 1\.00 <- best", size(*arguments, "--price", "L4=5"), re.MULTILINE)
    assert re.search(
        r"^8 .*<- best", size(*arguments, "--price", "l4=0.001", "--price", "H100=9"), re.MULTILINE
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "8B"], "--target needs --on"),
        (["--target", "8B", "--on", "H100", "--target-ms", "3"], "excludes --target-ms"),
        (["--target", "8B", "--on", "H101"], "device: got 'H101'"),
        (["--target", "8B", "--on", "H100", "--card", "4xL4"], "card: got '4xL4'"),
        (
            ["--target", "8B", "--on", "H100", "--card", "L4", "--drafter", "early-exit"],
            "for early-exit one of",
        ),
        (
            ["--target", "llama-3.1-8b", "--on", "H100", "--card", "L4", "--sessions", "90000"],
            "sessions: got 90000",
        ),
        (["--target", "8B", "--on", "H100", "--price", "L4"], "price: got 'L4'"),
        (["--target", "8B", "--on", "H100", "--price", "L4=0"], "price: got 0"),
        (["--target", "8B", "--on", "H100", "--price", "K80=1"], "device: got 'K80'"),
        (["--target-ms", "3"], "Missing --alpha, --draft-ms"),
        (["--target", "8B", "--on", "H100", "--rate", "0"], "--rate"),
    ],
)
def test_wrong_options_are_refused_by_name(arguments, words):
    result = CliRunner().invoke(main, ["size", *arguments])
    assert result.exit_code == 2
    assert words in result.output
