"""The prompts of `gammaray bench` and `gammaray qualify` where none are given."""

from gammaray.bench.prompts import NUM_PROMPTS, fingerprint, own_prompts


def test_prompts_are_different_take_turns_and_end_inside_a_line():
    rows = own_prompts(NUM_PROMPTS + 1)
    assert len({text for _, text in rows}) == len(rows) == NUM_PROMPTS
    assert [category for category, _ in rows] == ["code", "prose", "repetitive"] * (NUM_PROMPTS // 3)
    assert all(text and text == text.rstrip() for _, text in rows)
    assert own_prompts(2) == rows[:2]


def test_fingerprints_of_different_sets_differ():
    assert fingerprint(["a", "b"]) == fingerprint(["a", "b"])
    assert fingerprint(["a", "b"]) != fingerprint(["ab", ""])
