"""Drafts of another vocabulary: their tokens of the committed text, and which tokens the two share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray.errors import InvalidArgumentError
from gammaray.vocabulary import Vocabulary
from services.demo_pair import DRAFT_DIR, TARGET_DIR
from services.vocabulary.context import MAX_SEGMENT
from services.vocabulary.intersection import Intersection
from services.vocabulary.translation import Translation, load_translation, load_vocabulary, target_size
from tests.support.vocabulary_helpers import CODE, PROSE, byte_fallback, byte_level, word_pieces

TARGET = Vocabulary(byte_level(CODE + PROSE, 400, specials=("<|im_end|>", "<|im_start|>", "<|end|>")))
SAME_END = Vocabulary(byte_level(CODE, 300))
PIECES = Vocabulary(byte_fallback(["▁the", "▁def", "return", "▁self"]))
DRAFTS = pytest.mark.parametrize("draft", [SAME_END, PIECES], ids=["byte level", "byte fallback"])
NO_LIMIT = 2**20


def translation(draft):
    return Translation(draft, TARGET, len(draft), len(TARGET))


def from_scratch(draft, token_ids):
    context = translation(draft).context(NO_LIMIT)
    context.follow(token_ids, 0)
    return context.tokens


CHANGES = st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, len(TARGET) - 1), max_size=40)))


@DRAFTS
@given(changes=CHANGES)
def test_translation_does_not_depend_on_how_the_tokens_arrive(draft, changes):
    context, held = translation(draft).context(NO_LIMIT), []
    for dropped, added in changes:  # a new owner of a session may replace tokens
        common = max(0, len(held) - dropped)
        held = [*held[:common], *added]
        before = list(context.tokens)
        kept = context.follow(held, common)
        assert context.tokens[:kept] == before[:kept]
        assert context.tokens == from_scratch(draft, held)
        assert draft.bytes_of(context.tokens) == TARGET.bytes_of(held)


def test_only_the_last_segment_is_tokenised_again():
    token_ids = TARGET.encode((CODE + PROSE).encode() * 20)
    context = translation(SAME_END).context(NO_LIMIT)
    context.follow(token_ids, 0)
    num_tokens = len(context.tokens)
    assert context.follow([*token_ids, token_ids[0]], len(token_ids)) > num_tokens - MAX_SEGMENT
    whole = SAME_END.encode(TARGET.bytes_of(token_ids))
    # Segments end before words, where the tokenizer never joins: few tokens differ from those of the whole.
    assert abs(num_tokens - len(whole)) <= 0.01 * len(whole)


def test_text_without_words_is_cut():
    context = translation(SAME_END).context(NO_LIMIT)
    token_ids = TARGET.encode(b"x" * 4096)
    context.follow(token_ids, 0)
    assert SAME_END.bytes_of(context.tokens) == b"x" * 4096
    assert context.follow([*token_ids, token_ids[0]], len(token_ids)) >= len(context.tokens) - 2 * MAX_SEGMENT


def test_special_tokens_map_by_content_or_role_and_others_are_left_out():
    im_end, im_start, end = (TARGET.specials[one] for one in ("<|im_end|>", "<|im_start|>", "<|end|>"))
    hello = TARGET.encode(b"the dog")
    shared = from_scratch(SAME_END, [im_start, *hello, end, *hello, im_end])
    dog, draft_end = SAME_END.encode(b"the dog"), SAME_END.eos_token_id
    # <|end|> by its content; <|im_end|> is the end of sequence, which the draft calls <|end|>.
    assert shared == [*dog, draft_end, *dog, draft_end]
    pieces = from_scratch(PIECES, [im_start, *hello, end, *hello, im_end])
    dog = PIECES.encode(b"the dog")
    assert pieces == [*PIECES.prefix, *dog, *dog, PIECES.eos_token_id]


def test_translation_stops_past_its_limit():
    token_ids = TARGET.encode((CODE + PROSE).encode() * 50)
    context = translation(SAME_END).context(200)
    context.follow(token_ids, 0)
    assert 200 < len(context.tokens) <= 200 + MAX_SEGMENT
    kept = context.follow([*token_ids, 5], len(token_ids))
    assert kept <= len(context.tokens)
    assert 200 < len(context.tokens) <= 200 + 2 * MAX_SEGMENT
    context.follow(token_ids[:20], 20)
    assert len(context.tokens) <= 200
    assert context.tokens == from_scratch(SAME_END, token_ids[:20])


OTHER = Vocabulary(byte_level(CODE + PROSE, 400, specials=("<|im_end|>", "<|end|>")))
DRAFT = Vocabulary(byte_level(CODE, 300, specials=("<|end|>", "<|pad|>"), specials_last=True))
PAIRS = pytest.mark.parametrize(
    ("draft", "target"), [(DRAFT, OTHER), (PIECES, OTHER), (OTHER, PIECES)], ids=["bpe", "pieces", "wide"]
)


def common(draft, target):
    return Intersection(draft, target, len(draft), len(target))


@PAIRS
def test_shared_tokens_have_equal_bytes_and_ascending_ids(draft, target):
    shared = common(draft, target)
    assert shared.target_ids == sorted(set(shared.target_ids))
    for target_id, draft_id in zip(shared.target_ids, shared.draft_ids, strict=True):
        if target_id == target.eos_token_id:
            assert draft_id == draft.eos_token_id
        else:
            assert target.spellings[target_id] == draft.spellings[draft_id] != b""
    expected = {spelling for spelling in target.spellings if spelling} & set(draft.spellings)
    assert shared.num_text_tokens == len(expected)
    assert len(shared.target_ids) == len(expected) + 1


def test_tokens_past_the_models_sizes_are_not_shared():
    shared = Intersection(DRAFT, OTHER, 100, 150)
    assert max(shared.draft_ids) < 100
    assert max(shared.target_ids) < 150
    assert OTHER.eos_token_id not in shared.target_ids  # the draft's end is its last token


def test_translation_of_directories_uses_the_models_sizes(tmp_path):
    tokenizer = byte_level(CODE, 300)
    tokenizer.save_pretrained(tmp_path)
    pair = load_translation(str(DRAFT_DIR), 2048, str(tmp_path))
    assert (pair.target_size, target_size(str(tmp_path))) == (300, 0)
    back = load_translation(str(tmp_path), 300, str(TARGET_DIR))
    assert back.target_size == 2048
    with pytest.raises(InvalidArgumentError, match=r"^model: got"):
        load_translation(str(tmp_path / "none"), 300, str(TARGET_DIR))


@pytest.mark.parametrize("kind", ["missing", "empty", "broken", "words"])
def test_tokenizer_that_cannot_be_used_is_refused_by_its_setting(tmp_path, kind):
    path = tmp_path / kind
    if kind != "missing":
        path.mkdir()
    if kind == "broken":
        (path / "tokenizer.json").write_text('{"model":')
        (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    if kind == "words":
        word_pieces().save_pretrained(path)
    with pytest.raises(InvalidArgumentError, match=r"^target: got .*, allowed: .*tokenizer"):
        load_vocabulary(str(path), "target")
