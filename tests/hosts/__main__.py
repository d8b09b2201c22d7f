"""`python -m tests.hosts`: what clients see of each fault of a host or of its link, as a table."""

import sys
import tempfile
from pathlib import Path

from tests.hosts.cluster import running
from tests.hosts.faults import FAULTS, suffer
from tests.hosts.network import missing


def main() -> int:
    """Print a row per fault; return 1 if a token was wrong or a stream failed."""
    if reason := missing():
        print(f"not run: {reason}")
        return 2
    failed = 0
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder, running(Path(folder)) as cluster:
        print(
            "| fault | lasts | longest pause | completions | wrong | errors |\n|---|---:|---:|---:|---:|---|"
        )
        for name, fault in FAULTS.items():
            seen = suffer(cluster, fault)
            times = f"{fault.lasts_s:g} s", f"{seen.pause_s:.2f} s"
            counts = str(seen.completions), str(len(seen.wrong))
            print(f"| {' | '.join((name, *times, *counts, '; '.join(seen.errors)))} |", flush=True)
            failed += len(seen.wrong) + len(seen.errors)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
