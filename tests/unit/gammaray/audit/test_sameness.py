"""Where completions differ, and whether rounding explains it."""

import pytest

from gammaray.audit.answers import Answer, Choice, Token
from gammaray.audit.findings import CheckResult, Status
from gammaray.audit.reference import judged
from gammaray.audit.sameness import Comparison, first_difference, worst


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
