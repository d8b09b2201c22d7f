"""Figures of the benchmark of drafts with another vocabulary."""

import pytest

from benchmarks.vocabularies import Sums, share_of_common
from gammaray.types import VerificationMethod
from gammaray.vocabulary import Vocabulary
from services.qualify.loop import MeasuredCycle
from services.vocabulary.translation import Translation
from tests.support.vocabulary_helpers import CODE, byte_level

COUPLED, REJECTION, *_ = VerificationMethod


def cycle(drafted, accepted):
    tested = min(drafted, accepted + 1)
    return MeasuredCycle(drafted, tested, accepted, accepted + 1, 1.0, drafted, 10.0, False)


def test_row_has_acceptance_of_drafted_cycles_and_the_speed_over_plain_decoding():
    sums = Sums(
        COUPLED, [cycle(4, 4), cycle(4, 1), cycle(0, 0)], [2.0, 1.0], [3.0, 3.0], num_tokens=8, num_equal=2
    )
    row = sums.row()
    assert (row["completions"], row["equal"], row["tested"]) == (2, 2, 6)
    assert row["alpha"] == pytest.approx(5 / 6)
    assert row["tokens_per_cycle"] == pytest.approx(8 / 3)
    assert row["drafted_per_cycle"] == pytest.approx(8 / 3)
    assert (row["speed"], row["speed_range"]) == (2.0, [1.5, 3.0])
    assert Sums(REJECTION, [cycle(4, 4)], [2.0], [3.0], 5, 0).row()["equal"] is None
    assert row["tokens_per_s"] == pytest.approx(8 / 3)


def test_share_is_of_all_tokens_of_the_texts():
    draft, target = Vocabulary(byte_level("", 256)), Vocabulary(byte_level(CODE, 300))
    pair = Translation(draft, target, len(draft), len(target))
    joined = next(token_id for token_id, spelling in enumerate(target.spellings) if len(spelling) > 1)
    one = target.id_of(b"x")
    assert share_of_common(pair, [[joined, one], [one, one]]) == 0.75
    assert share_of_common(pair, []) == 0.0
