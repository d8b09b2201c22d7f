"""`gammaray bench` against a scripted server: what it asks for, prints and writes."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gammaray.types import Chunk, FinishReason
from gammaray.v1 import generation_service_pb2 as pb
from tests.support.cli_helpers import invoke
from tests.support.sdk_helpers import SUMMARY, USAGE, ScriptedService, serve_in_thread, token


async def completion(request: pb.GenerateRequest, attempt: int) -> AsyncIterator[Chunk]:
    """Emit `max_tokens` tokens, gamma + 1 to a chunk; all proposals pass."""
    size = request.gamma.fixed + 1
    left = request.max_tokens
    summary = replace(SUMMARY, alpha=None, acceptance_rate=None, gamma_mean=0.0, accepted_lengths=(left,))
    if size > 1:
        lengths = (*(0 for _ in range(size - 1)), -(-left // size))
        summary = replace(SUMMARY, alpha=1.0, gamma_mean=float(size - 1), accepted_lengths=lengths)
    while left > 0:
        tokens = tuple(token("x", token_id=left - i) for i in range(min(size, left)))
        left -= len(tokens)
        if left > 0:
            yield Chunk("s", "x" * len(tokens), tokens, 1)
        else:
            yield Chunk("s", "x", tokens, 1, FinishReason.LENGTH, USAGE, summary)


@pytest.fixture
def server():
    service = ScriptedService(completion)
    with serve_in_thread(service) as address:
        yield service, address


def measured(address: str, out: Path, *options: object) -> dict[str, Any]:
    """Run a small bench and return the file it wrote."""
    prompts = out.with_name("prompts.txt")
    prompts.write_text("a\n")
    small = ("--prompt-file", prompts, "--tokens", 12, "--repeats", 2, "--temperatures", "0", "--json", out)
    result = invoke("bench", "-a", address, *small, *options)
    assert result.exit_code == 0, result.output
    assert f"written: {out}" in result.stdout
    return json.loads(out.read_text())


def test_bench_measures_and_reports_gamma_zero_in_the_same_run(server, tmp_path):
    result = measured(server[1], tmp_path / "r.json", "--gammas", "3,adaptive")
    (point,) = result["points"]
    rows = {row["system"]: row for row in point["rows"]}
    assert list(rows) == ["gammaray-0", "gammaray-3", "gammaray-adaptive"]
    assert rows["gammaray-0"]["over_plain"]["values"] == [1.0, 1.0]
    assert rows["gammaray-3"]["speculation"]["alpha"] == 1.0
    assert rows["gammaray-3"]["between_tokens"]["p50_ms"] == 0.0
    assert point["equality"] == {"compared": 4, "equal": 4, "different": []}
    assert result["provenance"]["versions"]["gammaray"]
    assert result["settings"]["gammas"] == ["3", "adaptive"]


def test_bench_requests_follow_the_options(server, tmp_path):
    service, address = server
    measured(address, tmp_path / "r.json", "--gammas", "2x6")
    # A warm-up, then two repetitions of a completion, gamma 0 and 2x6 each.
    assert len(service.requests) == 2 * (1 + 2)
    assert {(r.gamma.fixed, r.gamma.max_nodes) for r in service.requests} == {(0, 0), (2, 6)}
    assert all(r.ignore_eos and r.text == "a" for r in service.requests)
    assert {r.max_tokens for r in service.requests} == {12}


@pytest.mark.parametrize(
    ("name", "text"), [("p.txt", "one\n\ntwo\n"), ("p.json", '["one", "two"]')], ids=["lines", "json"]
)
def test_bench_prompt_file_gives_the_prompts(server, tmp_path, name, text):
    service, address = server
    path = tmp_path / name
    path.write_text(text)
    small = ("--tokens", 2, "--repeats", 1, "--temperatures", "0", "--gammas", "1")
    assert invoke("bench", "-a", address, "--prompt-file", path, *small).exit_code == 0
    assert {request.text for request in service.requests} == {"one", "two"}


@pytest.mark.parametrize(
    ("name", "text"), [("p.json", "{}"), ("p.json", "["), ("p.json", "[1]"), ("p.txt", "\n")]
)
def test_bench_file_without_prompts_ends_with_code_2(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    result = invoke("bench", "-a", "127.0.0.1:1", "--prompt-file", path)
    assert result.exit_code == 2
    assert name in result.stderr
