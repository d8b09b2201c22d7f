"""Generate gammaray/v1 from the protos; with --check, fail when the committed files are stale."""

import argparse
import filecmp
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
ROOT = PROTOS.parent
PACKAGE = Path("gammaray/v1")


def generate(out: Path) -> None:
    """Write messages, stubs and type stubs below `out`."""
    sources = sorted(str(p.relative_to(PROTOS)) for p in (PROTOS / PACKAGE).glob("*.proto"))
    well_known = str(Path(protoc.__file__).parent / "_proto")
    plugin = Path(sys.executable).parent / "protoc-gen-mypy"
    grpc_plugin = Path(sys.executable).parent / "protoc-gen-mypy_grpc"
    args = [
        "protoc",
        f"-I{PROTOS}",
        f"-I{well_known}",
        f"--plugin=protoc-gen-mypy={plugin}",
        f"--plugin=protoc-gen-mypy_grpc={grpc_plugin}",
        *(f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")),
        *sources,
    ]
    if protoc.main(args) != 0:
        raise SystemExit("protoc failed")
    for stub in (out / PACKAGE).glob("types_pb2_grpc.py*"):
        stub.unlink()  # types.proto has no service


def check() -> list[str]:
    """Return the names of committed generated files that differ from fresh ones."""
    with tempfile.TemporaryDirectory() as tmp:
        generate(Path(tmp))
        fresh = sorted(p.name for p in (Path(tmp) / PACKAGE).iterdir())
        committed = sorted(p.name for p in (ROOT / PACKAGE).glob("*_pb2*"))
        _, changed, missing = filecmp.cmpfiles(Path(tmp) / PACKAGE, ROOT / PACKAGE, fresh, shallow=False)
        return sorted({*changed, *missing, *(set(committed) - set(fresh))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if parser.parse_args().check:
        if stale := check():
            raise SystemExit(f"stale generated files: {', '.join(stale)}; run `make protos`")
    else:
        generate(ROOT)


if __name__ == "__main__":
    main()
