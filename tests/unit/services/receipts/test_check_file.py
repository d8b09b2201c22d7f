"""What `gammaray check` says of files without loading a model."""

import json

import pytest

from gammaray.errors import InvalidArgumentError
from gammaray.receipts.keys import published, read_receipt_keys, rotate
from services.receipts.__main__ import check_file
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
