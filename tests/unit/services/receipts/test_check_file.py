"""What `gammaray check` says of files without loading a model."""

import json
from dataclasses import replace

import pytest

from gammaray.errors import InvalidArgumentError
from gammaray.receipts.keys import b64, published, read_receipt_keys, rotate
from services.receipts.__main__ import check_file, summaries
from services.receipts.check import ReceiptVerdict
from tests.support.receipt_helpers import RECEIPT
from tests.support.scripted_http import scripted


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "receipts.json"
    rotate(path)
    return path


@pytest.fixture
def others(tmp_path):
    """A file with another key."""
    path = tmp_path / "other.json"
    rotate(path)
    return path


@pytest.fixture
def text(keys):
    """A receipt of the first key."""
    return RECEIPT.signed(read_receipt_keys(keys)[0])


@pytest.fixture
def refused(tmp_path, capsys):
    """Check the text of a file in which no receipt is valid; return the lines that are printed."""

    def check(text, key, **options):
        file = tmp_path / "receipts.txt"
        file.write_text(text)
        assert check_file(file, "/none", str(key), **options) == 2
        return capsys.readouterr().out.splitlines()

    return check


def test_check_refuses_without_loading_a_model(text, others, refused):
    cut, foreign = map(json.loads, refused(f"{text[:-9]}\n\n{text}\n", others, as_json=True))
    assert (cut["receipt"], cut["result"], foreign["result"]) == (1, "refused", "refused")
    assert "cut" in cut["reason"]
    assert "kid" in foreign["reason"]
    with pytest.raises(InvalidArgumentError, match="without receipts"):
        refused("\n", others)


def test_check_reads_keys_from_a_url(text, others, refused):
    with scripted(lambda path, body: (200, published(read_receipt_keys(others)))) as (url, _):
        (line,) = refused(text, url)
    assert read_receipt_keys(others)[0].kid in line
    with pytest.raises(InvalidArgumentError, match=f"key: got {url}"):
        refused(text, url)


NESTED = b"[" * 100_000
HEADER = b'{"alg":"EdDSA","kid":"\\u001b]0;title\\u0007\\u009b2J\\u202e\\ud800","typ":"gammaray-receipt"}'


@pytest.mark.parametrize(
    ("header", "payload"),
    [(NESTED, b"{}"), (HEADER, b'{"version":' + NESTED), (HEADER, b"null"), (HEADER, b'{"version":1}')],
)
def test_bad_line_is_refused_and_the_next_one_judged(text, tmp_path, refused, header, payload):
    keys = tmp_path / "none.json"
    keys.write_text('{"keys": []}')
    first, second = refused(f"{b64(header)}.{b64(payload)}.{b64(bytes(64))}\n{text}\n", keys)
    assert first.startswith("receipt 1: refused (dtype unknown): ")
    assert second.startswith("receipt 2: refused (float32): receipt.kid: got ")


def test_text_of_a_receipt_reaches_the_terminal_without_control_characters(text, keys, refused):
    _, payload, signature = text.split(".")
    (line,) = refused(f"{b64(HEADER)}.{payload}.{signature}\n", keys)
    assert line.isprintable()
    assert r"\u001b]0;title\u0007\u009b2J\u202e\ud800" in line


@pytest.mark.parametrize(("published_dtypes", "dtype"), [(["bfloat16"], None), (["float32"], "bfloat16")])
def test_receipt_of_another_dtype_than_demanded_is_refused(
    text, keys, tmp_path, refused, published_dtypes, dtype
):
    public = tmp_path / "public.json"
    public.write_text(json.dumps(published(read_receipt_keys(keys), published_dtypes)))
    (line,) = refused(text, public, dtype=dtype)
    assert "refused (float32): model_identity: got float32, allowed: bfloat16" in line


@pytest.mark.parametrize(
    ("dtype", "temperature", "ties", "count", "lines"),
    [
        ("bfloat16", 1.0, 0, 5000, 2),
        ("bfloat16", 1.0, 0, 4900, 1),  # an honest target might have none
        ("bfloat16", 1.0, 1, 5000, 1),
        ("bfloat16", 0.0, 0, 5000, 1),
        ("float32", 1.0, 0, 5000, 1),
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
    assert all(line.startswith("suspicious: none of 5000 sampled tokens") for line in found[1:])
