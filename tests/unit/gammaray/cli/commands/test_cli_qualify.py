"""`gammaray qualify` without clusters: options, verdicts, exit codes and the result file."""

import json
from contextlib import asynccontextmanager
from unittest.mock import AsyncMock

import pytest

from gammaray.cli.commands import qualify as command
from gammaray.cli.local_cluster import LocalCluster, NotServedError
from tests.support import cli_helpers
from tests.support.qualify_helpers import result, row


@pytest.fixture
def invoke(monkeypatch):
    """Run the command with scripted measurements; return its result, and what was started and asked."""

    def invoke(*arguments, speedups=(2.0,)):
        started, asked, left = [], [], iter(speedups)

        @asynccontextmanager
        async def local_cluster(*models):
            started.append(models)
            yield LocalCluster("http://127.0.0.1:1", "127.0.0.1:2")

        async def run_bench(client, settings, prompts, advance, show):
            asked.append((settings, prompts))
            speedup = next(left)
            if isinstance(speedup, str):
                raise NotServedError(speedup)
            return result(row(4, speedup))

        monkeypatch.setattr(command, "local_cluster", local_cluster)
        monkeypatch.setattr(command.AsyncClient, "status", AsyncMock(return_value=[]))
        monkeypatch.setattr(command, "run_bench", run_bench)
        return cli_helpers.invoke("qualify", "--target", "t", *arguments), started, asked

    return invoke


def test_options_become_clusters_and_measurements(invoke, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\n")
    options = ("--prompts", str(prompts), "--gammas", "4,2,4", "--temperatures", "0.7", "--tokens", "8")
    names = ("--draft", "d", "--head", "h", "--head", "h")
    done, started, asked = invoke(*names, *options, speedups=(2.0, 0.5))
    assert done.exit_code == 0, done.output
    assert started == [("--target", "t", "--draft", "d"), ("--target", "t", "--head", "h")]
    settings, texts = asked[0]
    assert (settings.gammas, settings.temperatures, settings.max_tokens) == (("2", "4"), (0.7,), 8)
    assert texts == [("given", "one"), ("given", "two")]
    ranking = done.stdout[done.stdout.index("candidate") :]
    assert ranking.index("draft d") < ranking.index("head h")


@pytest.mark.parametrize(
    ("speedups", "code", "words"),
    [((2.0,), 0, "FIT"), ((0.9,), 4, "FIT BUT SLOWER"), (("it flies",), 5, "it flies")],
)
def test_the_verdict_sets_the_exit_code(invoke, tmp_path, speedups, code, words):
    out = tmp_path / "result.json"
    done, _, _ = invoke("--draft", "d", "--json", str(out), speedups=speedups)
    assert (done.exit_code, words in done.stdout) == (code, True), done.output
    (found,) = json.loads(out.read_text())["candidates"]
    assert found["candidate"] == "draft d"
    assert found["fitness"] in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompts", "nowhere.txt"], "nowhere.txt"),
        (["--gammas", "0"], "gammas.0: got 0, allowed: at least 1"),
        (["--temperatures", "-1"], "temperatures.0: got -1"),
        (["--num-prompts", "100000"], "num-prompts"),
        (["--min-speedup", "0"], "min_speedup: got 0"),
        (["--head", ""], "head.0: got an empty text"),
        ([], "head: got no candidate, allowed: a draft or a head"),
    ],
    ids=str,
)
def test_wrong_option_is_refused_by_name(invoke, arguments, words):
    done, started, _ = invoke(*(arguments and ["--draft", "d"]), *arguments)
    assert (done.exit_code, started) == (2, [])
    assert words in done.output
