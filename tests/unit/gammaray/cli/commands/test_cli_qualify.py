"""The options of `gammaray qualify` without models: they become a task, or are refused by name."""

import pytest
from click.testing import CliRunner

from gammaray.cli import main
from gammaray.cli.commands import qualify as command
from gammaray.cli.settings import parse_settings
from gammaray.qualify.measured import QualifyTask


@pytest.fixture
def invoke(monkeypatch):
    """Run the command up to where another program takes over; return its result and the task."""

    def invoke(*arguments):
        became = []
        monkeypatch.setattr(command, "become", became.append)
        arguments = ["--target", "t", "--draft", "d", *arguments]
        result = CliRunner().invoke(main, ["qualify", *arguments])
        if became != ["services.qualify"]:
            return result, None
        return result, parse_settings(QualifyTask, "qualify", arguments, [command.RESULT_OPTION])[0]

    return invoke


def test_options_become_the_task(invoke, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\n")
    _, task = invoke("--prompts", str(prompts), "--gammas", "4,2,4", "--temperatures", "0.7")
    assert (task.prompts, task.gammas, task.temperatures) == (str(prompts), (2, 4), (0.7,))
    _, task = invoke("--draft", "d", "--head", "h", "--head", "h", "--chat", "--rtt-ms", "2")
    assert (task.draft, task.head, task.chat, task.rtt_ms) == (("d",), ("h",), True, 2.0)
    assert (task.min_speedup, task.num_prompts, task.gammas) == (1.1, 6, (1, 2, 4, 8))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompts", "nowhere.txt"], "nowhere.txt"),
        (["--gammas", "0"], "gammas.0: got 0, allowed: at least 1"),
        (["--temperatures", "-1"], "temperatures.0: got -1"),
        (["--num-prompts", "100000"], "num-prompts"),
        (["--min-speedup", "0"], "min_speedup: got 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_wrong_option_is_refused_by_name(invoke, arguments, words):
    result, task = invoke(*arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert task is None


def test_empty_prompts_file_is_refused(invoke, tmp_path):
    (tmp_path / "empty.json").write_text("[]")
    result, _ = invoke("--prompts", str(tmp_path / "empty.json"))
    assert result.exit_code == 2
    assert "contains no prompts" in result.output


def test_candidate_is_needed_and_has_a_name(invoke):
    result = CliRunner().invoke(main, ["qualify", "--target", "t"])
    assert result.exit_code == 2
    assert "head: got no candidate, allowed: a draft or a head" in result.output
    result, task = invoke("--head", "")
    assert (result.exit_code, task) == (2, None)
    assert "head.0: got an empty text" in result.output
