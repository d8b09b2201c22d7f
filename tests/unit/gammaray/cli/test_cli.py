"""The `gammaray` command against a scripted server: what it prints, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest

import gammaray
from gammaray import DrafterKind, TokenOrigin, TopLogprob, errors
from gammaray.cli import main, render
from gammaray.grammar.texts import choice_grammar, json_schema_grammar, regex_grammar
from gammaray.program.output import columns, output_console
from tests.support.cli_helpers import invoke
from tests.support.own_process import ROOT, run_code
from tests.support.sdk_helpers import (
    SUMMARY,
    USAGE,
    WAIT_S,
    ScriptedService,
    answer,
    endless,
    last,
    piece,
    refuse,
    serve_in_thread,
    token,
)

SMILE = "🙂".encode()
STORY = (
    piece(
        "one",
        token("one", TokenOrigin.ACCEPTED, 1, drafter=DrafterKind.MODEL),
        token(SMILE[:2], TokenOrigin.CORRECTION, 2),
    ),
    last(
        "🙂 two",
        token(SMILE[2:], TokenOrigin.BONUS, 3),
        token(" two", TokenOrigin.ACCEPTED, 4, drafter=DrafterKind.SUFFIX),
    ),
)


@pytest.fixture
def service():
    return ScriptedService(answer(*STORY))


@pytest.fixture
def run(service):
    with serve_in_thread(service) as address:
        yield lambda *arguments, **more: invoke(*arguments, "-a", address, **more)


def test_generate_streams_text_on_stdout_and_summary_on_stderr(run):
    result = run("generate", "Hi")
    assert result.exit_code == 0
    assert result.stdout == "one🙂 two\n"
    assert "\x1b" not in result.stderr
    for words in (
        "6 tokens in 0.05 s: 120.0 tokens/s",
        "finished by stop, seed 9",
        "alpha 0.75, 2.00 tokens per cycle over 3 cycles, gamma 2.50 on average",
        "speedup over plain decoding 1.50x (estimated)",
        "draft 10 ms (20%), verify 30 ms (60%), other 10 ms (20%)",
        "accepted tokens per cycle:",
    ):
        assert words in result.stderr


OF_THE_SUMMARY = (
    *("cycles", "tokens_per_cycle", "alpha", "acceptance_rate", "gamma_mean", "drafted_tokens"),
    *("accepted_tokens", "speedup_estimate"),
)


def test_generate_json_is_one_object(run):
    result = run("generate", "Hi", "--json")
    assert result.stderr == ""
    assert json.loads(result.stdout) == {
        "text": "one🙂 two",
        "finish_reason": "stop",
        "seed": 9,
        "usage": asdict(USAGE),
        "gammaray": {
            "session_id": "s1",
            **{name: getattr(SUMMARY, name) for name in OF_THE_SUMMARY},
            "accepted_lengths": [1, 1, 1],
            "origins": ["accepted", "correction", "bonus", "accepted"],
            "token_ids": [1, 2, 3, 4],
            "time_ms": {"draft": 10.0, "verify": 30.0, "other": 10.0, "total": 50.0},
            "cycles_by_drafter": dict.fromkeys(
                ("model", "head", "suffix", "prediction", "grammar", "none"), 0
            ),
            "fallback_cycles": 0,
            "draft_workers": 0,
        },
    }


def test_generate_json_logprobs_come_when_asked_for():
    scored = token("a", logprob=-0.5, top_logprobs=(TopLogprob(7, -0.5), TopLogprob(8, -1.0)))
    with serve_in_thread(ScriptedService(answer(last("a", scored)))) as address:
        result = invoke("generate", "Hi", "-a", address, "--json", "--logprobs", 2)
    assert json.loads(result.stdout)["logprobs"] == [
        {
            "token_id": 7,
            "logprob": -0.5,
            "top": [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": -1.0}],
        }
    ]


def test_generate_options_reach_the_server(run, service):
    arguments = "--max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --seed 3 --gamma 4"
    more = "--verification rejection --drafter none --session-id mine --ignore-eos --presence-penalty -1"
    result = run("generate", "Hi", *arguments.split(), *more.split(), "--stop", "a b")
    assert result.exit_code == 0, result.output
    request, sampling = service.requests[0], service.requests[0].sampling
    assert (request.text, request.max_tokens, list(request.stop)) == ("Hi", 5, ["a b"])
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.seed, sampling.presence_penalty, request.gamma.fixed) == (3, -1, 4)
    assert (request.verification, request.drafter) == (2, 2)
    assert (request.session_id, request.ignore_eos) == ("mine", True)


def test_generate_defaults_let_the_server_choose(run, service):
    run("generate", "Hi")
    request = service.requests[0]
    assert request.gamma.adaptive
    assert not request.sampling.HasField("seed")
    assert request.max_tokens == 128


def test_generate_prediction_is_the_text_of_a_file(run, service, tmp_path):
    file = tmp_path / "expected.txt"
    file.write_text("caf\u00e9\n", encoding="utf-8")
    result = run("generate", "Hi", "--prediction", str(file))
    assert result.exit_code == 0, result.output
    file.write_bytes(b"x\xff")
    result = run("generate", "Hi", "--prediction", str(file))
    assert result.exit_code != 0
    assert "prediction" in result.output
    assert "offset 1" in result.output
    assert [request.prediction.text for request in service.requests] == ["caf\u00e9\n"]


def test_generate_forms_reach_the_server_as_grammars(run, service, tmp_path):
    schema, lark = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "string", "const": "caf\u00e9"}', encoding="utf-8")
    lark.write_text('start: "\u00e9"\n', encoding="utf-8")
    for options in (
        *(["--json-schema", schema], ["--regex", "[a,b]+"], ["--choice", "a,b", "--choice", "c"]),
        *(["--grammar", lark], []),
    ):
        result = run("generate", "Hi", *options)
        assert result.exit_code == 0, result.output
    assert [request.sampling.grammar for request in service.requests] == [
        json_schema_grammar({"type": "string", "const": "caf\u00e9"}),
        regex_grammar("[a,b]+"),
        choice_grammar(["a,b", "c"]),
        'start: "\u00e9"\n',
        "",
    ]


@pytest.mark.parametrize("command", [["generate", "Hi"], ["chat"]], ids=" ".join)
def test_wrong_form_is_exit_code_2_and_named(command, tmp_path, subtests):
    for options, content, words in [
        (["--json-schema", "FILE"], b'{"a":', "file.txt is no JSON"),
        (["--json-schema", "FILE"], b"[" * 100_000, "file.txt is no JSON"),
        (["--json-schema", "FILE"], b"[1]", "file.txt is no JSON schema"),
        (["--json-schema", "FILE"], b" ", "file.txt is empty"),
        (["--json-schema", "FILE"], b"\xff", "offset 0"),
        (["--json-schema", "FILE.none"], b"", "does not exist"),
        (["--grammar", "FILE"], b"", "file.txt is empty"),
        (["--grammar", "FILE"], b"start: \xff", "offset 7"),
        (["--regex", "a", "--choice", "b"], b"", "--regex and --choice exclude each other"),
        (["--json-schema", "FILE", "--grammar", "FILE"], b"{}", "--json-schema and --grammar exclude"),
    ]:
        with subtests.test(str((options, content, words))[:80]):
            file = tmp_path / "file.txt"
            file.write_bytes(content)
            result = invoke(*command, *(option.replace("FILE", str(file)) for option in options), input="")
            assert result.exit_code == 2
            assert words in " ".join(result.stderr.split())


def test_generate_checks_a_form_before_it_is_sent(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"enum": [1e300]}')
    for options, words in (
        (["--json-schema", file], "json_schema: got the number 1e+300"),
        (["--regex", ""], "regex: got "),
        (["--choice", ""], "choice: got "),
    ):
        result = invoke("generate", "Hi", *options)
        assert result.exit_code == 2
        assert words in result.stderr


def test_generate_dash_reads_stdin(run, service):
    run("generate", "-", input="from\nstdin 🙂".encode())
    assert service.requests[0].text == "from\nstdin 🙂"


def test_address_and_key_come_from_the_environment():
    service = ScriptedService()
    with serve_in_thread(service) as address:
        result = invoke("status", env={"GAMMARAY_ADDRESS": address, "GAMMARAY_API_KEY": "secret"})
    assert result.exit_code == 0
    assert service.metadata[0]["authorization"] == "Bearer secret"


def test_control_characters_reach_pipes_but_never_a_terminal(monkeypatch):
    with serve_in_thread(ScriptedService(answer(last("a\x1b[2Jb\tc")))) as address:
        piped = invoke("generate", "Hi", "-a", address)
        monkeypatch.setattr(render, "sys", SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True)))
        shown = invoke("generate", "Hi", "-a", address)
    assert (piped.stdout, shown.stdout) == ("a\x1b[2Jb\tc\n", "a\u241b[2Jb\tc\n")


def test_status_json_has_the_documented_shape(run):
    result = run("status", "--json")
    assert result.exit_code == 0
    first, *others = json.loads(result.stdout)["processes"]
    assert first == {
        "role": "orchestrator",
        "pid": 11,
        "address": "127.0.0.1:1",
        "model": "demo",
        "healthy": True,
        "sessions": 2,
        "metrics_address": "",
        "num_queued": 0,
        "cache_bytes": 0,
        "cache_budget_bytes": 0,
        "worker_totals": None,
        "speculation_totals": None,
        "accepted_per_position": [],
        "kernel": "",
        "version": gammaray.__version__,
        "clock_offset_s": None,
        "unusable": ["target 127.0.0.1:9: Connection refused"],
    }
    assert [other["role"] for other in others] == ["target", "draft"]
    assert json.loads(result.stdout).keys() == {"processes"}


def test_status_table_lists_every_process(run):
    lines = run("status").stdout.splitlines()
    names = "ROLE PID ADDRESS MODEL HEALTHY SESSIONS METRICS KERNEL VERSION CLOCK"
    assert lines[0].split() == names.split()
    assert lines[1].split()[:8] == ["orchestrator", "11", "127.0.0.1:1", "demo", "yes", "2", "-", "-"]
    assert lines[2].split()[-4:] == ["x86-64-v4", "0.0.9", "+7.25", "s"]
    assert lines[3].split()[:7] == ["draft", "13", "127.0.0.1:3", "demo", "no", "0", "-"]
    assert "none: no C compiler" in lines[3]
    assert lines[4:] == [
        "orchestrator 11 cannot use target 127.0.0.1:9: Connection refused",
        f"target 127.0.0.1:2 has gammaray 0.0.9, this command {gammaray.__version__}",
        "the clock of target 127.0.0.1:2 differs by +7.2 s",
    ]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidArgumentError("prompt", "9999 tokens", "at most 512"), 2),
        (errors.UnavailableError("no target worker"), 3),
        (errors.NotFoundError("no model named x"), 1),
        (errors.InternalError("internal error (KeyError)"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_failure_is_one_line_and_its_own_exit_code(error, code):
    with serve_in_thread(ScriptedService(refuse(error))) as address:
        result = invoke("generate", "Hi", "-a", address)
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.startswith(f"gammaray: {error}")
    assert result.stderr.count("\n") == 1


def test_refused_connection_is_exit_code_3_with_a_hint():
    result = invoke("status", "--json", "-a", "127.0.0.1:1")
    assert result.exit_code == 3
    assert "gammaray up" in result.stderr
    assert result.stderr.count("\n") == 1


def test_invalid_utf8_on_stdin_is_exit_code_2():
    result = invoke("generate", "-", input=b"ab\xff")
    assert result.exit_code == 2
    assert "an invalid byte at offset 2" in result.stderr


@pytest.mark.parametrize(("is_interrupted", "code"), [(True, 130), (False, 1)], ids=["interrupt", "pipe"])
def test_interrupt_and_closed_pipe_cancel_on_the_server_and_end_quietly(is_interrupted, code):
    service = ScriptedService(endless)
    with serve_in_thread(service) as address:
        process = subprocess.Popen(
            [sys.executable, "-m", "gammaray", "generate", "Hi", "-a", address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        try:
            assert process.stdout.read(3) == b"xxx"
            if is_interrupted:
                process.send_signal(signal.SIGINT)
                _, stderr = process.communicate(timeout=WAIT_S)
            else:
                process.stdout.close()
                process.wait(WAIT_S)
                stderr = process.stderr.read()
        finally:
            process.kill()
        assert service.cancelled.wait(WAIT_S)
    assert process.returncode == code
    assert b"Traceback" not in stderr


def test_piped_tables_have_aligned_untruncated_columns_without_boxes_and_colours(capsys):
    long = "x" * 300
    table = columns("NAME", "HEADING")
    table.add_row("a", "[red]b[/]")
    table.add_row(long, "c d")
    output_console().print(table)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [f"{'NAME':<302}HEADING", f"{'a':<302}b", f"{long}  c d"]


def modules_after(*commands):
    """Return the modules that a process has imported after each of some commands."""
    script = f"""
import json, sys
from gammaray.cli import main
for arguments in {list(commands)!r}:
    try:
        main(arguments)
    except SystemExit:
        pass
    print(json.dumps(["modules", *sys.modules]))
"""
    lines = run_code(script).stdout.splitlines()
    return [set(json.loads(line)) for line in lines if line.startswith('["modules"')]


def test_help_imports_no_command_and_none_of_their_packages():
    *general, of_keys = modules_after(["--help"], ["--version"], ["dance"], ["keys", "--help"])
    assert len(general) == 3
    for found in general:
        assert not found & {"grpc", "google.protobuf", "pydantic", "rich", "yaml", "asyncio"}
        assert {name for name in found if name.startswith("gammaray.cli.")} == set()
    names = {f"gammaray.cli.commands.{name}" for name in main.list_commands(None)}
    assert of_keys & names == {"gammaray.cli.commands.keys"}


@pytest.mark.parametrize("name", main.list_commands(None))
def test_listed_commands_exist_with_their_short_help(name):
    command = main.get_command(None, name)
    assert command.name == name
    listed = re.search(rf"^  {name} +(.*)", invoke("--help").stdout, re.MULTILINE)[1]
    first_words = listed.rstrip(".").split(",")[0].split(":")[0]
    assert command.help.startswith(first_words), (command.help, listed)
