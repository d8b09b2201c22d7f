"""Soaks a cluster of its own: `python -m tests.soak --minutes 30 --seed 0`, or `make soak`.

Starts a cluster with `gammaray up`, keeps clients of every kind busy, and looks every half minute, while
nothing runs, what its processes and its Redis hold. Exits with 1 when something grew, when a completion with
a fixed seed was not what it had been at the start, or when anything is left in the end.
"""

import argparse
import asyncio
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from redis import Redis

from benchmarks.provenance import write_result
from orchestrator.launcher.redis_server import RedisServer
from tests.soak.samples import Apis
from tests.soak.soak_census import Observer
from tests.soak.soak_run import CLUSTERS, TTL_S, Options, Outcome, figures, run, table
from tests.soak.tenants import Tenants
from tests.support.cluster.cluster_helpers import running_cluster


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="How long. Default: 30.")
    parser.add_argument("--seed", type=int, default=0, help="Of every choice. Default: 0.")
    parser.add_argument("--clients", type=int, default=6, help="How many do something at once. Default: 6.")
    parser.add_argument("--out", type=Path, help="Result file. Default: benchmarks/results/soak-<date>.json.")
    parser.add_argument("--engine", default="auto", choices=CLUSTERS, help="Of the workers. Default: auto.")
    given = parser.parse_args()
    options = Options(given.minutes * 60, given.seed, given.clients)
    with TemporaryDirectory() as folder:
        outcome = soak(Path(folder), options, given.engine)
    print("", table(outcome), "", sep="\n")
    print("written:", write_result("soak", figures(outcome, options), given.out))
    return 1 if outcome.complaints() else 0


def soak(folder: Path, options: Options, engine: str) -> Outcome:
    """Run on a cluster of its own, whose workers have an engine."""
    tenants = Tenants(folder) if engine == "learning" else None
    arguments = [*CLUSTERS[engine], *(tenants.options if tenants else ())]
    # A Redis as the launcher would start it, whose password is known here: it is asked what it holds.
    with RedisServer.start(folder / "redis") as server, Redis.from_url(server.url) as redis:
        arguments += ["--redis-url", server.url]
        with (
            patch.dict(os.environ, {"GAMMARAY_SESSION_TTL_S": str(TTL_S)}),
            running_cluster(*arguments) as cluster,
        ):
            apis = Apis(cluster.grpc, cluster.http, tenants.key if tenants else None)
            observer = Observer(apis, cluster.launcher.pid, redis)
            return asyncio.run(run(apis, observer, options, tenants))


if __name__ == "__main__":
    sys.exit(main())
