"""The OpenAI-compatible API over a scripted orchestrator: requests and responses."""

import json

import pytest

from gammaray.types import MAX_PROMPT_LOGPROBS, DrafterKind, GammaPolicy, SamplingParams, VerificationMethod
from tests.support.http_helpers import BODIES, CHAT, GAMMARAY, call, complete, events
from tests.support.openapi_helpers import check_answer, check_events
from tests.support.surface_helpers import ScriptedBackend


async def test_completion_returns_text_usage_and_gammaray():
    answer = await complete(ScriptedBackend(), prompt="x", model="scripted")
    body = answer.json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "scripted"
    choice = {"index": 0, "text": "café", "logprobs": None, "finish_reason": "stop"}
    assert body["choices"] == [choice]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 1},
    }
    assert body["gammaray"] == GAMMARAY


async def test_completion_every_option_reaches_the_orchestrator(backend):
    sampling = {
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "min_tokens": 1, "seed": 11},
        **{"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3},
    }
    options = {"verification": "rejection", "gamma": 3, "max_nodes": 12, "drafter": "none"}
    answer = await complete(
        backend,
        prompt=[1, 2, 3],
        max_tokens=2,
        **sampling,
        logit_bias={"7": -100, "8": 1.5},
        ignore_eos=True,
        stop_token_ids=[9],
        allowed_token_ids=[4, 7],
        stop=["a", "b"],
        logprobs=3,
        user="u",
        metadata={"k": "v"},
        prediction={"type": "content", "content": "drawn"},
        gammaray={**options, "session_id": "mine", "cache_salt": "apart"},
    )
    assert answer.status_code == 200
    (request,) = backend.requests
    assert request.prompt == (1, 2, 3)
    biases = {7: -100, 8: 1.5}
    assert request.sampling == SamplingParams(**sampling, logit_bias=biases, allowed_token_ids=(4, 7))
    assert (request.max_tokens, request.stop, request.stop_token_ids) == (2, ("a", "b"), (9,))
    assert request.ignore_eos
    assert request.num_top_logprobs == 3
    assert request.verification is VerificationMethod.REJECTION
    assert request.gamma == GammaPolicy(fixed=3, max_nodes=12)
    assert request.drafter is DrafterKind.NONE
    assert (request.session_id, request.cache_salt) == ("mine", "apart")
    assert request.prediction == "drawn"


async def test_chat_prediction_of_text_parts_reaches_every_choice(backend):
    parts = [{"type": "text", "text": "def f():\n"}, {"type": "text", "text": "    pass\n"}]
    prediction = {"type": "content", "content": parts}
    await complete(backend, "/v1/chat/completions", messages=CHAT, n=2, prediction=prediction)
    assert [request.prediction for request in backend.requests] == ["def f():\n    pass\n"] * 2
    for nothing in (None, {"type": "content", "content": ""}):
        await complete(backend, "/v1/chat/completions", messages=CHAT, prediction=nothing)
        assert backend.requests[-1].prediction == ""


async def test_completion_defaults_are_those_of_openai(backend):
    await complete(backend, prompt="x", temperature=None, stop=None, store=None, gammaray={"gamma": None})
    (request,) = backend.requests
    assert (request.max_tokens, request.store) == (16, True)
    assert request.sampling == SamplingParams()
    assert request.gamma == GammaPolicy()


async def test_samples_have_their_index_and_their_own_gammaray(backend):
    body = (await complete(backend, prompt="x", n=3, seed=5)).json()
    assert [request.sampling.sample_index for request in backend.requests] == [0, 1, 2]
    assert {request.sampling.seed for request in backend.requests} == {5}
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["gammaray"]["session_id"] for choice in body["choices"]] == ["s0", "s1", "s2"]
    assert {choice["gammaray"]["seed"] for choice in body["choices"]} == {5}
    assert body["gammaray"] == body["choices"][0]["gammaray"]
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]]], ids=["texts", "lists of tokens"])
async def test_several_prompts_have_a_choice_each(backend, prompt):
    body = (await complete(backend, prompt=prompt)).json()
    expected = [one if isinstance(one, str) else tuple(one) for one in prompt]
    assert [request.prompt for request in backend.requests] == expected
    assert len(body["choices"]) == 2
    assert body["usage"]["prompt_tokens"] == 5 * 2


@pytest.mark.parametrize(("prompt", "echo"), [("ab", "ab"), ([1, 2], "<1><2>")])
async def test_echo_puts_the_prompt_first(prompt, echo):
    body = (await complete(ScriptedBackend(), prompt=prompt, echo=True)).json()
    assert body["choices"][0]["text"] == echo + "café"
    first, *_ = await events(ScriptedBackend(), prompt=prompt, echo=True)
    assert json.loads(first)["choices"][0]["text"] == echo


async def test_completion_logprobs_have_offsets_and_partial_characters():
    body = (await complete(ScriptedBackend(), prompt="x", logprobs=2)).json()
    tokens = ["caf", "bytes:\\xc3", "bytes:\\xa9"]
    assert body["choices"][0]["logprobs"] == {
        "tokens": tokens,
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"t0": -1.0, "t1": -2.0, token: -0.5} for token in tokens],
        "text_offset": [0, 3, 4],
    }


async def test_chat_logprobs_have_bytes():
    asked = {"logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    answer = await complete(ScriptedBackend(), "/v1/chat/completions", messages=CHAT, **asked)
    (entry,) = answer.json()["choices"][0]["logprobs"]["content"]
    top = {"token": "t0", "logprob": -1.0, "bytes": [116, 48]}
    assert entry == {"token": "caf", "logprob": -0.5, "bytes": [99, 97, 102], "top_logprobs": [top]}


async def test_chat_messages_go_through_the_template(backend):
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": content, "name": "me"}]
    body = (await complete(backend, "/v1/chat/completions", messages=messages)).json()
    assert backend.requests[0].prompt == "system: be\nuser: ab\n"
    assert backend.requests[0].max_tokens == backend.max_context
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "café", "refusal": None}


async def test_models_lists_the_one_served():
    listed = (await call(ScriptedBackend(), "GET", "/v1/models")).json()
    assert listed["data"][0]["gammaray"] == {"chat": True, "drafters": ["head", "suffix"]}
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["scripted"]
    assert (await call(ScriptedBackend(), "GET", "/v1/models/scripted")).json()["id"] == "scripted"
    assert (await call(ScriptedBackend(), "GET", "/v1/models/other")).status_code == 404


async def test_adapters_are_models_that_a_request_may_name(backend):
    backend.adapters = ["legal", "sql"]
    listed = (await call(backend, "GET", "/v1/models")).json()["data"]
    assert [(model["id"], model.get("parent")) for model in listed] == [
        ("scripted", None),
        ("legal", "scripted"),
        ("sql", "scripted"),
    ]
    assert (await call(backend, "GET", "/v1/models/sql")).json()["parent"] == "scripted"
    for path, fields in BODIES.items():
        assert (await complete(backend, path, model="sql", **fields)).json()["model"] == "sql"
        assert backend.requests[-1].model == "sql"
        refused = await complete(backend, path, model="poems", **fields)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


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


async def test_echo_of_no_tokens_is_the_prompt_alone_with_logprobs_of_two_numbers(backend):
    answer = await complete(backend, prompt=PROMPT, echo=True, logprobs=1, prompt_logprobs=0, max_tokens=0)
    check_answer("/v1/completions", answer.json())
    (choice,) = answer.json()["choices"]
    assert choice["prompt_logprobs"] == [None, {"8": RANKED[1]["8"]}, {"9": RANKED[2]["9"]}]
    assert (choice["text"], choice["finish_reason"]) == ("<7><8><9>", "length")
    assert choice["logprobs"] == LOGPROBS
    assert answer.json()["usage"]["completion_tokens"] == 0
    assert answer.json()["usage"]["total_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert backend.requests[0].max_tokens == 1


async def test_prompt_logprobs_of_a_chat_are_at_the_root_and_computed_once(backend):
    answer = await complete(backend, "/v1/chat/completions", messages=CHAT, n=3, prompt_logprobs=1)
    check_answer("/v1/chat/completions", answer.json())
    rendered = backend.render_chat(CHAT)
    assert len(answer.json()["prompt_logprobs"]) == len(rendered)
    assert [request.num_prompt_logprobs for request in backend.requests] == [1, None, None]


@pytest.mark.parametrize("prompts", [[PROMPT], [PROMPT, [4, 5]]])
async def test_the_first_sample_of_a_prompt_scores_it_for_all_its_samples(backend, prompts):
    """Log-probabilities of an echo cover the prompt and then the completion."""
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
        assert choice["logprobs"] == {
            "tokens": [*LOGPROBS["tokens"], "caf"],
            "token_logprobs": [*LOGPROBS["token_logprobs"], -0.5],
            "top_logprobs": [*LOGPROBS["top_logprobs"], {"t0": -1.0, "caf": -0.5}],
            "text_offset": [*LOGPROBS["text_offset"], 9],
        }
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
    assert "prompt_logprobs" not in choice


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
