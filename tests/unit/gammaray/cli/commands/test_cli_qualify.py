"""The options of `gammaray qualify` without models: they become a task, or are refused by name."""

import pytest
from click.testing import CliRunner

from gammaray.cli import main
from gammaray.cli.commands import qualify as command


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
        return result, command.task_of(**command.qualify.make_context("qualify", arguments).params)[0]

    return invoke


def test_options_become_the_task(invoke, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\n")
    _, task = invoke("--prompts", str(prompts), "--gammas", "4,2,4", "--temperatures", "0.7")
    assert (task.prompts, task.gammas, task.temperatures) == (("one", "two"), (2, 4), (0.7,))
    _, task = invoke("--draft", "d", "--head", "h", "--head", "h", "--chat", "--rtt-ms", "2")
    assert (task.drafts, task.heads, task.chat, task.rtt_ms) == (("d",), ("h",), True, 2.0)
    assert (task.min_speedup, len(task.prompts)) == (1.1, 6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompts", "nowhere.txt"], "nowhere.txt"),
        (["--gammas", "0"], "1 to 64"),
        (["--temperatures", "-1"], "numbers such as"),
        (["--num-prompts", "100000"], "num-prompts"),
        (["--min-speedup", "0"], "min-speedup"),
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
    assert "'--draft' or '--head'" in result.output
    result, task = invoke("--head", "")
    assert (result.exit_code, task) == (2, None)
    assert "head: got an empty name" in result.output
