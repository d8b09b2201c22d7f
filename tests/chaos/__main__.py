"""Chaos on a cluster of its own: `python tests/chaos --minutes 5 --seed 0`, or `make chaos`.

Starts two orchestrators, two draft and two target workers and a Redis, keeps streams running, kills and stops
processes and has Redis fail in an order that the seed decides, and compares each stream with what an
undisturbed cluster said.
Exits with 1 when a stream was lost, or a token was lost, repeated or changed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryFile

TESTS = Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(TESTS / "e2e"), str(TESTS.parent)]

from chaos_redis import chaos_redis  # noqa: E402
from cluster_helpers import running_cluster  # noqa: E402
from report import figures, table  # noqa: E402
from run import CLUSTER, Options, run  # noqa: E402
from victims import ROLES  # noqa: E402

from gammaray.bench.provenance import write_result  # noqa: E402


def main() -> int:
    """Run and print; return the exit status."""
    parser = argparse.ArgumentParser(prog="python tests/chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="How long strikes go on. Default: 5.")
    parser.add_argument("--seed", type=int, default=0, help="Of the order of strikes. Default: 0.")
    parser.add_argument("--streams", type=int, default=16, help="Streams at one time. Default: 16.")
    parser.add_argument("--tokens", type=int, default=400, help="Tokens of each completion. Default: 400.")
    parser.add_argument("--roles", default=",".join(ROLES), help="Who is struck. Default: all.")
    parser.add_argument("--json", type=Path, help="Where to write the result.")
    given = parser.parse_args()
    roles = tuple(given.roles.split(","))
    if unknown := set(roles) - set(ROLES):
        parser.error(f"--roles: got {', '.join(sorted(unknown))}, allowed: {', '.join(ROLES)}")
    options = Options(given.minutes * 60, given.seed, given.streams, given.tokens, roles=roles)
    with TemporaryFile("w+") as complaints:  # Ray tells of every death
        try:
            with chaos_redis() as redis:
                own = ("--redis-url", redis.server.url)
                with running_cluster(*CLUSTER, *own, stderr=complaints.fileno()) as cluster:
                    outcome = asyncio.run(run(cluster, redis, options, lambda line: print(line, flush=True)))
        except BaseException:
            complaints.seek(0)
            print(complaints.read()[-4000:], file=sys.stderr)
            raise
    print("", table(outcome), sep="\n")
    if given.json is not None:
        write_result("chaos", figures(outcome, options), given.json)
    return 0 if outcome.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
