"""The declaration of the sampling parameters: complete, as on the wire, and checked by its own ranges."""

import dataclasses

import pytest

from gammaray import InvalidArgumentError, SamplingParams
from gammaray.checks import Integer, Number, TokenBiases, TokenIds
from gammaray.sampling import MAX_LOGIT_BIAS, SAMPLING_RULES, SamplingOptions
from gammaray.v1 import types_pb2 as pb

FIELDS = {field.name: field for field in dataclasses.fields(SamplingParams)}
NUMBERS = [name for name, rule in SAMPLING_RULES.items() if isinstance(rule, (Number, Integer))]
WIRE = pb.SamplingParams.DESCRIPTOR.fields_by_name


def test_every_field_has_a_rule_with_a_meaning_and_an_option():
    assert list(SAMPLING_RULES) == list(FIELDS) == list(SamplingOptions.__annotations__)
    assert all(rule.meaning.endswith(".") for rule in SAMPLING_RULES.values())


def test_fields_are_on_the_wire_with_the_same_defaults():
    assert set(WIRE.keys()) == set(FIELDS)
    defaults = SamplingParams()
    defaults.validate(vocab_size=1)
    for name in FIELDS:
        default, own = getattr(defaults, name), WIRE[name].default_value
        # A field without presence cannot tell its default from its absence.
        fits = default is None or default != own if WIRE[name].has_presence else default in (own, (), {})
        assert fits, name


def test_numbers_are_checked_at_their_bounds(subtests):
    for name in NUMBERS:
        with subtests.test(str(name)[:80]):
            rule = SAMPLING_RULES[name]
            step = 1 if isinstance(rule, Integer) else 1e-6
            is_open = getattr(rule, "open_low", False)
            for inside in (rule.low + step * is_open, rule.high):
                SamplingParams(**{name: inside}).validate()
            for outside in (rule.low - step * (not is_open), rule.high + step, None, "1", True):
                if outside is None and getattr(rule, "is_optional", False):
                    continue
                with pytest.raises(InvalidArgumentError) as caught:
                    SamplingParams(**{name: outside}).validate()
                assert (caught.value.field, caught.value.got) == (name, str(outside))
                assert f"{rule.low}, {rule.high}]" in caught.value.allowed


def test_copied_values_are_those_of_the_fields():
    given = {"allowed_token_ids": [1, 2], "logit_bias": {3: 1.0}, "top_k": 5, "seed": None}
    assert SamplingParams.of(given) == SamplingParams(
        allowed_token_ids=(1, 2), logit_bias={3: 1.0}, top_k=5, seed=None
    )
    params = SamplingParams.of(given)
    given["allowed_token_ids"].append(3)
    given["logit_bias"].clear()
    assert (params.allowed_token_ids, params.logit_bias) == ((1, 2), {3: 1.0})


class Counted(list):
    """A list that must not be read."""

    def __iter__(self):
        raise AssertionError("read before its size was checked")


@pytest.mark.parametrize(
    ("rule", "value", "got"),
    [
        (TokenIds(max_ids=2), Counted([1, 2, 3]), "3 token ids"),
        (TokenIds(), "12", "12"),
        (TokenIds(), 5, "5"),
        (TokenBiases(-1, 1, MAX_LOGIT_BIAS), dict.fromkeys(range(301), 0.0), "301 entries"),
        (TokenBiases(-1, 1, 1), [1], "[1]"),
    ],
)
def test_values_that_cannot_be_copied_are_named(rule, value, got):
    with pytest.raises(InvalidArgumentError) as caught:
        rule.copied("mine", value)
    assert (caught.value.field, caught.value.got) == ("mine", got)
