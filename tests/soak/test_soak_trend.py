"""The soak's detection of growth: growth, flat values, noise, and the warm-up."""

import json
import random

import pytest

from tests.fuzz.campaign import Campaign
from tests.soak.soak_census import Census
from tests.soak.soak_run import Options, Outcome, figures, table
from tests.soak.trend import BOUNDS, Bound, trend

BOUND = Bound(slack=4.0, per_hour=30.0)
AT_S = [30.0 * number for number in range(60)]
"""Half an hour: ten minutes from the middle of the second third to that of the last, so +9 is allowed."""


def noise(number: int, width: float) -> float:
    return random.Random(number).uniform(-width, width)


@pytest.mark.parametrize(
    ("value", "grows"),
    [
        pytest.param(lambda n: 500.0, False, id="flat"),
        pytest.param(lambda n: 500.0 + n, True, id="grows-by-two-a-minute"),
        pytest.param(lambda n: 500.0 + n + noise(n, 5.0), True, id="grows-with-noise"),
        pytest.param(lambda n: 500.0 + 0.4 * n, False, id="grows-within-the-bound"),
        pytest.param(lambda n: 500.0 - n, False, id="shrinks"),
        pytest.param(lambda n: 500.0 + noise(n, 60.0), False, id="noisy"),
        pytest.param(lambda n: 300.0 if n < 15 else 500.0, False, id="step-in-the-warm-up"),
        pytest.param(lambda n: 500.0 if n < 42 else 520.0, True, id="step-in-the-last-third"),
        pytest.param(lambda n: 900.0 if n == 55 else 500.0, False, id="one-peak"),
        pytest.param(lambda n: 500.0 + 40.0 * (n % 7), False, id="saw-teeth"),
    ],
)
def test_trend_detects_growth(value, grows):
    found = trend(AT_S, [value(number) for number in range(60)], BOUND)
    assert found.allowed == pytest.approx(9.0)
    assert found.grows is grows, found


POOL = BOUNDS["pool_threads"]
# As counted in two processes of Ray, every half minute; a test suite ran during the middle of the run.
GCS_SERVER = [27] * 19 + [28] * 16 + [29, 29, 31, 32, 33, 33] + [35] * 10
CONTROLLER = [30] * 37 + [31, 32, 34] + [35] * 11


@pytest.mark.parametrize("values", [GCS_SERVER, CONTROLLER])
def test_one_step_of_a_pool_is_no_leak_but_one_of_other_threads_is(values):
    at_s = [30.0 * number for number in range(len(values))]
    assert not trend(at_s, values, POOL).grows
    assert trend(at_s, values, BOUNDS["threads"]).grows


def outcome(growth_mb: float, last_pid: int = 7) -> Outcome:
    """Return the outcome of a run in which a target gains some MiB with each census."""
    found = Outcome(Campaign(0.0, 0))
    for number, at_s in enumerate(AT_S):
        pid = last_pid if number == len(AT_S) - 1 else 7
        held = {("target", "rss_mb"): 500.0 + growth_mb * number, ("target", "sessions"): 0.0}
        found.censuses.append(Census(at_s, 0.1, held, {"target": (pid,)}))
    return found


@pytest.mark.parametrize(
    ("found", "words"),
    [
        pytest.param(outcome(0.0), None, id="clean"),
        pytest.param(outcome(3.0), "target rss_mb grew: 588.5 -> 648.5", id="grown"),
        pytest.param(outcome(0.0, last_pid=8), "target (process 7) is gone", id="gone"),
    ],
)
def test_report_names_growth_and_dead_processes(found, words):
    assert [words] * (words is not None) == [complaint[: len(words)] for complaint in found.complaints()]
    assert (words or "nothing grew, nothing differed") in table(found)
    result = json.loads(json.dumps(figures(found, Options())))
    assert len(result["censuses"]) == len(AT_S)
    assert [row["measure"] for row in result["trends"]] == ["rss_mb", "sessions"]
