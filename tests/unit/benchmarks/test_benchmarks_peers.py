"""Comparisons: speeds without the first token, ranges, bounds, equality, references; ties within noise."""

from pathlib import Path

import pytest

from benchmarks.baselines import Gaps
from benchmarks.equivalence import Made, chat_prompts, count
from benchmarks.peers.figures import decode_bounds, decode_speeds, equality, figures
from benchmarks.peers.run import Settings, has_changed_tokens
from benchmarks.peers.stacks import with_server_times
from benchmarks.prompts import CATEGORIES, load_tasks
from gammaray.bench.measure import Turn
from gammaray.bench.systems import Sample
from gammaray.types import DrafterKind
from gammaray.wire.cycles import CycleRecord, WorkerCall
from orchestrator.text.tokenizer import Tokenizer
from services.demo_pair import TARGET_DIR


def sample(arrivals: list[tuple[float, int]], target_s: float | None = None) -> Sample:
    """A completion with these chunks, finished with the last one."""
    count = sum(tokens for _, tokens in arrivals)
    return Sample(tuple(range(count)), arrivals[-1][0], tuple(arrivals), target_s=target_s)


def turn(*samples: Sample) -> Turn:
    return Turn(samples, sum(one.seconds for one in samples))


def tokens(*token_ids: int) -> list[list[Turn]]:
    """One repetition with one completion of these tokens."""
    return [[turn(Sample(token_ids, 1.0))]]


def test_decode_speed_is_a_ratio_of_sums_over_a_repetition():
    one, other = sample([(1.0, 1), (2.0, 10)]), sample([(1.0, 1), (5.0, 10)])
    assert decode_speeds([[turn(one), turn(other)], [turn(one)]]) == [4.0, 10.0]
    for only in (Sample((1, 2), 1.0), sample([(1.0, 8)])):  # no stream, one chunk
        assert decode_speeds([[turn(only)]]) is None


def test_figures_take_ratios_within_each_repetition_for_both_speeds():
    # The second repetition is three times slower for all.
    plain = [[turn(sample([(1.0 * f, 1), (5.0 * f, 4)]))] for f in (1, 3)]
    fast = [[turn(sample([(1.0 * f, 1), (3.0 * f, 4)], target_s=1.0 * f))] for f in (1, 3)]
    row = figures("gammaray-suffix", {"gammaray-0": plain, "gammaray-suffix": fast}, "gammaray-0")
    assert row["decode_tokens_per_s"]["values"] == pytest.approx((2.0, 2 / 3))
    assert row["decode_over_plain"]["values"] == pytest.approx((2.0, 2.0))
    assert row["over_plain"]["values"] == pytest.approx((5 / 3, 5 / 3))
    assert (row["tokens_per_s"]["least"], row["tokens_per_s"]["largest"]) == pytest.approx((5 / 9, 5 / 3))
    assert row["bound_share"]["median"] == pytest.approx(0.5)


def test_equality_counts_and_names_the_first_different_token():
    samples = {"a": tokens(1, 2, 3), "b": tokens(1, 9, 3), "c": tokens(1, 2, 3)}
    ours, theirs = equality(samples, {"a": "b", "c": "a"}, frozenset())
    assert (ours["compared"], ours["equal"]) == (1, 0)
    assert ours["different"] == [{"repetition": 0, "completion": 0, "token": 1}]
    assert (theirs["reference"], theirs["equal"]) == ("a", 1)


def test_equality_ends_at_the_references_end_of_sequence_token():
    samples = {"bans it": tokens(1, 2, 5, 6), "emits it": tokens(1, 2, 0, 7), "differs": tokens(1, 4, 0, 7)}
    (banned,) = equality(samples, {"bans it": "emits it"}, frozenset({0}))
    (differs,) = equality(samples, {"differs": "emits it"}, frozenset({0}))
    assert banned["equal"] == 1
    assert differs["equal"] == 0


@pytest.mark.parametrize(("system", "reference", "changed"), [
    ("gammaray-suffix", "gammaray-0", True),
    ("gammaray-0", "generate", False),
    ("llama.cpp-draft-4", "llama.cpp", False),
    ("lookup-8", "generate", False),
])  # fmt: skip
def test_only_changes_within_gammaray_fail_the_run(system, reference, changed):
    count = {"system": system, "reference": reference, "compared": 3, "equal": 2}
    assert has_changed_tokens({"points": [{"equality": [count]}]}) is changed
    assert not has_changed_tokens({"points": [{"equality": [{**count, "equal": 3}]}]})


def record(start_s: float, base_position: int, emitted: int, compute_s: float | None) -> CycleRecord:
    """A cycle of one second of which only this matters."""
    call = None if compute_s is None else WorkerCall("", 1, 0, 0, 0, 0.0, compute_s, 1, "")
    return CycleRecord(
        start_s, 1.0, 0.0, 1.0, 0, 1, base_position, 4, "", 4, 1, 1, emitted, None, DrafterKind.SUFFIX, False,
        False, 0, None, call,
    )  # fmt: skip


CYCLES = [
    record(70.0, 100, 2, 0.9),
    record(71.0, 102, 3, 0.5),
    record(72.0, 105, 1, None),
    record(73.0, 106, 1, 0.25),
]


def test_server_times_begin_at_the_end_of_the_first_chunks_cycle():
    # Called at 69; the first chunk was ready after 2 s and came, like all others, after 6 s.
    late = sample([(6.0, 2), (6.0, 3), (6.0, 1), (6.0, 1)])
    found = with_server_times(late, CYCLES, 69.0)
    assert (found.decode_s, found.target_s) == (4.0, 0.75)
    speed, bound = decode_speeds([[turn(found)]]), decode_bounds([[turn(found)]])
    assert (speed, bound) == ([1.25], [5 / 0.75])


def test_settings_are_recorded_without_paths_of_the_machine(tmp_path):
    inside, outside = Path.cwd() / "build" / "model.gguf", tmp_path / "llama-server"
    given = {"categories": ("chat",), "num_prompts": 1, "max_tokens": 8, "repetitions": 1}
    given |= {"temperatures": (0.0,), "streams": (1,), "gguf": inside, "llama_server": str(outside)}
    recorded = Settings("build/models/own", None, **given).recorded()
    assert recorded["gguf"] == str(Path("build", "model.gguf"))
    assert recorded["llama_server"] == "llama-server"
    assert recorded["target"] == "build/models/own"
    assert recorded["max_tokens"] == 8
    with pytest.raises(ValueError, match="without: engine is none of gammaray-0, gammaray-adaptive"):
        Settings("demo", None, **given, without=("engine", "generate"))
    with pytest.raises(ValueError, match="gammas: one is not in 1 to 64"):
        Settings("demo", None, **given, gammas=(2, 65))


EXPECTED = Made((5, 6, 7, 8))
GAPS = Gaps((2.0, 1.0, 1e-6, 3.0), (1, 2, 9, 4), noise=1e-5)


def test_runner_up_within_the_noise_is_a_tie_and_the_rest_is_not_compared():
    found = count("c", [Made((5, 6, 9, 1))], [EXPECTED], [GAPS], GAPS.noise)
    assert found["tied"] == [{"prompt": 0, "token": 2, "ours": 9, "theirs": 7, "gap": 1e-6, "runner_up": 9}]
    assert (found["equal"], found["different"], found["tokens"]) == (0, [], 2)


@pytest.mark.parametrize(
    ("tokens", "place"),
    [
        pytest.param((5, 6, 3, 8), 2, id="neither of the two largest"),
        pytest.param((5, 2, 7, 8), 1, id="the second one, clearly below the first"),
        pytest.param((5, 6), 2, id="too short, though the next token would be a tie"),
        pytest.param((5, 6, 7, 8, 9), 4, id="too long"),
    ],
)
def test_other_differences_are_no_ties(tokens, place):
    found = count("c", [Made(tokens)], [EXPECTED], [GAPS], GAPS.noise)
    assert (found["equal"], found["tied"]) == (0, [])
    assert [(one["prompt"], one["token"]) for one in found["different"]] == [(0, place)]


def test_within_gammaray_nothing_is_a_tie():
    found = count("c", [Made((5, 6, 9, 8))], [EXPECTED])
    assert found["different"] == [{"prompt": 0, "token": 2}]


def test_chat_prompts_are_the_templates_as_transformers_renders_it():
    made, compared = chat_prompts(str(TARGET_DIR), CATEGORIES[:2], 2)
    assert (compared["completions"], compared["equal"]) == (4, 4)
    tokenizer = Tokenizer(str(TARGET_DIR))
    assert tokenizer.decode(made[0]) == tokenizer.render_chat(load_tasks(CATEGORIES[:1], 1)[0].messages)
