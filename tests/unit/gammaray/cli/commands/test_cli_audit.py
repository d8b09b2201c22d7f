"""`gammaray audit` as a command: exit codes, reports, and servers that lack features."""

import json
import re
import signal
import subprocess
import sys
import threading

import pytest

from tests.support.cli_helpers import invoke
from tests.support.scripted_http import scripted


def audit(*arguments, **environment):
    return invoke("audit", *arguments, env=environment)


def without_logprobs(path, body):
    """A server with chats alone, without log-probabilities, `n` and `seed`, whose text is always the same."""
    if body is None:
        return 200, {"data": [{"id": "tiny"}]}
    if not path.endswith("/chat/completions"):
        return 404, {"error": {"message": "no completions here"}}
    if wrong := {"logprobs", "n", "seed"} & body.keys():
        return 400, {"error": {"message": f"unknown: {sorted(wrong)[0]}"}}
    text = "word " * body["max_tokens"]
    ends = [text.index(stop) for stop in body.get("stop") or [] if stop in text]
    text = text[: min(ends)] if ends else text
    reason = "stop" if ends else "length"
    count = body["max_tokens"]
    usage = {"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count}
    message = {"index": 0, "message": {"content": text}, "finish_reason": reason}
    return 200, {"choices": [message], "usage": usage}


LACKING = ("law", "independence", "top-p", "top-k", "min-p", "penalties", "logprob-zero", "probabilities")
LACKING += ("seed", "choices")


def test_missing_features_are_not_possible_and_never_passed(tmp_path):
    files = tmp_path / "a.json", tmp_path / "a.html"
    with scripted(without_logprobs) as (url, _):
        names = ",".join([*LACKING, "stop", "max-tokens"])
        audit(url, "--checks", names, "--json", files[0], "--html", files[1])
    found = json.loads(files[0].read_text())
    statuses = {check["check"]: check["result"]["status"] for check in found["checks"]}
    assert {name: statuses[name] for name in LACKING} == dict.fromkeys(LACKING, "not possible")
    reasons = {check["check"]: check["result"]["summary"] for check in found["checks"]}
    assert "unknown: logprobs" in reasons["law"]
    assert "unknown: seed" in reasons["seed"]
    assert found["model"] == "tiny"
    assert statuses["stop"] == statuses["max-tokens"] == "passed"
    page = files[1].read_text()
    assert "not possible" in page
    assert not re.search(r"(src|href)=", page)


def test_failed_check_is_exit_code_1_with_evidence_and_command():
    def deaf(path, body):
        return without_logprobs(path, None if body is None else {**body, "stop": None})

    with scripted(deaf) as (url, headers):
        result = audit(url, "--checks", "stop,max-tokens", OPENAI_API_KEY="sk-hidden")
    assert result.exit_code == 1, result.output
    assert "contains the stop string" in result.stdout
    assert "curl -sS " in result.stdout
    assert "$OPENAI_API_KEY" in result.stdout
    assert "sk-hidden" not in result.output
    assert headers[-1]["authorization"] == "Bearer sk-hidden"


def test_passed_and_inconclusive_have_their_exit_codes():
    with scripted(without_logprobs) as (url, _):
        assert audit(url, "--checks", "max-tokens").exit_code == 0
        result = audit(url, "--checks", "max-tokens,usage")
        assert result.exit_code == 3
        assert "without log-probabilities the tokens cannot be counted" in result.stdout
        budget = audit(url, "--checks", "max-tokens", "--max-tokens-total", "60")
        assert (budget.exit_code, "budget of 60 tokens" in budget.stdout) == (3, True)
    assert audit(url).exit_code == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.txt", "\n \n"), ("a.jsonl", '{"text": "a"}\n'), ("a.jsonl", "{\n"), ("a.txt", "a" * 5000)],
)
def test_file_without_prompts_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    result = audit("http://127.0.0.1:9", "--prompts", tmp_path / name)
    assert result.exit_code == 2
    assert "--prompts" in result.output


def test_interrupt_prints_what_was_found_so_far():
    asked, released = threading.Event(), threading.Event()

    def slow(path, body):
        if body is not None and body.get("stop"):
            asked.set()
            released.wait(60)
        return without_logprobs(path, body)

    with scripted(slow) as (url, _):
        command = [sys.executable, "-m", "gammaray", "audit", url, "--checks", "max-tokens,stop,json-schema"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert asked.wait(60)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=60)
        finally:
            released.set()
            process.kill()
    assert process.returncode == 130
    assert re.search(r"max-tokens +passed", output)
    assert re.search(r"stop +inconclusive .*interrupted", output)
    assert "json-schema" not in output
