"""`echo` with `logprobs`, and vLLM's `prompt_logprobs`, in OpenAI's and vLLM's forms."""

import json

import pytest

from gammaray.types import MAX_PROMPT_LOGPROBS
from tests.support.http_helpers import CHAT, complete, events
from tests.support.openapi_helpers import check_answer, check_events
from tests.support.surface_helpers import ScriptedBackend

PROMPT = [7, 8, 9]
LOGPROBS = {
    "tokens": ["<7>", "<8>", "<9>"],
    "token_logprobs": [None, -0.1, -0.2],
    "top_logprobs": [None, {"<9>": -0.01, "<8>": -0.1}, {"<10>": -0.01, "<9>": -0.2}],
    "text_offset": [0, 3, 6],
}
RANKED = [
    None,
    {
        "9": {"logprob": -0.01, "rank": 1, "decoded_token": "<9>"},
        "8": {"logprob": -0.1, "rank": 2, "decoded_token": "<8>"},
    },
    {
        "10": {"logprob": -0.01, "rank": 1, "decoded_token": "<10>"},
        "9": {"logprob": -0.2, "rank": 2, "decoded_token": "<9>"},
    },
]


async def test_echo_with_logprobs_covers_the_prompt_and_then_the_completion():
    answer = await complete(ScriptedBackend(), prompt=PROMPT, echo=True, logprobs=1, max_tokens=1)
    check_answer("/v1/completions", answer.json())
    (choice,) = answer.json()["choices"]
    assert choice["text"] == "<7><8><9>caf"
    assert choice["logprobs"] == {
        "tokens": [*LOGPROBS["tokens"], "caf"],
        "token_logprobs": [*LOGPROBS["token_logprobs"], -0.5],
        "top_logprobs": [*LOGPROBS["top_logprobs"], {"t0": -1.0, "caf": -0.5}],
        "text_offset": [*LOGPROBS["text_offset"], 9],
    }
    assert "prompt_logprobs" not in choice


async def test_echo_of_no_tokens_is_the_prompt_alone_with_logprobs_of_two_numbers():
    backend = ScriptedBackend()
    answer = await complete(backend, prompt=PROMPT, echo=True, logprobs=1, prompt_logprobs=0, max_tokens=0)
    check_answer("/v1/completions", answer.json())
    (choice,) = answer.json()["choices"]
    assert choice["prompt_logprobs"] == [None, {"8": RANKED[1]["8"]}, {"9": RANKED[2]["9"]}]
    assert (choice["text"], choice["finish_reason"]) == ("<7><8><9>", "length")
    assert choice["logprobs"] == LOGPROBS
    assert answer.json()["usage"]["completion_tokens"] == 0
    assert answer.json()["usage"]["total_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert backend.requests[0].max_tokens == 1


async def test_prompt_logprobs_of_a_chat_are_at_the_root_and_computed_once():
    backend = ScriptedBackend()
    answer = await complete(backend, "/v1/chat/completions", messages=CHAT, n=3, prompt_logprobs=1)
    check_answer("/v1/chat/completions", answer.json())
    rendered = backend.render_chat(CHAT)
    assert len(answer.json()["prompt_logprobs"]) == len(rendered)
    assert [request.num_prompt_logprobs for request in backend.requests] == [1, None, None]


@pytest.mark.parametrize("prompts", [[PROMPT], [PROMPT, [4, 5]]])
async def test_the_first_sample_of_a_prompt_scores_it_for_all_its_samples(prompts):
    backend = ScriptedBackend()
    body = {"prompt": prompts, "n": 3, "echo": True, "logprobs": 1, "prompt_logprobs": 1, "max_tokens": 1}
    answer = await complete(backend, **body)
    check_answer("/v1/completions", answer.json())
    asked = [
        (request.prompt, request.sampling.sample_index)
        for request in backend.requests
        if request.num_prompt_logprobs is not None
    ]
    assert asked == [(tuple(prompt), 0) for prompt in prompts]
    choices = answer.json()["choices"]
    assert len(choices) == 3 * len(prompts)
    for choice in choices[:3]:
        assert choice["text"] == "<7><8><9>caf"
        assert choice["prompt_logprobs"] == RANKED
        assert choice["logprobs"]["tokens"] == [*LOGPROBS["tokens"], "caf"]
        assert choice["logprobs"]["top_logprobs"][:3] == LOGPROBS["top_logprobs"]
    for choice in choices[3:]:
        assert choice["logprobs"]["tokens"] == ["<4>", "<5>", "caf"]
        assert list(choice["prompt_logprobs"][1]) == ["6", "5"]


@pytest.mark.parametrize(
    ("prompt", "text", "offsets"),
    [([0, 7, 0, 8], "<7><8>caf", [0, 0, 3, 3, 6]), ([0, 0], "caf", [0, 0, 0])],
)
async def test_offsets_leave_out_the_special_tokens_that_the_text_leaves_out(prompt, text, offsets):
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1}
    (choice,) = (await complete(ScriptedBackend(), **body)).json()["choices"]
    assert choice["text"] == text
    assert choice["logprobs"]["text_offset"] == offsets


async def test_streams_of_samples_contain_prompt_logprobs_once():
    body = {"prompt": PROMPT, "n": 2, "echo": True, "logprobs": 1, "prompt_logprobs": 1, "max_tokens": 1}
    *chunks, _ = await events(ScriptedBackend(), **body)
    check_events("/v1/completions", chunks)
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    own, other = ([c for c in choices if c["index"] == index] for index in (0, 1))
    assert [choice["text"] for choice in own] == [choice["text"] for choice in other] == ["<7><8><9>", "caf"]
    assert own[1]["prompt_logprobs"] == RANKED
    assert own[1]["logprobs"]["tokens"] == [*LOGPROBS["tokens"], "caf"]
    assert "prompt_logprobs" not in other[1]
    assert other[1]["logprobs"]["tokens"] == ["caf"]
    assert other[1]["logprobs"]["text_offset"] == [9]


class Long(ScriptedBackend):
    max_context = 2**20


LENGTH = MAX_PROMPT_LOGPROBS // 21 + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}])
@pytest.mark.parametrize(
    "prompts",
    [
        pytest.param([[7] * LENGTH], id="ids"),
        pytest.param([[7] * (LENGTH // 2 + 1)] * 2, id="two-prompts-of-ids"),
        pytest.param(["x", "x" * LENGTH], id="two-prompts-of-text"),
    ],
)
async def test_too_many_prompt_logprobs_in_one_response_are_refused(prompts, asked, stream):
    body = {"prompt": prompts, **asked, "max_tokens": 1, "stream": stream}
    backend = Long()
    answer = await complete(backend, **body)
    if stream and isinstance(prompts[0], str):  # the lengths are known only after the first event
        error = json.loads(answer.text.strip().rpartition("data: ")[2])["error"]
    else:
        assert answer.status_code == 400
        error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == ("echo" if "echo" in asked and len(prompts) > 1 else "prompt_logprobs")
    assert str(MAX_PROMPT_LOGPROBS) in error["message"]
    if not isinstance(prompts[0], str):
        assert backend.requests == []


async def test_choices_of_a_whole_response_count_each():
    body = {"n": 128, "prompt_logprobs": 20, "max_tokens": 1}
    answer = await complete(Long(), **body, prompt=[7] * (LENGTH // 64))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert len((await complete(Long(), **body, prompt=[7] * 50)).json()["choices"]) == 128
