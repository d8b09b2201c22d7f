"""What each kind of server is sent, and what its answers mean; answers of other forms are failures."""

from __future__ import annotations

import json

import pytest

from gammaray.types import SamplingParams
from orchestrator.drafting.http.client import DraftServerError, Failure
from orchestrator.drafting.http.dialects import Ask, Reply, dialect_of

ASK = Ask([1, 2, 3], 4, "m", salt="s", slot=2)
OWNERS = ["gammaray", "library", "llamacpp", "sglang", "vllm", "someone"]

GOOD = {
    "gammaray": (
        {"choices": [{"text": "ab", "finish_reason": "length"}], "gammaray": {"token_ids": [7, 8]}},
        Reply((7, 8), "ab"),
    ),
    "library": ({"response": "ab", "done_reason": "stop"}, Reply(None, "ab", True)),
    "llamacpp": ({"content": "ab", "tokens": [7, 8], "stop_type": "limit"}, Reply((7, 8), "ab")),
    "sglang": (
        {"text": "ab", "output_ids": [7, 8], "meta_info": {"finish_reason": {"type": "stop"}}},
        Reply((7, 8), "ab", True),
    ),
    "vllm": (
        {"choices": [{"text": "ab", "token_ids": [7, 8], "finish_reason": "stop"}]},
        Reply((7, 8), "ab", True),
    ),
    "someone": ({"choices": [{"text": "ab", "finish_reason": "length"}]}, Reply(None, "ab")),
}


@pytest.mark.parametrize(
    ("owner", "path", "wanted"),
    [
        (
            "gammaray",
            "/v1/completions",
            {
                "prompt": [1, 2, 3],
                "max_tokens": 4,
                "temperature": 0,
                "store": False,
                "gammaray": {"cache_salt": "s"},
            },
        ),
        ("library", "/api/generate", {"raw": True, "options": {"num_predict": 4, "temperature": 0}}),
        (
            "llamacpp",
            "/completion",
            {
                "prompt": [1, 2, 3],
                "n_predict": 4,
                "temperature": 0,
                "cache_prompt": True,
                "id_slot": 2,
                "return_tokens": True,
            },
        ),
        (
            "sglang",
            "/generate",
            {
                "input_ids": [1, 2, 3],
                "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": False},
            },
        ),
        (
            "vllm",
            "/v1/completions",
            {"prompt": [1, 2, 3], "max_tokens": 4, "return_token_ids": True, "cache_salt": "s"},
        ),
        ("someone", "/v1/completions", {"model": "m", "max_tokens": 4, "temperature": 0}),
    ],
)
def test_call_has_the_fields_of_the_server(owner, path, wanted):
    dialect = dialect_of(owner)
    body = json.loads(json.dumps(dialect.body(ASK)))
    assert dialect.path == path
    assert {name: body[name] for name in wanted} == wanted
    assert body["stream"] is False


def test_text_goes_where_the_server_takes_text():
    ask = Ask("abc", 4)
    assert dialect_of("sglang").body(ask)["text"] == "abc"
    for owner in ("library", "llamacpp", "vllm", "someone"):
        assert dialect_of(owner).body(ask)["prompt"] == "abc"


def test_gammaray_draws_with_the_noise_of_the_target():
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, logit_bias={3: 1.5}, seed=2**63 + 1)
    ask = Ask([1], 4, sampling=params)
    body = json.loads(json.dumps(dialect_of("gammaray").body(ask)))
    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.7, 0.9, 5)
    assert (body["seed"], body["logit_bias"]) == (2**63 + 1, {"3": 1.5})
    assert [owner for owner in OWNERS if dialect_of(owner).has_noise] == ["gammaray"]


@pytest.mark.parametrize("owner", OWNERS)
def test_answer_is_read(owner):
    body, reply = GOOD[owner]
    assert dialect_of(owner).reply(body) == reply
    assert (reply.token_ids is not None) is dialect_of(owner).has_ids


NO_ANSWERS = [
    None,
    7,
    "text",
    [],
    {},
    {"choices": []},
    {"choices": [None]},
    {"choices": [{}]},
    {"choices": [{"text": None}]},
    {"choices": {"text": "a"}},
    {"text": "a", "output_ids": [None], "content": "a", "tokens": ["1"]},
    {"text": "a", "content": "a"},
    {"output_ids": [1], "tokens": [1]},
    {"error": {"message": "no"}},
]
WITHOUT_IDS = [
    {"choices": [{"text": "a", "token_ids": "7"}], "gammaray": {"token_ids": None}},
    {"choices": [{"text": "a", "token_ids": [1.5]}], "gammaray": {"token_ids": [True]}},
    {"choices": [{"text": "a"}]},
]


def test_answer_of_another_form_is_a_failure(subtests):
    for owner, body in [
        *((owner, body) for owner in OWNERS for body in NO_ANSWERS),
        *((owner, body) for owner in ("gammaray", "vllm") for body in WITHOUT_IDS),
    ]:
        with subtests.test(str((owner, body))[:80]):
            with pytest.raises(DraftServerError) as caught:
                dialect_of(owner).reply(body)
            assert caught.value.failure is Failure.CONTENT
