"""Two looks at a cluster's status: rates, ratios, and what `gammaray top` shows of them."""

import io
import json
from collections import deque

import pytest
from rich.console import Console

from gammaray.cli.activity import measure
from gammaray.cli.commands.top import view
from gammaray.types import ProcessStatus, SpeculationTotals, WorkerTotals
from tests.support.cli_helpers import invoke
from tests.support.sdk_helpers import ScriptedService, serve_in_thread

FIRST = SpeculationTotals(
    cycles=10, drafts=8, draft_tokens=40, tested_tokens=30, accepted_tokens=20, emitted_tokens=30,
    gamma_sum=40, decode_us=1_000_000, plain_us=1_500_000, requests=2, failed_requests=0,
)  # fmt: skip
LATER = SpeculationTotals(
    cycles=110, drafts=108, draft_tokens=440, tested_tokens=230, accepted_tokens=120, emitted_tokens=230,
    gamma_sum=340, decode_us=2_000_000, plain_us=3_700_000, requests=8, failed_requests=1,
)  # fmt: skip


def orchestrator(totals, pid=1, **fields):
    return ProcessStatus("orchestrator", pid, "", "demo", True, 3, speculation_totals=totals, **fields)


def worker(role, totals, address="127.0.0.1:7", **fields):
    return ProcessStatus(role, 2, address, "demo", True, 4, worker_totals=totals, **fields)


def test_rates_and_ratios_cover_the_interval():
    total = measure([orchestrator(FIRST)], [orchestrator(LATER, num_queued=5)], seconds=2.0).total
    assert (total.running, total.waiting) == (3, 5)
    assert (total.tokens_per_s, total.cycles_per_s, total.failures_per_s) == (100.0, 50.0, 0.5)
    assert (total.alpha, total.acceptance_rate) == (100 / 200, 100 / 400)
    assert (total.tokens_per_cycle, total.gamma, total.speedup) == (2.0, 3.0, 2.2)


def test_ratios_cover_the_whole_time_if_nothing_happened_in_the_interval():
    total = measure([orchestrator(FIRST)], [orchestrator(FIRST)], seconds=2.0).total
    assert (total.tokens_per_s, total.alpha, total.speedup) == (0.0, 20 / 30, 1.5)


def test_orchestrators_are_listed_and_summed():
    before = [orchestrator(FIRST, pid=1), orchestrator(FIRST, pid=2)]
    after = [orchestrator(FIRST, pid=2), orchestrator(LATER, pid=1)]
    activity = measure(before, after, seconds=2.0)
    assert [own.tokens_per_s for own in activity.orchestrators] == [100.0, 0.0]
    assert (activity.total.tokens_per_s, activity.total.running) == (100.0, 6)


def test_new_processes_and_stale_totals_have_no_rate():
    for before, after in (
        ([], LATER),
        ([orchestrator(LATER, pid=9)], LATER),  # another process
        ([orchestrator(LATER)], FIRST),  # stale totals of another orchestrator
    ):
        assert measure(before, [orchestrator(after)], seconds=2.0).total.tokens_per_s == 0.0


def test_utilisation_is_step_time_over_elapsed_time():
    start = WorkerTotals(steps=10, step_blocks=10, step_us=100_000, ahead_lookups=4, ahead_hits=0)
    end = WorkerTotals(steps=110, step_blocks=310, step_us=600_000, ahead_lookups=14, ahead_hits=5)
    state = {"num_queued": 6, "cache_bytes": 25, "cache_budget_bytes": 100}
    (busy,) = measure([worker("draft", start)], [worker("draft", end, **state)], seconds=2.0).workers
    assert (busy.busy, busy.batch, busy.steps_per_s, busy.ahead_hit_rate) == (0.25, 3.0, 50.0, 0.5)
    assert (busy.sessions, busy.queue, busy.cache_use) == (4, 6, 0.25)


def shown(activity, history):
    console = Console(width=160, highlight=False, file=io.StringIO())
    console.print(view(activity, deque(history)))
    return console.file.getvalue().splitlines()


def test_view_shows_every_process_in_words_and_numbers():
    looks = (
        [orchestrator(FIRST), worker("target", WorkerTotals())],
        [orchestrator(LATER), worker("target", WorkerTotals(steps=4, step_blocks=8, step_us=900_000))],
    )
    lines = shown(measure(*looks, seconds=2.0), [0.0, 50.0, 100.0])
    assert lines[0] == "gammaray  100.0 tokens/s   ▄█  speedup 2.20x  3 running, 0 waiting"
    assert lines[3].split() == ["1", "3", "0", "100.0", "50.0", "2.00", "0.50", "3.00", "2.20x", "0.50"]
    assert lines[6].split() == ["target", "127.0.0.1:7", "yes", "4", "0", "45%", "2.0", "2.00", "0.0%", "-"]


@pytest.fixture
def address():
    looks = [[orchestrator(FIRST)], [orchestrator(LATER)]]
    with serve_in_thread(ScriptedService(status=lambda attempt: looks[min(attempt, 1)])) as where:
        yield where


def test_top_once_json_is_one_object_of_one_interval(address):
    result = invoke("top", "--once", "--json", "--interval", "0.2", "-a", address)
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    activity = json.loads(line)
    assert activity.keys() == {"seconds", "total", "orchestrators", "workers"}
    assert 0.19 < activity["seconds"] < 60
    assert activity["total"]["tokens_per_s"] == pytest.approx(200 / activity["seconds"])
    assert activity["orchestrators"][0]["pid"] == 1


def test_top_once_prints_a_table_that_a_pipe_can_read(address):
    result = invoke("top", "--once", "--interval", "0.1", "-a", address)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    assert result.stdout.splitlines()[2].split()[:2] == ["ORCHESTRATOR", "RUNNING"]
