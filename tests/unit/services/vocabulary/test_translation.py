"""Which tokens two vocabularies share, and how a draft of another vocabulary is loaded."""

import pytest

from gammaray.errors import InvalidArgumentError
from gammaray.vocabulary import Vocabulary
from services.demo_pair import DRAFT_DIR, TARGET_DIR
from services.vocabulary.intersection import Intersection
from services.vocabulary.translation import load_translation, load_vocabulary, target_size
from tests.support.vocabulary_helpers import CODE, PROSE, byte_fallback, byte_level, word_pieces

TARGET = Vocabulary(byte_level(CODE + PROSE, 400, specials=("<|im_end|>", "<|end|>")))
DRAFT = Vocabulary(byte_level(CODE, 300, specials=("<|end|>", "<|pad|>"), specials_last=True))
PIECES = Vocabulary(byte_fallback(["▁the", "▁def", "return", "▁self"]))
PAIRS = pytest.mark.parametrize(
    ("draft", "target"), [(DRAFT, TARGET), (PIECES, TARGET), (TARGET, PIECES)], ids=["bpe", "pieces", "wide"]
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
    shared = Intersection(DRAFT, TARGET, 100, 150)
    assert max(shared.draft_ids) < 100
    assert max(shared.target_ids) < 150
    assert TARGET.eos_token_id not in shared.target_ids  # the draft's end is its last token


def test_translation_of_directories_uses_the_models_sizes(tmp_path):
    tokenizer = byte_level(CODE, 300)
    tokenizer.save_pretrained(tmp_path)
    pair = load_translation(str(DRAFT_DIR), 2048, str(tmp_path))
    assert (pair.target_size, target_size(str(tmp_path))) == (300, 0)
    back = load_translation(str(tmp_path), 300, str(TARGET_DIR))
    assert back.target_size == 2048
    with pytest.raises(InvalidArgumentError) as caught:
        load_translation(str(tmp_path / "none"), 300, str(TARGET_DIR))
    assert caught.value.field == "model"


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
    with pytest.raises(InvalidArgumentError) as caught:
        load_vocabulary(str(path), "target")
    assert caught.value.field == "target"
    assert "tokenizer" in caught.value.allowed
