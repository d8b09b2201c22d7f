"""`gammaray check`: whether the tokens of receipts follow from the target, the parameters and the seed.

Exit codes in addition to those of every command: 0 all receipts are valid; 1 at least one is not; 2 none is
invalid, but at least one cannot be checked.
"""

from __future__ import annotations

from typing import Any

import click

from gammaray.cli.program import WORKER_PACKAGES, Program, become, check_packages
from gammaray.program.shared_options import CHECK_PARAMS


@click.command(
    cls=Program,
    params=list(CHECK_PARAMS),
    help="Check receipts of completions against the target.\n\nRECEIPTS is a file with one receipt per line; "
    "each takes one forward pass. The target is loaded as its worker would, with the settings of the "
    "environment.",
)
def check(**options: Any) -> None:
    check_packages("check", WORKER_PACKAGES, "worker")
    become("services.receipts")
