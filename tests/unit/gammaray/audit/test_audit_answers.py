"""Answers of servers: both formats of log-probabilities, malformed fields, and where completions differ."""

import math

import pytest

from gammaray.audit.answers import Answer, AnswerError, Choice, Token, decoded, parse_answer
from gammaray.audit.findings import CheckResult, Status
from gammaray.audit.reference import judged
from gammaray.audit.sameness import Comparison, first_difference, worst

LISTS = {
    "tokens": ["a", "b\ufffd"],
    "token_logprobs": [-0.5, -1.0],
    "top_logprobs": [{"a": -0.5, "c": -1.5}, {"\ufffd": -0.9, "d": -2.0}],
}
A, X = {"token": "a", "logprob": -0.5}, {"token": "x", "logprob": -2.0}
Q = {"id": 7, "token": "q", "logprob": -3.0}
OBJECTS = {
    "content": [
        {**A, "bytes": [97], "top_logprobs": [A, X, X]},
        {"token": "\ufffd", "logprob": -3.0, "bytes": [226], "top_logprobs": []},
        {**Q, "top_logprobs": [Q]},
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


def test_lowest_log_probability_is_bounded():
    for value in (-(10**400), -math.inf, -1e300):
        (token,) = parse_answer(body({"content": [{"token": "a", "logprob": value}]})).choices[0].tokens
        assert token.logprob == -10_000


@pytest.mark.parametrize("data", [b"{", b"[" * 100_000, b"\xff"])
def test_body_that_is_no_json_is_an_error_of_the_body(data):
    with pytest.raises(AnswerError, match="body"):
        decoded(data)


def token(key, **cells):
    return Token(key, key, cells.get(key), tuple(cells.items()))


def choice(*tokens):
    return Choice("".join(one.text for one in tokens), tokens, "length")


LEFT = choice(token("a", a=-0.1, b=-3.0), token("c", c=-0.70, d=-0.71))


def right(gap, noise):
    return choice(token("a", a=-0.1 - noise, b=-3.0), token("d", d=-0.70, c=-0.70 - gap))


def compared(temperature, *pairs):
    found = Comparison(temperature)
    for left, other in pairs:
        found.add(Answer((left,), None), Answer((other,), None, curl="curl"))
    return found.result("texts")


def test_difference_has_its_place_and_margin():
    found = first_difference(LEFT, right(0.01, 0.0))
    assert (found.index, found.left, found.right) == (1, "c", "d")
    assert found.margin == pytest.approx(0.01)
    assert first_difference(LEFT, LEFT) is None
    shorter = first_difference(LEFT, choice(LEFT.tokens[0]))
    assert (shorter.index, shorter.right) == (1, "(end)")
    without = first_difference(Choice("abc", (), None), Choice("abd", (), None))
    assert (without.index, without.margin) == (2, None)


@pytest.mark.parametrize(
    ("noise", "status"),
    [
        pytest.param(0.0, Status.FAILED, id="exact"),
        pytest.param(0.004, Status.FAILED, id="less than half the margin"),
        pytest.param(0.006, Status.PASSED, id="more than half the margin"),
        pytest.param(0.02, Status.INCONCLUSIVE, id="another precision, or a quantised model"),
    ],
)
def test_greedy_difference_is_explained_by_rounding_of_half_its_margin(noise, status):
    result = compared(0.0, (LEFT, right(0.01, noise)))
    assert result.status is status
    assert result.curl == ("curl" if status is Status.FAILED else "")


def test_sampled_difference_is_inconclusive_only_if_rounding_is_large_enough():
    assert compared(1.0, (LEFT, right(0.01, 1e-6))).status is Status.FAILED
    assert compared(1.0, (LEFT, right(0.01, 0.1))).status is Status.INCONCLUSIVE


def test_large_margin_is_not_explained_by_any_rounding():
    left = choice(LEFT.tokens[0], token("c", c=-0.1, d=-2.0))
    assert compared(0.0, (left, right(1.0, 1.5))).status is Status.FAILED


def test_worst_result_counts():
    found = (Status.PASSED, Status.FAILED, Status.INCONCLUSIVE)
    results = [CheckResult(status, status.name) for status in found]
    assert worst(results).status is Status.FAILED
    assert worst(results[:1]).status is Status.PASSED


@pytest.mark.parametrize(
    ("differences", "status"),
    [([0.0] * 9 + [0.09], Status.PASSED), ([0.05, -0.05], Status.INCONCLUSIVE), ([0.0, -0.3], Status.FAILED)],
)
def test_mean_difference_of_logprobs_decides(differences, status):
    tokens = [(one, token("a", a=-1.0 + one), -1.0) for one in differences]
    result = judged(tokens, "the reference's", "curl")
    assert result.status is status
    assert result.evidence["largest"] == max(map(abs, differences))
    assert result.curl == ("curl" if status is Status.FAILED else "")
