"""llama.cpp's server without a compiler: the package `xllamacpp` has it, built for x86-64 with AVX2.

    python -m benchmarks.peers.llama_package          # build/llama-server, in an environment of its own
    LLAMA_SERVER=build/llama-server python -m benchmarks.peers --target MODEL_DIR --gguf MODEL.gguf

The script that this makes takes the options of llama-server that the comparison uses. A llama-server that was
compiled for the machine itself can be faster: results name the program they were measured with.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = "xllamacpp==2026.10.11549"
SCRIPT = Path("build/llama-server")
ENVIRONMENT = Path("build/llama")


def make(script: Path, environment: Path) -> None:
    """Install the package into an environment and write the script that starts its server.

    Raises:
        CalledProcessError: The environment could not be made, or pip failed.
    """
    python = environment.resolve() / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--only-binary", ":all:", PACKAGE], check=True)
    own = environment.resolve() / "server.py"
    shutil.copyfile(Path(__file__).with_name("llama_package_server.py"), own)
    script.write_text(f'#!/bin/sh\nexec "{python}" "{own}" "$@"\n')
    script.chmod(0o755)


def main() -> int:
    """Make the script; return the exit status."""
    try:
        make(SCRIPT, ENVIRONMENT)
    except subprocess.CalledProcessError as error:
        print(f"llama_package: {error}", file=sys.stderr)
        return 1
    print(f"{SCRIPT}: llama.cpp's server from {PACKAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
