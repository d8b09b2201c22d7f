"""Answers of servers: both formats of log-probabilities, and fields that are malformed."""

import math

import pytest

from gammaray.audit.answers import AnswerError, decoded, parse_answer

LISTS = {
    "tokens": ["a", "b\ufffd"],
    "token_logprobs": [-0.5, -1.0],
    "top_logprobs": [{"a": -0.5, "c": -1.5}, {"\ufffd": -0.9, "d": -2.0}],
}
OBJECTS = {
    "content": [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5},
                {"token": "x", "logprob": -2.0},
                {"token": "x", "logprob": -2.0},
            ],
        },
        {"token": "\ufffd", "logprob": -3.0, "bytes": [226], "top_logprobs": []},
        {"id": 7, "token": "q", "logprob": -3.0, "top_logprobs": [{"id": 7, "token": "q", "logprob": -3.0}]},
    ]
}


def body(logprobs=None, **choice):
    return {
        "choices": [{"index": 0, "text": "ab", "finish_reason": "length", "logprobs": logprobs, **choice}]
    }


def test_lists_of_completions_are_read():
    first, second = parse_answer(body(LISTS)).choices[0].tokens
    assert (first.key, first.logprob, dict(first.cells)) == ("a", -0.5, {"a": -0.5, "c": -1.5})
    # Tokens with a part of a character may be several, so they are no cells; they stay listed for the law.
    assert dict(second.cells) == {"d": -2.0}
    assert len(second.listed) == 2
    assert second.lp == -1.0


def test_objects_of_chats_are_read_and_equal_texts_are_one_cell():
    chat = {"choices": [{"message": {"content": "ab"}, "logprobs": OBJECTS}], "usage": None}
    (choice,) = parse_answer(chat).choices
    first, second, third = choice.tokens
    assert choice.text == "ab"
    assert first.cells["x"] == pytest.approx(math.log(2) - 2.0)
    assert (second.key, third.key) == ("bytes:e2", "7:q")
    assert third.lp == -3.0


def test_choices_come_by_index_and_usage_may_be_absent():
    answer = parse_answer({"choices": [{"index": 1, "text": "b"}, {"index": 0, "text": "a"}]})
    assert [choice.text for choice in answer.choices] == ["a", "b"]
    assert answer.usage is None


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        ([], "body"),
        ({}, "choices"),
        ({"choices": []}, "choices"),
        ({"choices": [{}] * 129}, "choices"),
        ({"choices": [5]}, "choices[0]"),
        (body(index="0"), "choices[0].index"),
        (body(text=5), "choices[0].text"),
        (body(finish_reason=True), "choices[0].finish_reason"),
        (body([]), "choices[0].logprobs"),
        (body({"tokens": "ab"}), "choices[0].logprobs.tokens"),
        (body({**LISTS, "token_logprobs": [-1.0]}), "choices[0].logprobs"),
        (body({**LISTS, "token_logprobs": [-1.0, math.nan]}), "choices[0].logprobs.token_logprobs[1]"),
        (body({**LISTS, "top_logprobs": [{"a": "0"}, {}]}), "choices[0].logprobs.top_logprobs[0]"),
        (body({"content": [{"token": 1}]}), "choices[0].logprobs.content[0].token"),
        (body({"content": [{"token": "\ufffd", "bytes": [256]}]}), "choices[0].logprobs.content[0].bytes"),
        (
            body({"content": [{"token": "a", "top_logprobs": [3]}]}),
            "choices[0].logprobs.content[0].top_logprobs[0]",
        ),
        ({**body(), "usage": {"prompt_tokens": 1}}, "usage.completion_tokens"),
        ({**body(), "usage": {"prompt_tokens": "1"}}, "usage.prompt_tokens"),
    ],
)
def test_malformed_field_is_named(answer, field):
    with pytest.raises(AnswerError) as caught:
        parse_answer(answer)
    assert caught.value.field == field


@pytest.mark.parametrize("value", [-(10**400), -math.inf, -1e300])
def test_lowest_log_probability_is_bounded(value):
    (token,) = parse_answer(body({"content": [{"token": "a", "logprob": value}]})).choices[0].tokens
    assert token.logprob == -10_000


@pytest.mark.parametrize("data", [b"{", b"[" * 100_000, b"\xff"])
def test_body_that_is_no_json_is_an_error_of_the_body(data):
    with pytest.raises(AnswerError, match="body"):
        decoded(data)
