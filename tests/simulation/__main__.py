"""Simulates the cluster under faults: `python -m tests.simulation --seeds 0:200`.

Prints the schedules explored, the faults injected by kind, and for each seed that fails the shortest history
that still fails. With `--mutants` it plants faults into the product and prints after how many seeds each is
found.
"""

import argparse
import os
import sys


def main() -> int:
    """Run the command; return 1 if a seed failed, or a mutant was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:200", help="A:B, from A up to B, or A,B,... (default: 0:200)")
    parser.add_argument("--mutants", nargs="*", metavar="NAME", help="plant these faults; none named: all")
    parser.add_argument("--limit", type=int, default=2000, help="seeds after which a mutant counts as missed")
    parser.add_argument("--plant", metavar="NAME", help="plant this fault; stop at the first seed that fails")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of strings is part of a schedule
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])

    from tests.simulation.mutants import hunt, plant

    if options.mutants is not None:
        return 1 if hunt(options.mutants, options.limit) else 0
    if options.plant:
        plant(options.plant)

    from tests.simulation.campaign import laboratory, run_seeds, shortest

    first, _, end = options.seeds.partition(":")
    seeds = range(int(first), int(end)) if end else [int(seed) for seed in first.split(",")]
    with laboratory() as real:
        report = run_seeds(seeds, real, ends_at_failure=bool(options.plant))
        print(report)
        for seed in report.failures:
            faults, failure = shortest(seed, real)
            print(f"\nseed {seed}: {failure}\n  " + "\n  ".join(map(str, faults or ["no fault is needed"])))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
