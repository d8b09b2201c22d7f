"""Run other projects' clients against a cluster: python -m benchmarks.clients [NAME ...]"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.clients.environments import ensure_environment, pinned_version
from benchmarks.clients.programs import PROGRAMS, ClientError, Program, Server
from benchmarks.cluster import run_or_exit, running_cluster
from benchmarks.provenance import make_parser, write_result
from services.demo_pair import TARGET_DIR


async def measure(programs: list[Program]) -> list[dict[str, Any]]:
    """Run the programs one after another against one cluster; return a row for each."""
    for client in sorted({program.client for program in programs}):
        ensure_environment(client)
    async with running_cluster() as cluster:
        server = Server(cluster.http_address, "demo", TARGET_DIR)
        return [await asyncio.to_thread(_row, program, server) for program in programs]


def _row(program: Program, server: Server) -> dict[str, Any]:
    print(f"running {program.name}", file=sys.stderr, flush=True)
    row: dict[str, Any] = {"name": program.name, "version": pinned_version(program.client)}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gammaray-client-") as folder:
        try:
            outcome = program.run(server, Path(folder))
            row |= vars(outcome)
        except ClientError as error:
            row |= {"succeeded": 0, "total": 0, "figures": {}, "error": str(error)}
    return {**row, "seconds": round(time.perf_counter() - began, 1)}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = ["| client | version | works | what it reports |", "|---|---|---|---|"]
    for row in rows:
        figures = "; ".join(f"{name} {_short(value)}" for name, value in row["figures"].items())
        works = f"{row['succeeded']}/{row['total']}" if "error" not in row else "fails"
        lines.append(f"| {row['name']} | {row['version']} | {works} | {row.get('error', figures)} |")
    return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Run, print the table, write the result; return 0 if everything worked."""
    parser = make_parser(__doc__)
    names = sorted({program.client for program in PROGRAMS})
    parser.add_argument("clients", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; default all")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.clients) - set(names)):
        parser.error(f"no client {', '.join(unknown)}; there are {', '.join(names)}")
    programs = [one for one in PROGRAMS if one.client in (arguments.clients or names)]
    try:
        rows = run_or_exit(measure(programs))
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    print(table(rows))
    print(f"written: {write_result('clients', {'clients': rows}, arguments.out)}", file=sys.stderr)
    return 0 if all("error" not in row and row["succeeded"] == row["total"] > 0 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
