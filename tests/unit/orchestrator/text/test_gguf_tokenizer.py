"""The tokenizer of a GGUF file, as the orchestrator uses it."""

from __future__ import annotations

import pytest

from gammaray.errors import InvalidArgumentError
from orchestrator.text.tokenizer import Tokenizer, served_name
from services.process.fingerprints import vocab_sha256
from tests.support.gguf_helpers import END, START, TOKENS, VOCAB_SIZE, tiny_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path, _ = tiny_gguf("llama", tmp_path_factory.mktemp("gguf"))
    (path.parent / "tokenizer.json").write_text("{")  # another model's, or broken: it does not count
    return path


def test_tokenizer_is_that_of_the_file(file):
    tokenizer = Tokenizer(str(file))
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.max_context == 128
    assert tokenizer.eos_token_ids == {END}
    ids = tokenizer.encode("<|start|> the<|end|>")
    assert [TOKENS[token_id] for token_id in ids] == ["<|start|>", "Ġthe", "<|end|>"]
    assert tokenizer.decode(ids) == " the"
    assert tokenizer.is_special(START)
    assert tokenizer.token_bytes(TOKENS.index("Ġthe")) == b" the"
    prompt = tokenizer.render_chat([{"role": "user", "content": "in"}])
    assert prompt == "<|start|>user: in<|end|><|start|>assistant: "


def test_worker_and_orchestrator_have_the_same_fingerprint(file):
    assert vocab_sha256(str(file)) == Tokenizer(str(file)).vocab_sha256 != ""


def test_name_is_that_of_the_file():
    assert served_name("models/Some-Model.Q4_1.gguf") == "Some-Model.Q4_1"


def test_file_that_cannot_be_read_is_refused(tmp_path, file, monkeypatch):
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:2000])
    with pytest.raises(InvalidArgumentError, match="model: got"):
        Tokenizer(str(tmp_path / "cut.gguf"))
    monkeypatch.setattr("gammaray.gguf.find_spec", lambda name: None)
    with pytest.raises(InvalidArgumentError, match="packages that are not installed"):
        Tokenizer(str(file))
