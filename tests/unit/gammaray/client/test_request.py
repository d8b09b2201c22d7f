"""Requests from plain Python arguments: every option lands in its field, and wrong ones are named."""

import pytest

from gammaray import (
    ADAPTIVE,
    DrafterKind,
    GammaPolicy,
    GenerateOptions,
    GenerationRequest,
    InvalidArgumentError,
    SamplingParams,
    VerificationMethod,
)
from gammaray.client.request import build_request


def test_request_without_options_has_the_defaults_of_the_types():
    assert build_request("Hi") == GenerationRequest("Hi")


def test_request_every_option_sets_its_field():
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {5: -1.0},
        "allowed_token_ids": [1, 2],
        "banned_token_ids": [3],
        "min_tokens": 2,
        "seed": 17,
        "sample_index": 4,
        "grammar": "",  # tests/unit/gammaray/client/test_structured.py; it does not go with ignore_eos
    }
    same = {"max_tokens": 5, "ignore_eos": True, "store": True, "model": "demo"}
    same |= {"session_id": "mine", "turn": 2, "cache_salt": "apart"}
    others = {  # option: given, field, expected
        "stop": ("end", "stop", ("end",)),
        "stop_token_ids": ([9], "stop_token_ids", (9,)),
        "logprobs": (3, "num_top_logprobs", 3),
        "prompt_logprobs": (4, "num_prompt_logprobs", 4),
        "verification": ("rejection", "verification", VerificationMethod.REJECTION),
        "gamma": (6, "gamma", GammaPolicy(6)),
        "drafter": ("none", "drafter", DrafterKind.NONE),
        "prediction": ([5, 6], "prediction", (5, 6)),
    }
    options = {**sampling, **same, **{name: given for name, (given, _, _) in others.items()}}
    others_tested = {"json_schema", "regex", "choice", "receipt"}  # a receipt goes with one method only
    assert options.keys() == GenerateOptions.__annotations__.keys() - others_tested
    expected = {field: value for _, field, value in others.values()}
    assert build_request([1, 2], **options) == GenerationRequest(
        (1, 2), sampling=SamplingParams.of(sampling), **same, **expected
    )


@pytest.mark.parametrize(
    ("gamma", "policy"),
    [
        ("adaptive", ADAPTIVE),
        (0, GammaPolicy(0)),
        (64, GammaPolicy(64)),
        (GammaPolicy(max_gamma=3), GammaPolicy(None, 3)),
    ],
)
def test_request_gamma_of_every_form_is_a_policy(gamma, policy):
    assert build_request("Hi", gamma=gamma).gamma == policy


def test_request_wrong_option_is_named(subtests):
    for options, field in [
        ({"temperature": float("nan")}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"gamma": True}, "gamma"),
        ({"gamma": "fast"}, "gamma"),
        ({"verification": "hope"}, "verification"),
        ({"drafter": "guess"}, "drafter"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "\ud800"}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": 3}, "stop_token_ids"),
        ({"banned_token_ids": ["a"]}, "banned_token_ids"),
        ({"logit_bias": {1: 101.0}}, "logit_bias[1]"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logprobs": 21}, "num_top_logprobs"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"session_id": "a b"}, "session_id"),
        ({"cache_salt": "x" * 65}, "cache_salt"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"store": 0}, "store"),
        ({"store": False, "session_id": "mine"}, "store"),
        ({"prediction": None}, "prediction"),
        ({"prediction": "\ud800"}, "prediction"),
        ({"prediction": [1] * (2**16 + 1)}, "prediction"),
        ({"prediction": [-1]}, "prediction"),
        ({"model": 3}, "model"),
    ]:
        with subtests.test(str((options, field))[:80]):
            with pytest.raises(InvalidArgumentError) as caught:
                build_request("Hi", **options)
            assert caught.value.field == field
            assert caught.value.allowed
            str(caught.value).encode()


def test_request_wrong_prompt_is_named(subtests):
    for prompt in ("", [], b"bytes", None, [-1], [2**32], ["a"], [True], "a\ud800b", "x" * (2**20 + 1)):
        with subtests.test(ascii(prompt)[:20]):
            with pytest.raises(InvalidArgumentError) as caught:
                build_request(prompt)
            assert caught.value.field == "prompt"


def test_request_unknown_option_raises_and_lists_the_known():
    with pytest.raises(TypeError, match=r"no option named temprature; known options: .*temperature"):
        build_request("Hi", temprature=1)


def test_request_whole_request_is_checked_and_takes_no_options():
    with pytest.raises(InvalidArgumentError):
        build_request(GenerationRequest("Hi", max_tokens=0))
    with pytest.raises(TypeError, match="max_tokens"):
        build_request(GenerationRequest("Hi"), max_tokens=3)
