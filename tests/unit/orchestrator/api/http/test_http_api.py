"""The OpenAI-compatible API over a scripted orchestrator: requests and responses."""

import asyncio
import json

import pytest

from gammaray.types import DrafterKind, GammaPolicy, SamplingParams, VerificationMethod
from tests.support.http_helpers import CHAT, GAMMARAY, call, complete, events
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


async def test_completion_every_option_reaches_the_orchestrator():
    backend = ScriptedBackend()
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


async def test_chat_prediction_of_text_parts_reaches_every_choice():
    backend = ScriptedBackend()
    parts = [{"type": "text", "text": "def f():\n"}, {"type": "text", "text": "    pass\n"}]
    prediction = {"type": "content", "content": parts}
    await complete(backend, "/v1/chat/completions", messages=CHAT, n=2, prediction=prediction)
    assert [request.prediction for request in backend.requests] == ["def f():\n    pass\n"] * 2
    for nothing in (None, {"type": "content", "content": ""}):
        await complete(backend, "/v1/chat/completions", messages=CHAT, prediction=nothing)
        assert backend.requests[-1].prediction == ""


async def test_completion_defaults_are_those_of_openai():
    backend = ScriptedBackend()
    await complete(backend, prompt="x", temperature=None, stop=None, gammaray={"gamma": None})
    (request,) = backend.requests
    assert request.max_tokens == 16
    assert request.sampling == SamplingParams()
    assert request.gamma == GammaPolicy()


async def test_samples_have_their_index_and_their_own_gammaray():
    backend = ScriptedBackend()
    body = (await complete(backend, prompt="x", n=3, seed=5)).json()
    assert [request.sampling.sample_index for request in backend.requests] == [0, 1, 2]
    assert {request.sampling.seed for request in backend.requests} == {5}
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["gammaray"]["session_id"] for choice in body["choices"]] == ["s0", "s1", "s2"]
    assert {choice["gammaray"]["seed"] for choice in body["choices"]} == {5}
    assert body["gammaray"] == body["choices"][0]["gammaray"]
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 9


async def test_samples_run_at_once():
    waiting = asyncio.Barrier(3)
    backend = ScriptedBackend(lambda request, number: waiting.wait())
    answer = await asyncio.wait_for(complete(backend, prompt="x", n=3), 10)
    assert len(answer.json()["choices"]) == 3


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]]], ids=["texts", "lists of tokens"])
async def test_several_prompts_have_a_choice_each(prompt):
    backend = ScriptedBackend()
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


async def test_chat_messages_go_through_the_template():
    backend = ScriptedBackend()
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


async def test_adapters_are_models_that_a_request_may_name():
    backend = ScriptedBackend()
    backend.adapters = ["legal", "sql"]
    listed = (await call(backend, "GET", "/v1/models")).json()["data"]
    assert [(model["id"], model.get("parent")) for model in listed] == [
        ("scripted", None),
        ("legal", "scripted"),
        ("sql", "scripted"),
    ]
    assert (await call(backend, "GET", "/v1/models/sql")).json()["parent"] == "scripted"
    for path, fields in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/responses", {"input": "x"}),
    ):
        assert (await complete(backend, path, model="sql", **fields)).json()["model"] == "sql"
        assert backend.requests[-1].model == "sql"
        refused = await complete(backend, path, model="poems", **fields)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
