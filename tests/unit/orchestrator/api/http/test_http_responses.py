"""vLLM's `metrics.speculative_decoding` in responses: its fields, and what readers of it check."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray.maths.acceptance import SpeculationCounters
from gammaray.types import TokenOrigin
from orchestrator.api.http.responses import speculative_decoding
from tests.support.http_helpers import CHAT, complete, events
from tests.support.surface_helpers import ScriptedBackend

METRICS = {
    "speculative_decoding": {
        "acceptance_histogram": [1, 1],
        "num_spec_steps": 2,
        "mean_acceptance_length": 1.5,
        "draft_acceptance_rate": 0.5,
        "num_accepted_draft_tokens": 1,
        "num_draft_tokens": 2,
    }
}
BODIES = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": CHAT}}


@pytest.mark.parametrize("path", BODIES)
async def test_whole_responses_have_the_object_at_their_root(path):
    answer = await complete(ScriptedBackend(), path, **BODIES[path])
    assert answer.json()["metrics"] == METRICS


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("with_usage", [False, True])
async def test_streams_have_the_object_in_their_last_chunk(path, with_usage):
    options = {"stream_options": {"include_usage": with_usage}}
    *chunks, _ = await events(ScriptedBackend(), path, **BODIES[path], **options)
    parsed = [json.loads(chunk) for chunk in chunks]
    # AIPerf drops the object when two chunks have it.
    assert [event.get("metrics") for event in parsed] == [None] * (len(parsed) - 1) + [METRICS]


async def test_responses_of_several_choices_have_no_such_object_as_with_vllm():
    answer = await complete(ScriptedBackend(), prompt="x", n=2)
    assert "metrics" not in answer.json()
    chunks = await events(ScriptedBackend(), prompt="x", n=2, stream_options={"include_usage": True})
    assert not any("metrics" in json.loads(chunk) for chunk in chunks[:-1])


CYCLES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12)


@given(CYCLES, st.lists(st.sampled_from(TokenOrigin), max_size=9))
def test_the_object_agrees_with_itself_whatever_the_cycles_were(cycles, before):
    counters = SpeculationCounters()
    counters.catch_up(before)  # a former owner emitted these
    for gamma, wanted in cycles:
        accepted = min(gamma, wanted)
        tested = min(gamma, accepted + 1)
        counters.observe(
            gamma=gamma, tested=tested, accepted=accepted, emitted=accepted + 1, draft_s=0.0, verify_s=0.0
        )
    found = speculative_decoding(counters.summary(1.0))
    histogram = found["acceptance_histogram"]
    drafted = [cycle for cycle in cycles if cycle[0] > 0]
    assert min(histogram) >= 0
    assert found["num_spec_steps"] == sum(histogram) == len(drafted)
    accepted = sum(length * count for length, count in enumerate(histogram))
    assert found["num_accepted_draft_tokens"] == accepted == sum(map(min, drafted))
    assert found["num_draft_tokens"] == sum(gamma for gamma, _ in drafted)
    if drafted:
        assert found["mean_acceptance_length"] == 1 + accepted / len(drafted)
        assert found["draft_acceptance_rate"] == accepted / found["num_draft_tokens"]
    else:
        assert (found["mean_acceptance_length"], found["draft_acceptance_rate"]) == (1.0, 0.0)
