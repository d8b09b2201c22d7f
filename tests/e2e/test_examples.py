"""Every script of examples/ against a whole cluster, with what it prints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gammaray import Client

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = "def read_lines(path):"


def run(name, address):
    program = sys.executable if name.endswith(".py") else "sh"
    # A tracing account of the developer must not receive what the test sends.
    own = ("LANGCHAIN_", "LANGSMITH_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    done = subprocess.run(
        [program, str(EXAMPLES / name), address], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture
def complete(cluster):
    with Client(cluster.grpc) as client:
        yield client.complete


def test_sdk_sync_repeats_its_text_by_the_seed(cluster):
    done = run("sdk_sync.py", cluster.grpc)
    assert done.stdout.endswith("the same text without drafting: True\n")
    assert "tokens per cycle" in done.stderr


def test_sdk_async_completes_concurrently_and_cancels(cluster, complete):
    done = run("sdk_async.py", cluster.grpc)
    for prompt in (PROMPT, "import os\n", "class Stack:"):
        assert prompt + complete(prompt, max_tokens=48, temperature=0).text in done.stdout
    assert done.stdout.endswith("cancelled\n")
    assert done.stderr == ""


def test_openai_client_prints_the_completion_and_a_chat(cluster, complete):
    done = run("openai_client.py", f"{cluster.http}/v1")
    text = complete(PROMPT, max_tokens=48, temperature=0).text
    assert done.stdout.startswith(text)
    assert done.stdout.removeprefix(text).strip()
    assert "tokens per cycle" in done.stderr


def test_langchain_client_streams_what_it_invokes(cluster):
    done = run("langchain_client.py", f"{cluster.http}/v1")
    text, _, last = done.stdout.rpartition("the same text when streamed: ")
    assert last == "True\n"
    assert text.strip()


def test_curl_prints_an_answer_and_events(cluster, complete):
    first, *events = run("curl.sh", f"{cluster.http}/v1").stdout.splitlines()
    expected = complete(PROMPT, max_tokens=32, temperature=0).text
    assert json.loads(first)["choices"][0]["text"] == expected
    data = [line.removeprefix("data: ") for line in events if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    assert any(json.loads(line)["choices"] for line in data[:-1])


def test_every_example_is_listed_and_run():
    listed = (EXAMPLES / "README.md").read_text()
    tested = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.[ps][yh]"):
        assert f"({path.name})" in listed
        assert f'run("{path.name}"' in tested
