"""`gammaray qualify` without models: exit codes, output, and what comes of a process that misbehaves."""

import json
import sys

import pytest
from click.testing import CliRunner

from gammaray.cli import main
from gammaray.cli.commands import qualify as command
from gammaray.errors import GammarayError, InternalError, InvalidArgumentError, ResourceExhaustedError
from gammaray.qualify.process import measure_pairs
from tests.support.qualify_helpers import depth, facts, pair, task, trial

FIT = pair(trial(depth(4)), draft=facts("good"))
SLOWER = pair(trial(depth(4, alpha=0.1, step_ms=9.0)), draft=facts("slow"))
UNFIT = pair(draft=facts("other", refusal="it flies"))
LOSSY = pair(trial(depth(4), equal=7, divergence="it parts"), draft=facts("lossy"))


@pytest.fixture
def invoke(monkeypatch):
    """Run the command on measurements that are given."""

    def invoke(pairs, *arguments):
        tasks = []

        def measured(task, doing):
            doing("measuring")
            tasks.append(task)
            return list(pairs)

        monkeypatch.setattr(command, "measure_pairs", measured)
        drafts = [option for one in pairs for option in ("--draft", one.draft.name)]
        result = CliRunner().invoke(main, ["qualify", "--target", "t", *drafts, *arguments])
        return result, (tasks or [None])[0]

    return invoke


@pytest.mark.parametrize(
    ("pairs", "code"),
    [([FIT], 0), ([SLOWER], 4), ([UNFIT], 5), ([LOSSY], 5), ([UNFIT, SLOWER], 4), ([UNFIT, FIT, SLOWER], 0)],
    ids=["fit", "slower", "unfit", "lossy", "slower and unfit", "fit and others"],
)
def test_exit_code_is_that_of_the_best_candidate(invoke, pairs, code):
    result, _ = invoke(pairs)
    assert result.exit_code == code, result.output


def test_tables_name_the_verdict_and_rank_the_candidates(invoke):
    result, _ = invoke([UNFIT, SLOWER, FIT])
    ranking = result.stdout.partition("Candidates")[2]
    assert ranking.index("good") < ranking.index("slow") < ranking.index("other")
    for words in (
        "FIT BUT SLOWER",
        "UNFIT",
        "it flies",
        "alpha 0.8",
        "<- best",
    ):
        assert words in result.stdout, words


def test_steps_are_lines_on_stderr_where_it_is_no_terminal(invoke):
    result, task = invoke([FIT], "--error", "0.05", "--rtt-ms", "2", "--min-speedup", "1.3")
    assert result.stderr == "measuring\n"
    assert "measuring" not in result.stdout
    assert (task.error, task.rtt_ms, task.min_speedup) == (0.05, 2.0, 1.3)


def test_json_file_is_written_in_addition_to_the_tables(invoke, tmp_path):
    result, _ = invoke([FIT], "--json", str(tmp_path / "r.json"), "--rtt-ms", "2")
    assert "FIT" in result.stdout
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["settings"]["rtt_ms"] == 2
    (candidate,) = found["candidates"]
    assert (candidate["draft"], candidate["fitness"]) == ("good", "FIT")
    assert candidate["measured"]["trials"][0]["depths"][0]["gamma"] == 4
    assert found["provenance"]["versions"]["gammaray"]


def test_options_become_the_task(invoke, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\n")
    _, task = invoke([FIT], "--prompts", str(prompts), "--gammas", "4,2,4", "--temperatures", "0.7")
    assert (task.prompts, task.gammas, task.temperatures) == (("one", "two"), (2, 4), (0.7,))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompts", "nowhere.txt"], "nowhere.txt"),
        (["--gammas", "0"], "1 to 64"),
        (["--temperatures", "-1"], "numbers such as"),
        (["--num-prompts", "100000"], "num-prompts"),
        (["--min-speedup", "0"], "min-speedup"),
        (["--error", "1"], "--error"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_wrong_option_is_refused_by_name(invoke, arguments, words):
    result, task = invoke([FIT], *arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert task is None


def test_empty_prompts_file_is_refused(invoke, tmp_path):
    (tmp_path / "empty.json").write_text("[]")
    result, _ = invoke([FIT], "--prompts", str(tmp_path / "empty.json"))
    assert result.exit_code == 2
    assert "contains no prompts" in result.output


def test_draft_or_head_is_needed(invoke):
    result = CliRunner().invoke(main, ["qualify", "--target", "t"])
    assert result.exit_code == 2
    assert "'--draft' or '--head'" in result.output


def test_heads_and_chat_become_the_task(invoke):
    local = pair(trial(depth(4)), draft=facts("good"), is_local=True)
    result, task = invoke([local], "--head", "h", "--head", "h", "--chat", "--rtt-ms", "1000")
    assert (task.heads, task.chat) == (("h",), True)
    assert "FIT" in result.stdout
    assert "head good" in result.stdout


def measured_by(code):
    """What comes of a measuring process that runs `code`."""
    doing = []
    command = (sys.executable, "-c", f"import json, os, sys\ntask = sys.stdin.read()\n{code}")
    return measure_pairs(task(), doing.append, command), doing


def test_process_output_is_parsed():
    line = json.dumps({"pair": FIT.model_dump()})
    code = f"print(json.dumps({{'doing': json.loads(task)['target']}}))\nprint({line!r})"
    assert measured_by(code) == ([FIT], ["t"])


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (
            "error = dict(type='InvalidArgumentError', field='draft', got='x', allowed='y')\n"
            "print(json.dumps({'error': error}))",
            InvalidArgumentError,
            "draft: got x, allowed: y",
        ),
        (
            "print(json.dumps({'error': dict(type='ResourceExhaustedError', message='no memory')}))",
            ResourceExhaustedError,
            "no memory",
        ),
        ("print(json.dumps({'error': dict(type='Odd', message='m')}))", GammarayError, "m"),
        ("os.kill(os.getpid(), 9)", InternalError, "killed by signal 9"),
        ("sys.exit(7)", InternalError, "status 7"),
        ("pass", InternalError, "status 0"),
        ("print('not json')", InternalError, "not json"),
        ("print('[1]')", InternalError, "wrote"),
    ],
    ids=["argument", "memory", "unknown", "killed", "failed", "silent", "noise", "list"],
)
def test_process_that_fails_is_a_typed_error(code, error, words):
    with pytest.raises(error, match=words) as caught:
        measured_by(code)
    assert type(caught.value) is error
