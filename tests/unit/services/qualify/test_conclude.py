"""What `gammaray qualify` says about measured pairs: exit status, tables, result file."""

import json

import pytest

from services.qualify.__main__ import conclude
from tests.support.qualify_helpers import depth, facts, pair, task, trial

FIT = pair(trial(depth(4)), draft=facts("good"))
SLOWER = pair(trial(depth(4, alpha=0.1, step_ms=9.0)), draft=facts("slow"))
UNFIT = pair(draft=facts("other", refusal="it flies"))
LOSSY = pair(trial(depth(4), equal=7, divergence="it parts"), draft=facts("lossy"))


@pytest.mark.parametrize(
    ("pairs", "code"),
    [([FIT], 0), ([SLOWER], 4), ([UNFIT], 5), ([LOSSY], 5), ([UNFIT, SLOWER], 4), ([UNFIT, FIT, SLOWER], 0)],
    ids=["fit", "slower", "unfit", "lossy", "slower and unfit", "fit and others"],
)
def test_exit_status_is_that_of_the_best_candidate(pairs, code):
    assert conclude(task(), pairs, None) == code


def test_tables_name_the_verdict_and_rank_the_candidates(capsys):
    local = pair(trial(depth(4)), draft=facts("own"), is_local=True)
    conclude(task(), [UNFIT, SLOWER, FIT, local], None)
    shown = capsys.readouterr().out
    ranking = shown.partition("Candidates")[2]
    assert ranking.index("good") < ranking.index("slow") < ranking.index("other")
    for words in ("FIT BUT SLOWER", "UNFIT", "it flies", "alpha 0.8", "<- best", "head own"):
        assert words in shown, words


def test_json_file_is_written_in_addition_to_the_tables(capsys, tmp_path):
    conclude(task(rtt_ms=2.0), [FIT], tmp_path / "r.json")
    assert "FIT" in capsys.readouterr().out
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["settings"]["rtt_ms"] == 2
    (candidate,) = found["candidates"]
    assert (candidate["draft"], candidate["fitness"]) == ("good", "FIT")
    assert candidate["measured"]["trials"][0]["depths"][0]["gamma"] == 4
    assert found["provenance"]["versions"]["gammaray"]
