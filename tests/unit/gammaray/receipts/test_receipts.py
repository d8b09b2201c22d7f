"""Receipts without a model: form, signature, keys, and what the commands say."""

import json
import stat

import pytest

from gammaray.client.request import build_request
from gammaray.errors import InvalidArgumentError
from gammaray.receipts.keys import b64, parse_keys, published, read_receipt_keys, rotate, unb64
from gammaray.receipts.receipt import Receipt, SignedReceipt
from tests.support.cli_helpers import invoke
from tests.support.receipt_helpers import RECEIPT


@pytest.fixture
def path(tmp_path):
    return tmp_path / "receipts.json"


@pytest.fixture
def key(path):
    rotate(path)
    return read_receipt_keys(path)[0]


def test_receipt_survives_its_text(key):
    text = RECEIPT.signed(key)
    found = SignedReceipt.parse(text)
    assert found.receipt == RECEIPT
    assert found.kid == key.kid
    found.check((key.public,))
    header, payload, _ = text.split(".")
    assert json.loads(unb64(header)) == {"alg": "EdDSA", "kid": key.kid, "typ": "gammaray-receipt"}
    assert json.loads(unb64(payload))["sampling"]["seed"] == 2**64 - 1
    # Integers in place of numbers give the same text.
    values = RECEIPT.model_dump() | {"sampling": {"temperature": 1, "top_p": 1, "seed": 0}}
    SignedReceipt.parse(Receipt.model_validate(values).signed(key))


def changed(text, part, change):
    parts = text.split(".")
    values = change(json.loads(unb64(parts[part])))
    parts[part] = b64(json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode())
    return ".".join(parts)


OTHER = {
    **{"version": 2, "verification": "naive", "finish_reason": "length", "sampling": {"seed": 1}},
    **dict.fromkeys(("model", "model_identity", "tokenizer", "grammars"), "x"),
    **{name: [1] for name in ("eos_token_ids", "prompt_token_ids", "stop_token_ids", "token_ids")},
    **{"issued_at": 1, "max_tokens": 1, "stop": [], "ignore_eos": True},
}
"""Another value of each field."""


def test_change_of_any_field_is_found(key):
    assert OTHER.keys() == Receipt.model_fields.keys()
    # The other sampling parameters are missing, which this server always writes.
    others = {"version": "receipt.version", "sampling": "receipt"}
    for field, value in OTHER.items():
        text = changed(RECEIPT.signed(key), 1, lambda values, own=(field, value): {**values, own[0]: own[1]})
        with pytest.raises(InvalidArgumentError) as caught:
            SignedReceipt.parse(text).check((key,))
        assert caught.value.field == others.get(field, "receipt.signature")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:-1], "cut"),
        (lambda text: text[:50], "cut"),
        (lambda text: "", "cut"),
        (lambda text: text + ".", "cut"),
        (lambda text: text.replace(".", "!", 1), "cut"),
        (lambda text: "é" + text, "cut"),
        (lambda text: changed(text, 0, lambda h: {**h, "alg": "none"}), "another form"),
        (lambda text: changed(text, 0, lambda h: {**h, "typ": "JWT"}), "another form"),
        (lambda text: changed(text, 0, lambda h: []), "cut"),
        (lambda text: changed(text, 1, lambda v: {**v, "extra": 1}), "invalid at extra"),
        (lambda text: changed(text, 1, lambda v: {**v, "token_ids": [-1.5]}), "invalid at token_ids"),
        (lambda text: changed(text, 1, lambda v: {**v, "issued_at": 1.0}), "does not write"),
        (lambda text: changed(text, 1, lambda v: {**v, "sampling": {**v["sampling"], "x": 1}}), "sampling.x"),
        (lambda text: changed(text, 1, lambda v: {**v, "sampling": {**v["sampling"], "top_p": 7}}), "top_p"),
        (lambda text: changed(text, 1, lambda v: {**v, "version": "2"}), "version: got 2"),
    ],
)
def test_what_is_no_receipt_is_refused(key, change, words):
    with pytest.raises(InvalidArgumentError, match=words):
        SignedReceipt.parse(change(RECEIPT.signed(key)))


def test_signature_of_another_key_is_refused(key, tmp_path):
    rotate(tmp_path / "other.json")
    (other,) = read_receipt_keys(tmp_path / "other.json")
    found = SignedReceipt.parse(RECEIPT.signed(key))
    with pytest.raises(InvalidArgumentError, match=r"receipt\.kid"):
        found.check((other,))
    with pytest.raises(InvalidArgumentError, match="a bad signature"):
        found.check((other.model_copy(update={"kid": key.kid}),))


def test_rotation_keeps_public_keys_and_forgets_private_ones(path, key):
    text = RECEIPT.signed(key)
    listed = rotate(path)
    former, latest = read_receipt_keys(path)
    assert former == key.public
    assert latest.d is not None
    assert listed == (former, latest.public)
    assert published((former, latest)) == published(listed)
    assert latest.d not in json.dumps(published((former, latest)))
    assert latest.d not in repr(latest)
    SignedReceipt.parse(text).check(listed)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text(json.dumps(published(listed)))
    with pytest.raises(InvalidArgumentError, match="without a private key"):
        read_receipt_keys(path)


def test_invalid_key_file_is_reported_without_its_content(path):
    for content in (b"", b"[]", b'{"keys": []}', b'{"keys": [{"kty": "RSA", "kid": "a", "x": ""}]}', b"\xff"):
        path.write_bytes(content)
        with pytest.raises(InvalidArgumentError, match="receipt_keys_file: got"):
            read_receipt_keys(path)
        assert invoke("keys", "receipts", "--file", path).exit_code == 2
        assert path.read_bytes() == content


def test_keys_command_prints_public_keys(path):
    for number in (1, 2):
        result = invoke("keys", "receipts", "--file", path)
        assert result.exit_code == 0
        listed = parse_keys(result.stdout.encode(), "stdout")
        assert [key.d for key in listed.keys] == [None] * number
        assert listed.keys[-1].kid in result.stderr


def test_request_for_a_receipt_with_another_method_is_refused():
    for method in ("rejection", "block", "naive"):
        with pytest.raises(InvalidArgumentError, match=f"receipt: got true with {method} verification"):
            build_request("a", receipt=True, verification=method)
    assert build_request("a", receipt=True).receipt
