"""Odd input of the command line: one line, exit status 2, the field by name, and no words of pydantic's."""

import re

import pytest

from tests.support.cli_helpers import invoke

RAW = re.compile(r"Input should|String should|Value error|validation error|pydantic|got .*got |integer range")
NOWHERE = "127.0.0.1:1"
URLS = ("h:99999", "ftp://localhost", "https://", "http://a b", "http://h:x", "h:0", "://", "")
ADDRESSES = ("nowhere", "localhost:99999", "https://", "https://h/path", "http://h:1", "grpc://h")


def check(result, words):
    assert result.exit_code == 2, (result.output, result.exception)
    assert words in " ".join(result.stderr.split())
    assert not RAW.search(result.stderr)
    assert "Traceback" not in result.stderr


def test_settings_of_the_environment(subtests):
    for variables, words in [
        ({"HTTP_PORT": "x"}, "http_port: got x, allowed: an integer"),
        ({"HTTP_PORT": "70000"}, "http_port: got 70000, allowed: at most 65535"),
        ({"HTTP_PORT": ""}, "http_port: got an empty text, allowed: an integer"),
        ({"DEVICE": "tpu"}, "device: got tpu, allowed: 'auto', 'cpu' or 'cuda'"),
        ({"DETERMINISTIC": "maybe"}, "deterministic: got maybe, allowed: true or false"),
        ({"TARGET_WORKERS": "0"}, "target_workers: got 0, allowed: at least 1 at all times"),
        ({"DRAFT_WORKERS": "3:1"}, "draft_workers: got 3:1, allowed: 0 <= MIN <= MAX <= 64"),
        ({"TARGET": ""}, "target: got an empty text, allowed: a text of at least 1 character"),
    ]:
        with subtests.test(str((variables, words))[:80]):
            check(invoke("up", env={f"GAMMARAY_{name}": value for name, value in variables.items()}), words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--tensor-parallel", 2, "--engine", "native"], "tensor_parallel: got 2, allowed: 1 with the"),
        (["up", "--engine", "sglang"], "'sglang' is not one of 'auto', 'vllm', 'native', 'transformers'"),
        (["up", "--device", "cuda", "--deterministic"], "device: got cuda, allowed: auto or cpu with"),
        (["up", "--draft-workers", "x"], "draft_workers: got 'x', allowed: N or MIN:MAX"),
        (["up", "--http-port", "x"], "'x' is not a valid integer."),
        (["up", "--start-timeout-s", "nan"], "'nan' is not a finite number."),
        (["up", "--no-auth"], "No such option"),
        (["bench", "--temperatures", "nan", "-a", NOWHERE], "got 'nan'"),
        (["keys", "create", "--file", "k", "--note", "\udcff"], "note: got an unpaired surrogate"),
        (["generate", "Hi", "--model", "\udcff", "-a", NOWHERE], "model: got an unpaired surrogate"),
        (["generate", "a\udcff", "-a", NOWHERE], "prompt: got an unpaired surrogate"),
        (["chat", "--url", NOWHERE, "--timeout", "inf"], "timeout_s: got inf"),
        (["chat", "--url", NOWHERE, "--api-key", "a\nb"], "api_key: got a key (not shown)"),
        (["chat", "--url", "http://me:hunter2@h"], "url: got a URL with a user or password"),
        (["qualify", "--target", "", "--draft", "demo"], "target: got an empty text"),
        (["bench", "--gammas", "fast", "-a", NOWHERE], "got 'fast', allowed: 0 to 64"),
        (["bench", "--prompts", 25, "-a", NOWHERE], "1<=x<=24"),
        (["audit", "ftp://x"], "url"),
        (["audit", "http://x", "--checks", "law,lore"], "lore"),
        (["audit", "http://x", "--alpha", "0"], "alpha"),
        (["audit", "http://x", "--api-key-env", "A B"], "A B"),
        (["audit", "http://x", "--fields", "[]"], "fields"),
        (["generate", ""], "prompt: got an empty prompt"),
        (["generate", "Hi", "--temperature", "-1"], "temperature: got -1.0, allowed: a number in [0, 100]"),
        (["generate", "Hi", "--gamma", "1000000"], "gamma: got 1000000, allowed: an integer in [0, 64]"),
        (["generate", "Hi", "--gamma", "fast"], "'fast' is neither"),
        (["generate", "Hi", "--timeout", "0"], "timeout_s: got 0.0"),
        (["generate"], "Missing argument 'PROMPT'"),
        (["dance"], "No such command 'dance'"),
        *((["chat", "--url", url], f"url: got {url}, allowed: http://host:port") for url in URLS),
        *((["status", "-a", at], f"address: got {at}, allowed: host:port") for at in ADDRESSES),
    ],
    ids=str,
)
def test_options(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments, input="hi\n")
    check(result, words)
    assert result.stdout == ""
    assert "hunter2" not in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["{", '{"keys": [{}]}', '{"key": []}'])
def test_invalid_key_file_is_reported_in_one_line(tmp_path, content):
    path = tmp_path / "keys.json"
    path.write_text(content)
    result = invoke("keys", "list", "--file", path)
    check(result, f"api_keys_file: got {str(path)[:60]}")
    assert result.stderr.count("\n") == 1
