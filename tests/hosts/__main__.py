"""`python -m tests.hosts`: what clients see of each fault of a host or of its link, as a table."""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from gammaray import RetryPolicy
from tests.chaos.run import Options, run
from tests.chaos.spans import table
from tests.hosts.cluster import running
from tests.hosts.faults import FAULTS, LAST, QUICK
from tests.hosts.network import missing

OPTIONS = Options(1e4, streams=4, over_http=0, max_tokens=96, deadline_s=200, resume_s=RetryPolicy().resume_s)


def main() -> int:
    """Print a row per fault; return 1 if a token was wrong or a stream failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="Fewer faults.")
    is_quick = parser.parse_args().quick
    if reason := missing():
        print(f"not run: {reason}")
        return 2
    failed = 0
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder, running(Path(folder)) as cluster:
        faults = QUICK if is_quick else FAULTS
        for heads, plan in ((cluster.heads, faults), (("head1",), [LAST])):
            cluster.heads = heads
            outcome = asyncio.run(run(cluster, OPTIONS, plan))
            print("", table(outcome), "", sep="\n", flush=True)
            failed += len(outcome.violations) or not outcome.finished
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
