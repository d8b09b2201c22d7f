"""Headers of GGUF files: the same facts as gguf's own reader, and one clear error for every broken file."""

from __future__ import annotations

import random
from importlib.util import find_spec

import gguf
import numpy as np
import pytest

from gammaray.errors import InvalidArgumentError
from gammaray.gguf import (
    TENSOR_TYPES,
    check_packages,
    is_gguf,
    pretrained_arguments,
    read_header,
)
from tests.support.gguf_helpers import END, START, VOCAB_SIZE, tiny_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path, _ = tiny_gguf("llama", tmp_path_factory.mktemp("gguf"), quantised="Q8_0")
    return path


def refusal(path, field="model"):
    with pytest.raises(InvalidArgumentError) as caught:
        read_header(str(path), field)
    return caught.value


def test_header_is_that_of_the_reference_reader(file):
    header, reader = read_header(str(file)), gguf.GGUFReader(file)
    assert header.architecture == "llama"
    assert [(t.name, t.shape, t.type, t.offset, t.num_bytes) for t in header.tensors] == [
        (t.name, tuple(t.shape), t.tensor_type.name, t.data_offset, t.n_bytes) for t in reader.tensors
    ]
    own = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert {key: value for key, value in own.items() if not isinstance(value, list)} == header.metadata
    assert {key: len(value) for key, value in own.items() if isinstance(value, list)} == header.lengths


def test_header_has_the_facts_of_the_model(file):
    header = read_header(str(file))
    assert header.vocab_size == VOCAB_SIZE
    assert header.eos_token_ids == {END}
    assert header.types == ("Q8_0", "F32")
    assert header.num_weights == sum(tensor.n_elements for tensor in gguf.GGUFReader(file).tensors)
    reported = header.summary("float32", 4)
    assert "llama" in reported
    assert "Q8_0 and F32" in reported
    assert "dequantised to float32" in reported


def test_ends_of_turns_end_a_completion(tmp_path):
    path, _ = tiny_gguf("llama", tmp_path, change=lambda writer, _: writer.add_eot_token_id(START))
    assert read_header(str(path)).eos_token_ids == {START, END}


def test_types_have_the_sizes_of_the_reference():
    sizes = {kind.value: (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: sizes[kind] for kind in TENSOR_TYPES} == TENSOR_TYPES


def test_types_can_be_dequantised(subtests):
    for kind in TENSOR_TYPES:
        with subtests.test(str(kind)[:80]):
            _, per_block, block_bytes = TENSOR_TYPES[kind]
            values = np.zeros((1, block_bytes), dtype=np.uint8)
            kind = gguf.GGMLQuantizationType(kind)
            plain = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}
            assert gguf.dequantize(values.view(plain.get(kind, np.uint8)), kind).shape == (1, per_block)


def test_file_truncated_anywhere_is_refused(file, tmp_path):
    data, cut = file.read_bytes(), tmp_path / "cut.gguf"
    header = read_header(str(file))
    start = min(tensor.offset for tensor in header.tensors)
    for length in (0, 3, 4, 10, 24, 40, 100, start // 2, start - 40, start, start + 1, len(data) - 1):
        cut.write_bytes(data[:length])
        error = refusal(cut, "target")
        assert error.field == "target"
        assert "GGUF" in error.allowed, length
    cut.write_bytes(data[:-1])
    assert f"it has {len(data) - 1:,} bytes and its header describes {len(data):,}" in refusal(cut).allowed


def test_corrupt_header_never_raises_anything_else(file, tmp_path):
    data = file.read_bytes()
    start = min(tensor.offset for tensor in read_header(str(file)).tensors)
    chosen, broken, refused = random.Random(0), tmp_path / "broken.gguf", 0
    for _ in range(400):
        changed = bytearray(data)
        for _ in range(chosen.choice((1, 1, 8))):
            changed[chosen.randrange(start)] = chosen.randrange(256)
        broken.write_bytes(changed)
        try:
            read_header(str(broken))
        except InvalidArgumentError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"PK\x03\x04" + bytes(60), "does not begin with the letters GGUF"),
        (b"GGUF\x00\x00\x00\x03" + bytes(60), "little-endian 2 and 3"),
        (b"GGUF\x01\x00\x00\x00" + bytes(60), "version 1"),
        (b"GGUF\x03\x00\x00\x00" + bytes(60), "no general.architecture"),
    ],
)
def test_other_files_are_refused_with_the_reason(tmp_path, content, reason):
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    assert reason in refusal(path).allowed


def test_missing_file_is_refused(tmp_path):
    assert "No such file" in refusal(tmp_path / "none.gguf").allowed


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda writer, _: writer.add_uint16("split.count", 3), "one part of several"),
        (lambda writer, _: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), "(yarn)"),
        (
            lambda _, tensors: tensors.update({"rope_freqs.weight": np.ones(4, np.float32)}),
            "rope_freqs.weight",
        ),
    ],
    ids=["split", "scaled", "factors"],
)
def test_files_that_would_be_another_model_are_refused(tmp_path, change, reason):
    path, _ = tiny_gguf("llama", tmp_path, change=change)
    assert reason in refusal(path).allowed


def test_names_of_files(tmp_path):
    (tmp_path / "folder.gguf").mkdir()
    assert is_gguf("model.gguf")
    assert is_gguf("MODEL.GGUF")
    assert not is_gguf(str(tmp_path / "folder.gguf"))
    assert not is_gguf("team/model-GGUF")


def test_arguments_name_the_file_alone(file):
    with pretrained_arguments("team/model") as given:
        assert given == ("team/model", {})
    with pretrained_arguments(str(file)) as (folder, arguments):
        assert arguments == {"gguf_file": str(file)}
        assert folder != str(file.parent)


def test_missing_package_is_named_with_the_command(monkeypatch):
    check_packages("model.gguf")
    monkeypatch.setattr("gammaray.gguf.find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(InvalidArgumentError) as caught:
        check_packages("model.gguf", "target")
    assert caught.value.field == "target"
    assert "not installed (gguf): pip install 'gammaray[worker,gguf]'" in caught.value.allowed
