"""Fuzzes a cluster of its own: `python -m tests.fuzz --seconds 600 --seed 0`, or `make fuzz`.

The HTTP API gets malformed bodies, headers and connections, and whatever schemathesis makes of its OpenAPI
document; the gRPC API and the workers' own ports get messages that were tampered with; a real orchestrator
gets drafters and targets that break their contract. Then each field of a request is grown to its limit
beside a stream of another client, while the memory of every process is watched. Exits with 1 when anything
was refused without a type, hung, crashed, changed a token, delayed that stream, or when a process holds
more afterwards than before.
"""

import argparse
import subprocess
import sys

from tests.fuzz.fuzz_run import run
from tests.support.cluster.cluster_helpers import running_cluster


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="How long. Default: 600.")
    parser.add_argument("--seed", type=int, default=0, help="Of every choice. Default: 0.")
    given = parser.parse_args()
    with running_cluster(stderr=subprocess.DEVNULL) as cluster:
        campaign = run(cluster, given.seconds, given.seed)
    print(campaign)
    return 1 if campaign.num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
