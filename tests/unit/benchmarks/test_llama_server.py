"""llama.cpp's server as a measured system, against a small real HTTP server that speaks its protocol."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import ClusterError
from benchmarks.peers.llama_server import connected_llama, running_llama
from gammaray.bench.systems import Ask, Sample
from tests.support import fake_llama_server

PROMPT = (10, 11, 12)
"""Continued by 34, 35, 36 and so on, of which the stream leaves out 36: it ends inside a character."""


@pytest.fixture
def binary(tmp_path: Path) -> str:
    path = tmp_path / "llama-server"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{fake_llama_server.__file__}" "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Command lines and requests that the stand-in got."""
    path = tmp_path / "log.jsonl"
    monkeypatch.setenv("FAKE_LLAMA_LOG", str(path))
    return path


def entries(log: Path) -> list[Any]:
    return [json.loads(line) for line in log.read_text().splitlines()]


async def complete(binary: str, ask: Ask, options: Sequence[str] = ()) -> Sample:
    async with (
        running_llama(binary, Path("m.gguf"), options, threads=1, slots=2, context=100) as url,
        connected_llama("llama.cpp", url) as llama,
    ):
        return await llama.sample(ask)


async def test_sample_asks_again_for_tokens_that_the_stream_leaves_out(binary: str, log: Path) -> None:
    made = await complete(binary, Ask(PROMPT, 4))
    assert made.token_ids == (34, 35, 36, 37)
    assert sum(count for _, count in made.arrivals) == 4
    assert 0 < made.arrivals[0][0] < made.arrivals[-1][0] <= made.seconds
    _, streamed, whole = entries(log)
    assert (streamed.pop("stream"), whole.pop("stream")) == (True, False)
    assert streamed == whole


@pytest.mark.parametrize(
    ("temperature", "samplers", "top_k"), [(0.0, ["top_k"], 1), (1.0, ["temperature"], 0)]
)
async def test_request_is_greedy_or_samples_from_the_models_distribution_alone(
    binary: str, log: Path, temperature: float, samplers: list[str], top_k: int
) -> None:
    await complete(binary, Ask(PROMPT, 1, temperature, seed=7))
    await complete(binary, Ask(PROMPT, 1, ignore_eos=False))
    body, other = (entry for entry in entries(log) if "ignore_eos" in entry)
    assert not other["ignore_eos"]
    assert (body["prompt"], body["n_predict"], body["seed"]) == (list(PROMPT), 1, 7)
    assert (body["samplers"], body["top_k"], body["temperature"]) == (samplers, top_k, temperature)
    assert body["ignore_eos"]
    assert not body["cache_prompt"]


async def test_server_that_ends_raises_with_its_own_words_at_once(
    binary: str, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_LLAMA_BROKEN", "1")
    with pytest.raises(ClusterError, match=r"ended with code 1(.|\n)*failed to load model"):
        await complete(binary, Ask(PROMPT, 1))
    assert len(entries(log)) == 1


@pytest.mark.parametrize(("prompt", "message"), [
    ((666,), r"llama\.cpp: 400 .*a refused prompt"),
    ((777, 1), r"llama\.cpp: .*context full"),
    ((888, 1), r"llama\.cpp: the stream ended before the completion"),
])  # fmt: skip
async def test_sample_failures_raise_with_the_servers_words(
    binary: str, prompt: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ClusterError, match=message):
        await complete(binary, Ask(prompt, 6))
