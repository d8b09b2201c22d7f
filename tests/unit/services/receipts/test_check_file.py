"""What `gammaray check` says of files without loading a model."""

import json
from dataclasses import replace

import pytest

from gammaray.errors import InvalidArgumentError
from gammaray.receipts.keys import b64, published, read_receipt_keys, rotate
from services.receipts.__main__ import check_file, summaries
from services.receipts.check import ReceiptVerdict
from tests.support.receipt_helpers import made_up_receipt
from tests.support.scripted_http import scripted


@pytest.fixture
def path(tmp_path):
    return tmp_path / "receipts.json"


@pytest.fixture
def receipt():
    return made_up_receipt()


def test_check_refuses_without_loading_a_model(path, receipt, tmp_path, capsys):
    rotate(path)
    rotate(tmp_path / "other.json")
    text = receipt.signed(read_receipt_keys(path)[0])
    file = tmp_path / "receipts.txt"
    file.write_text(f"{text[:-9]}\n\n{text}\n")
    assert check_file(file, "/none", str(tmp_path / "other.json"), as_json=True) == 2
    cut, foreign = map(json.loads, capsys.readouterr().out.splitlines())
    assert (cut["receipt"], cut["result"], foreign["result"]) == (1, "refused", "refused")
    assert "cut" in cut["reason"]
    assert "kid" in foreign["reason"]
    file.write_text("\n")
    with pytest.raises(InvalidArgumentError, match="without receipts"):
        check_file(file, "/none")


def test_check_reads_keys_from_a_url(path, receipt, tmp_path, capsys):
    keys = published(rotate(path))
    rotate(tmp_path / "other.json")
    file = tmp_path / "receipts.txt"
    file.write_text(receipt.signed(read_receipt_keys(tmp_path / "other.json")[0]))
    with scripted(lambda path, body: (200, keys)) as (url, _):
        assert check_file(file, "/none", url) == 2
    assert read_receipt_keys(path)[0].kid in capsys.readouterr().out
    with pytest.raises(InvalidArgumentError, match=f"key: got {url}"):
        check_file(file, "/none", url)


NESTED = b"[" * 100_000
HEADER = b'{"alg":"EdDSA","kid":"\\u001b]0;title\\u0007\\u009b2J\\u202e\\ud800","typ":"gammaray-receipt"}'


@pytest.mark.parametrize(
    ("header", "payload"),
    [(NESTED, b"{}"), (HEADER, b'{"version":' + NESTED), (HEADER, b"null"), (HEADER, b'{"version":1}')],
)
def test_bad_line_is_refused_and_the_next_one_judged(path, receipt, tmp_path, capsys, header, payload):
    rotate(path)
    file = tmp_path / "receipts.txt"
    other = receipt.signed(read_receipt_keys(path)[0])
    file.write_text(f"{b64(header)}.{b64(payload)}.{b64(bytes(64))}\n{other}\n")
    keys = tmp_path / "other.json"
    keys.write_text('{"keys": []}')
    assert check_file(file, "/none", str(keys)) == 2
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("receipt 1: refused (dtype unknown): ")
    assert second.startswith("receipt 2: refused (float32): receipt.kid: got ")


def test_text_of_a_receipt_reaches_the_terminal_without_control_characters(path, receipt, tmp_path, capsys):
    rotate(path)
    file = tmp_path / "receipts.txt"
    _, payload, signature = receipt.signed(read_receipt_keys(path)[0]).split(".")
    file.write_text(f"{b64(HEADER)}.{payload}.{signature}\n")
    assert check_file(file, "/none", str(path)) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.isprintable()
    assert r"\u001b]0;title\u0007\u009b2J\u202e\ud800" in line


@pytest.mark.parametrize(("published_dtypes", "dtype"), [(["bfloat16"], None), (["float32"], "bfloat16")])
def test_receipt_of_another_dtype_than_demanded_is_refused(
    path, receipt, tmp_path, capsys, published_dtypes, dtype
):
    keys = tmp_path / "public.json"
    keys.write_text(json.dumps(published(rotate(path), published_dtypes)))
    file = tmp_path / "receipts.txt"
    file.write_text(receipt.signed(read_receipt_keys(path)[0]))
    assert check_file(file, "/none", str(keys), dtype=dtype) == 2
    assert "refused (float32): model_identity: got float32, allowed: bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("dtype", "temperature", "ties", "count", "lines"),
    [
        ("bfloat16", 1.0, 0, 1400, 2),
        ("bfloat16", 1.0, 0, 1300, 1),  # an honest target might have none
        ("bfloat16", 1.0, 1, 1400, 1),
        ("bfloat16", 0.0, 0, 1400, 1),
        ("float32", 1.0, 0, 1400, 1),
    ],
)
def test_receipts_without_a_tie_are_suspicious_where_rounding_must_show(
    dtype, temperature, ties, count, lines
):
    one = ReceiptVerdict("valid", "", dtype, temperature, count // 2, margin=1.0)
    found = list(summaries([one, replace(one, num_ties=ties), replace(one, result="invalid")]))
    assert len(found) == lines
    assert found[0] == (
        f"valid in {dtype}, margin 1: 2 receipts, {count} tokens, {ties} of them within the margin only"
    )
    assert all(line.startswith("suspicious: none of 1400 sampled tokens") for line in found[1:])
